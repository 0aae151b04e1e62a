"""The variables of the submission's scripts, and its one line of results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.cluster.hosts import Cluster, Host
from gaudi_distributed.errors import ConfigurationError, FlagError, MissingProgramError
from gaudi_distributed.launch.cli import launch
from gaudi_distributed.launch.experiments import describe_result, list_clearing, list_experiments
from gaudi_distributed.launch.flags import Options, parse_flags
from gaudi_distributed.launch.processes import LaunchPlan

Plan = Callable[..., str]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a user who has everything."""
    folders = {"DATADIR": "data", "LOGDIR": "results", "PRETRAINED_DIR": "weights"}
    for folder in ("data/coco2017", "weights"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "weights" / "resnet34-333f7ec4.pickle").touch()
    (tmp_path / "weights" / "resnet34.pth").touch()
    (tmp_path / "weights" / "README").touch()
    paths = {name: str(tmp_path / folder) for name, folder in folders.items()}
    return {"SYSTEM": "DSS8440", "CONT": "registry/ssd:1", "NEXP": "2", **paths}


def list_options(words: str, environ: dict[str, str]) -> list[Options]:
    return [each.options for each in list_experiments(parse_flags(words.split()), environ)]


def test_without_the_flag_the_variables_mean_nothing(variables: dict[str, str]) -> None:
    options = parse_flags(["--np", "2", "ssd_train"])
    assert [each.options for each in list_experiments(options, variables)] == [options]


def list_given(system: str, number: int, data: object, results: object, weights: object) -> tuple[str, ...]:
    """Return the program's arguments of an experiment."""
    return (
        *("ssd_mxnet_train", "--seed", str(number), "--async_val"),
        *("--dataset_size", "117266", "--eval_dataset_size", "5000"),
        *("--mlperf", "--mlperf_division", "closed", "--mlperf_status", "onprem", "--mlperf_platform", system),
        *("--coco_root", str(data), "--pretrained_backbone", str(weights)),
        *("--model_dir", f"{results}/{system.lower()}_{number}"),
    )


def test_experiments_in_docker(variables: dict[str, str], tmp_path: Path) -> None:
    launches = list_options("--submission --grace 9 ssd_mxnet_train --mlperf_org me", variables)
    weights = "/pretrained/resnet34-333f7ec4.pickle"
    assert [each.command for each in launches] == [
        (*list_given("DSS8440", number, "/data/coco2017", "/results", weights), "--mlperf_org", "me")
        for number in (1, 2)
    ]
    for each in launches:
        assert (each.preset, each.container, each.image, each.grace) == ("dss8440", "docker", "registry/ssd:1", 9)
        assert set(each.mount) == {
            *(f"{tmp_path}/data:/data:ro", f"{tmp_path}/results:/results"),
            f"{tmp_path}/weights:/pretrained:ro",
        }


def test_without_a_container_the_folders_are_taken_as_they_are(variables: dict[str, str], tmp_path: Path) -> None:
    del variables["CONT"]
    variables["NEXP"] = "1"
    (only,) = list_options("--submission", variables)
    weights = tmp_path / "weights" / "resnet34-333f7ec4.pickle"
    assert only.command == list_given("DSS8440", 1, tmp_path / "data" / "coco2017", tmp_path / "results", weights)
    assert (only.container, only.mount) == ("none", ())


def test_each_experiment_has_a_seed_and_a_log_of_its_own(variables: dict[str, str], tmp_path: Path) -> None:
    del variables["NEXP"]
    experiments = list_experiments(parse_flags(["--submission"]), {**variables, "DATESTAMP": "200601"})
    assert [(each.number, each.count, each.clears_caches) for each in experiments] == [
        (number, 5, True) for number in range(1, 6)
    ]
    assert [each.log for each in experiments] == [tmp_path / "results" / f"200601_{n}.log" for n in range(1, 6)]
    assert [each.options.command[2] for each in experiments] == ["1", "2", "3", "4", "5"]
    (first, *_) = list_experiments(parse_flags(["--submission"]), {**variables, "CLEAR_CACHES": "0"})
    assert not first.clears_caches
    assert first.log is not None
    assert re.fullmatch(r"\d{18}_1\.log", first.log.name)
    (only,) = list_experiments(parse_flags(["--np", "2", "ssd_train"]), variables)
    assert (only.log, only.clears_caches) == (None, False)


