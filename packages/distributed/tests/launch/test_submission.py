"""The variables of the submission's scripts, and its one line of results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from gaudi_distributed.errors import ConfigurationError, FlagError, MissingProgramError
from gaudi_distributed.launch.flags import Options, parse_flags
from gaudi_distributed.launch.submission import describe_result, list_launches

Plan = Callable[..., str]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The variables of a user who has everything."""
    folders = {"DATADIR": "coco", "LOGDIR": "results", "PRETRAINED_DIR": "weights"}
    for folder in folders.values():
        (tmp_path / folder).mkdir()
    (tmp_path / "weights" / "resnet34-333f7ec4.pickle").touch()
    (tmp_path / "weights" / "README").touch()
    paths = {name: str(tmp_path / folder) for name, folder in folders.items()}
    return {"SYSTEM": "DSS8440", "CONT": "registry/ssd:1", "NEXP": "2", **paths}


def list_options(words: str, environ: dict[str, str]) -> list[Options]:
    return list_launches(parse_flags(words.split()), environ)


def test_without_the_flag_the_variables_mean_nothing(variables: dict[str, str]) -> None:
    options = parse_flags(["--np", "2", "ssd_train"])
    assert list_launches(options, variables) == [options]


def test_experiments_in_docker(variables: dict[str, str], tmp_path: Path) -> None:
    launches = list_options("--submission --grace 9 ssd_mxnet_train --mlperf", variables)
    assert [each.command for each in launches] == [
        (
            *(
                "ssd_mxnet_train",
                "--seed",
                str(number),
                "--coco_root",
                "/data",
                "--model_dir",
                f"/results/dss8440_{number}",
            ),
            *("--pretrained_backbone", "/pretrained/resnet34-333f7ec4.pickle", "--mlperf"),
        )
        for number in (1, 2)
    ]
    for each in launches:
        assert (each.preset, each.container, each.image, each.grace) == ("dss8440", "docker", "registry/ssd:1", 9)
        assert each.mount == (
            *(f"{tmp_path}/coco:/data:ro", f"{tmp_path}/results:/results"),
            f"{tmp_path}/weights:/pretrained:ro",
        )


def test_without_a_container_the_folders_are_taken_as_they_are(variables: dict[str, str], tmp_path: Path) -> None:
    del variables["CONT"]
    variables["NEXP"] = "1"
    (only,) = list_options("--submission", variables)
    assert only.command == (
        *("ssd_mxnet_train", "--seed", "1", "--coco_root", f"{tmp_path}/coco"),
        *("--model_dir", f"{tmp_path}/results/dss8440_1"),
        *("--pretrained_backbone", f"{tmp_path}/weights/resnet34-333f7ec4.pickle"),
    )
    assert (only.container, only.mount) == ("none", ())


def test_what_is_not_set_is_left_to_the_program() -> None:
    (only,) = list_options("--submission ssd_mxnet_train --seed 7", {"SYSTEM": "2xc4140", "NEXP": "1"})
    assert (only.preset, only.command) == ("2xc4140", ("ssd_mxnet_train", "--seed", "1", "--seed", "7"))


def test_there_are_five_experiments_unless_told_otherwise(variables: dict[str, str]) -> None:
    del variables["NEXP"]
    seeds = [each.command[each.command.index("--seed") + 1] for each in list_options("--submission", variables)]
    assert seeds == ["1", "2", "3", "4", "5"]


def test_the_systems_program_runs_behind_the_preset(plan: Plan, variables: dict[str, str]) -> None:
    """In Docker a launcher inside makes the ranks; its arguments are what the outer one prints."""
    text = plan("--submission", variables)
    inner = text.partition("    registry/ssd:1\n")[2].split()
    assert inner[:4] == ["gaudi-run", "--preset", "dss8440", "ssd_mxnet_train"]
    assert text.count("docker\n    run\n") == 2
    direct = plan("--submission", {name: variables[name] for name in ("SYSTEM", "DATADIR", "NEXP")})
    assert f"--system\n    DSS8440\n    --seed\n    1\n    --coco_root\n    {variables['DATADIR']}\n" in direct


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
    assert (
        "    ssd.sif\n    ssd_mxnet_train\n    --system\n    4xC4140\n    --seed\n    2\n    --coco_root\n    /data\n"
        in inside
    )