def test_the_epochs_of_the_scripts_are_those_of_the_variable(variables: dict[str, str]) -> None:
    (first, _) = list_options("--submission", {**variables, "NUMEPOCHS": "3"})
    assert first.command[first.command.index("--epochs") + 1] == "3"


def test_a_data_set_may_be_the_folder_itself(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "own" / "annotations").mkdir(parents=True)
    del variables["CONT"]
    (first, _) = list_options("--submission", {**variables, "DATADIR": f"{tmp_path}/own"})
    assert first.command[first.command.index("--coco_root") + 1] == f"{tmp_path}/own"


def test_what_the_user_gives_needs_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = "--synthetic --pretrained-backbone=a.pth --seed 7"
    (only,) = list_options(f"--submission ssd_mxnet_train {own}", {"SYSTEM": "2xc4140", "NEXP": "1"})
    assert only.preset == "2xc4140"
    assert "--coco_root" not in only.command
    assert only.command[-6:] == ("--model_dir", f"{tmp_path}/results/2xc4140_1", *own.split())
    assert list(tmp_path.iterdir()) == []


def test_the_systems_program_runs_behind_the_preset(plan: Plan, variables: dict[str, str]) -> None:
    """In Docker a launcher inside makes the ranks; its arguments are what the outer one prints."""
    text = plan("--submission", variables)
    inner = text.partition("    registry/ssd:1\n")[2].split()
    assert inner[:4] == ["gaudi-run", "--preset", "dss8440", "ssd_mxnet_train"]
    assert text.count("docker\n    run\n") == 2
    del variables["CONT"]
    direct = plan("--submission", variables)
    assert "--system\n    DSS8440\n    --seed\n    1\n    --async_val\n" in direct
    assert f"    --coco_root\n    {variables['DATADIR']}/coco2017\n" in direct


def test_a_job_of_slurm_reads_the_variables_again(plan: Plan, variables: dict[str, str]) -> None:
    variables |= {"SYSTEM": "4xC4140", "CONT": "ssd.sif"}
    script = plan("--submission --slurm_script - ssd_mxnet_train --mlperf", variables)
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=4\n" in script
    names = "CONT,DATADIR,LOGDIR,NEXP,PATH,PRETRAINED_DIR,PYTHONPATH,SYSTEM,TF_CPP_MIN_LOG_LEVEL"
    assert f"#SBATCH --export={names}\n" in script
    assert [line.split()[0] for line in script.splitlines()[-5:]] == [
        *("-m", "gaudi_distributed.launch", "--submission", "ssd_mxnet_train", "--mlperf")
    ]
    nodes = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "4(x4)"}
    inside = plan("--submission ssd_mxnet_train --mlperf", {**variables, **nodes})
    assert inside.count("16 ranks on n1:4, n2:4, n3:4, n4:4 by openmpi") == 2
    assert "    singularity\n    exec\n    --nv\n    --bind\n" in inside
    assert "    ssd.sif\n    ssd_mxnet_train\n    --system\n    4xC4140\n    --seed\n    2\n    --async_val\n" in inside


@pytest.mark.parametrize(
    ("words", "changes", "error", "subject", "named"),
    [
        ("--submission", {"SYSTEM": ""}, ConfigurationError, "SYSTEM", "one of dss8440, c4140, 2xc4140"),
        ("--submission", {"SYSTEM": "habana-8"}, ConfigurationError, "SYSTEM", "'habana-8'"),
        ("--submission", {"NEXP": "0"}, ConfigurationError, "NEXP", "'0'"),
        ("--submission", {"NEXP": "2; id"}, ConfigurationError, "NEXP", "'2; id'"),
        ("--submission", {"DATADIR": "/no/folder"}, MissingProgramError, "DATADIR", "'/no/folder'"),
        ("--submission", {"DATADIR": "/usr/lib"}, MissingProgramError, "DATADIR", "coco2017"),
        ("--submission", {"PRETRAINED_DIR": ""}, ConfigurationError, "PRETRAINED_DIR", "--pretrained_backbone"),
        ("--submission", {"PRETRAINED_DIR": "/no/folder"}, MissingProgramError, "PRETRAINED_DIR", "'/no/folder'"),
        ("--submission", {"PRETRAINED_DIR": "/"}, MissingProgramError, "PRETRAINED_DIR", "no file of"),
        ("--submission", {"CLEAR_CACHES": "yes"}, ConfigurationError, "CLEAR_CACHES", "'yes'"),
        ("--submission", {"DATESTAMP": "../x"}, ConfigurationError, "DATESTAMP", "'../x'"),
        ("--submission", {"NUMEPOCHS": "-1"}, ConfigurationError, "NUMEPOCHS", "'-1'"),
        ("--submission --image other", {}, FlagError, "--image", "registry/ssd:1"),
        ("--submission --preset c4140", {}, FlagError, "--submission", "--preset"),
        ("--submission ssd_train", {}, FlagError, "--preset", "not ssd_train"),
        ("--submission", {"CONT": "--privileged"}, FlagError, "--image", "expected one argument"),
        ("--submission", {"CONT": "a b"}, FlagError, "--image", "'a b'"),
    ],
)
def test_what_is_refused(
    words: str,
    changes: dict[str, str],
    error: type[ConfigurationError],
    subject: str,
    named: str,
    plan: Plan,
    variables: dict[str, str],
) -> None:
    with pytest.raises(error) as caught:
        plan(words, {**variables, **changes})
    assert (caught.value.flag or caught.value.field) == subject
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_files_of_weights_are_refused(plan: Plan, variables: dict[str, str]) -> None:
    folder = Path(variables["PRETRAINED_DIR"])
    (folder / "resnet34-333f7ec4.pickle").rename(folder / "own.pickle")
    with pytest.raises(MissingProgramError, match=r"\(own.pickle, resnet34.pth\)") as caught:
        plan("--submission", variables)
    assert (caught.value.field, caught.value.path) == ("PRETRAINED_DIR", str(folder))


def test_a_line_of_results() -> None:
    line = describe_result(
        "SINGLE_STAGE_DETECTOR", datetime(2020, 6, 1, 13, 5), datetime(2020, 6, 1, 13, 40, 1), {"USER": "me"}
    )
    assert line == "RESULT,SINGLE_STAGE_DETECTOR,,2101,me,2020-06-01 01:05:00 PM"


@dataclass(frozen=True)
class Ended:
    """Hold the result of a submission: status, standard output and error, and its logs by name."""

    status: int
    out: str
    err: str
    logs: dict[str, str]


# Prints its arguments and what it was told of the caches.
PROGRAM = """#!{python}
import os, sys
print(" ".join(sys.argv[1:]), "caches", os.environ.get("GAUDI_RUN_CACHES_CLEARED"))
sys.exit({status})
"""


@pytest.fixture
def submit(variables: dict[str, str], tmp_path: Path) -> Callable[..., Ended]:
    """Run a submission with real ranks, on a machine whose sync and sysctl note that they were called."""

    def run(*, status: int = 0, sysctl: int = 0, **more: str) -> Ended:
        tools = tmp_path / "bin"
        tools.mkdir()
        calls = f'echo "$(basename "$0") $@" >> {tmp_path}/calls'
        scripts = {
            "ssd_mxnet_train": PROGRAM.format(python=sys.executable, status=status),
            "sync": f"#!/bin/sh\n{calls}\n",
            "sysctl": f"#!/bin/sh\n{calls}\n[ {sysctl} -eq 0 ] || echo not permitted >&2\nexit {sysctl}\n",
            "sudo": '#!/bin/sh\nshift\nexec "$@"\n',
        }
        for name, text in scripts.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environ |= {**variables, "SYSTEM": "c4140", "USER": "me", "DATESTAMP": "now", **more}
        environ |= {"PATH": f"{tools}:{os.environ['PATH']}", "CONT": ""}
        launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--submission", "--backend", "multi_worker"]
        done = subprocess.run(launcher, env=environ, capture_output=True, text=True, timeout=120)
        logs = {path.name: path.read_text() for path in (tmp_path / "results").glob("*.log")}
        return Ended(done.returncode, done.stdout, done.stderr, logs)

    return run