@pytest.mark.parametrize(
    ("words", "changes", "error", "said"),
    [
        ("--submission", {"SYSTEM": ""}, ConfigurationError, r"SYSTEM is ''; set it to one of dss8440, c4140, 2xc4140"),
        ("--submission", {"SYSTEM": "habana-8"}, ConfigurationError, "SYSTEM is 'habana-8'"),
        ("--submission", {"NEXP": "0"}, ConfigurationError, "NEXP is '0'"),
        ("--submission", {"NEXP": "2; id"}, ConfigurationError, "NEXP is '2; id'"),
        (
            "--submission",
            {"DATADIR": "/no/folder"},
            MissingProgramError,
            "DATADIR '/no/folder': there is no such folder",
        ),
        ("--submission", {"PRETRAINED_DIR": "/"}, MissingProgramError, "has no file of weights; leave one there"),
        ("--submission --image other", {}, FlagError, "CONT names the image registry/ssd:1; give one"),
        ("--submission --preset c4140", {}, FlagError, "goes without --preset, which SYSTEM names"),
        ("--submission ssd_train", {}, FlagError, "--preset dss8440 runs ssd_mxnet_train, not ssd_train"),
        ("--submission", {"CONT": "--privileged"}, FlagError, "expected one argument"),
        ("--submission", {"CONT": "a b"}, FlagError, "is no image"),
    ],
)
def test_what_is_refused(
    words: str, changes: dict[str, str], error: type[Exception], said: str, plan: Plan, variables: dict[str, str]
) -> None:
    with pytest.raises(error, match=said) as caught:
        plan(words, {**variables, **changes})
    assert "\n" not in str(caught.value)


def test_several_files_of_weights_are_refused(plan: Plan, variables: dict[str, str]) -> None:
    (Path(variables["PRETRAINED_DIR"]) / "resnet34.pth").touch()
    with pytest.raises(
        MissingProgramError, match=r"several files of weights \(resnet34-333f7ec4.pickle, resnet34.pth\)"
    ):
        plan("--submission", variables)


def test_a_line_of_results() -> None:
    line = describe_result(
        "SINGLE_STAGE_DETECTOR", datetime(2020, 6, 1, 13, 5), datetime(2020, 6, 1, 13, 40, 1), {"USER": "me"}
    )
    assert line == "RESULT,SINGLE_STAGE_DETECTOR,,2101,me,2020-06-01 01:05:00 PM"


@pytest.mark.parametrize("status", [0, 3])
def test_each_experiment_that_ends_well_has_its_line(tmp_path: Path, status: int) -> None:
    """Real ranks, of a program that writes what it was given."""
    program = tmp_path / "bin" / "ssd_mxnet_train"
    program.parent.mkdir()
    program.write_text(f'#!{sys.executable}\nimport sys\nprint(" ".join(sys.argv[1:]))\nsys.exit({status})\n')
    program.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"SYSTEM": "c4140", "NEXP": "2", "USER": "me", "PATH": f"{program.parent}:{os.environ['PATH']}"}
    launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--submission", "--backend", "multi_worker"]
    done = subprocess.run(launcher, env=environ, capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert done.returncode == status
    if status:
        assert not any(line.startswith("RESULT") for line in lines)
        return
    for number, experiment in ((1, lines[:5]), (2, lines[5:])):
        assert experiment[:4] == [f"--system C4140 --seed {number}"] * 4
        assert re.fullmatch(r"RESULT,SINGLE_STAGE_DETECTOR,,\d+,me,\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [AP]M", experiment[4])