@pytest.mark.costly
def test_experiments_run_one_after_another_with_logs_of_their_own(submit: Callable[..., Ended], tmp_path: Path) -> None:
    done = submit(NEXP="2")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    for number, experiment in ((1, lines[:5]), (2, lines[5:])):
        assert len(set(experiment[:4])) == 1
        assert experiment[0].startswith(f"--system C4140 --seed {number} --async_val ")
        assert experiment[0].endswith(" caches 1")
        assert re.fullmatch(r"RESULT,SINGLE_STAGE_DETECTOR,,\d+,me,\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [AP]M", experiment[4])
        assert [line for line in done.logs[f"now_{number}.log"].splitlines() if "gaudi-run" not in line] == experiment
    assert (tmp_path / "calls").read_text().splitlines() == ["sync ", "sysctl -q vm.drop_caches=3"] * 2


@pytest.mark.costly
def test_an_experiment_that_fails_ends_the_submission(submit: Callable[..., Ended]) -> None:
    done = submit(NEXP="2", status=3)
    assert done.status == 3
    assert set(done.logs) == {"now_1.log"}
    assert "RESULT" not in done.out + done.logs["now_1.log"]
    assert done.logs["now_1.log"].splitlines()[-1] == done.err.splitlines()[-1]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("more", "told", "calls"),
    [({"sysctl": 1}, "0", 2), ({"CLEAR_CACHES": "0"}, "None", 0)],
)
def test_caches_that_are_not_cleared_are_told_to_be_so(
    submit: Callable[..., Ended], tmp_path: Path, more: dict[str, Any], told: str, calls: int
) -> None:
    done = submit(NEXP="1", **more)
    assert done.status == 0, done.err
    assert done.out.splitlines()[0].endswith(f" caches {told}")
    assert ("not permitted" in done.err) == ("not permitted" in done.logs["now_1.log"]) == (told == "0")
    assert ((tmp_path / "calls").read_text().count("\n") if calls else 0) == calls


def test_a_dry_run_shows_all_and_does_nothing(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    status = launch(["--submission", "--dry_run"], {**variables, "DATESTAMP": "now", "PATH": os.environ["PATH"]})
    shown = capsys.readouterr().out
    assert status == 0
    assert [line for line in shown.splitlines() if line.startswith(("trial", "log"))] == [
        line for n in (1, 2) for line in (f"trial {n} of 2", f"log {tmp_path}/results/now_{n}.log")
    ]
    assert shown.count("vm.drop_caches=3") == 2
    assert not (tmp_path / "results").exists()


def test_the_caches_of_other_hosts_are_cleared_there() -> None:
    cluster = Cluster((Host("here", 4), Host("there", 4)))
    plan = LaunchPlan(cluster, ("program",), local_hosts=frozenset({"here"}), is_root=True)
    by_ssh = dict(list_clearing(plan, {"PATH": "/usr/bin"})[2:])
    assert by_ssh["there"][:2] == ("ssh", "-T")
    assert by_ssh["there"][-2:] == ("there", "/sbin/sysctl -q vm.drop_caches=3")
    commands = list_clearing(replace(plan, is_root=False), {"PATH": "/usr/bin", "SLURM_JOB_ID": "1"})
    assert [host for host, _ in commands] == ["here", "here", "there", "there"]
    assert commands[1][1][:2] == ("sudo", "-n")
    assert commands[3][1][0] == "srun"
    assert commands[3][1][-6:] == ("--", "sudo", "-n", "/sbin/sysctl", "-q", "vm.drop_caches=3")
