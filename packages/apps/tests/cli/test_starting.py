"""Check that a program's own command starts its ranks, as the originals' demo scripts did."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.cli.flags import DistributionFlags, check_distribution
from gaudi_apps.cli.launch import check_engine, list_launcher_words, report_launch
from gaudi_apps.cli.program import drop_plan_flags
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags
from gaudi_distributed import DeviceError, DeviceKind

PROGRAM = ["python", "-m", "program", "--steps", "$(ls)"]
TWO_SERVERS = {"MULTI_HLS_IPS": "10.0.0.1,10.0.0.2"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
ALONE_IN_MPI = {**dict.fromkeys(MPIRUN, "0"), "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


def read(text: str) -> DistributionFlags:
    flags: DistributionFlags = parse_flags(DistributionFlags, text.split(), prog="program")
    check_distribution(flags)
    return flags


def start(text: str, environ: Mapping[str, str], device: DeviceKind = "cpu") -> list[str] | None:
    return list_launcher_words(read(text), environ, lambda: device, PROGRAM)


@pytest.mark.parametrize(
    ("text", "environ", "device", "expected"),
    [
        ("--use_horovod --num_workers_per_hls 8", {}, "hpu", "--num_workers_per_hls 8"),
        ("-ds hpu --num_workers_per_hls 8", {}, "hpu", "--num_workers_per_hls 8 --backend multi_worker"),
        ("--use_horovod --num_workers_per_hls 4", TWO_SERVERS, "cpu", "--num_workers_per_hls 4"),
        ("--use_horovod", TWO_SERVERS, "hpu", "--accelerator hpu"),
        (
            "-ds hpu --num_workers_per_hls 8",
            TWO_SERVERS,
            "hpu",
            "--num_workers_per_hls 8 --backend multi_worker --accelerator hpu",
        ),
        (
            "--use_horovod --horovod_hierarchical_allreduce",
            TWO_SERVERS,
            "hpu",
            "--accelerator hpu --scale_out hierarchical",
        ),
        ("--use_horovod --num_workers_per_hls 1", TWO_SERVERS, "cpu", "--num_workers_per_hls 1"),
        ("--use_horovod --hvd_workers 2", {}, "cpu", "--np 2"),
        ("--use_horovod --hvd_workers 8 --num_workers_per_hls 4", {}, "cpu", "--np 8 --num_workers_per_hls 4"),
        ("-ds mirrored -ng 3", {}, "cpu", "--np 3 --backend multi_worker"),
        ("-ds mirrored --num_workers_per_hls 3", {}, "cpu", "--np 3 --backend multi_worker"),
    ],
)
def test_the_launcher_is_asked_for_as_many(
    text: str, environ: Mapping[str, str], device: DeviceKind, expected: str
) -> None:
    assert start(text, environ, device) == [*expected.split(), "--", *PROGRAM]


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("", {}),
        ("", TWO_SERVERS),
        ("--use_horovod --num_workers_per_hls 1", {}),
        ("--use_horovod --hvd_workers 1", {}),
        ("-ds mirrored", {}),  # a CPU is one device
        ("-ds multi_worker --worker_hosts a:1,b:1 --task_index 0", {}),
        ("--use_horovod --num_workers_per_hls 8", MPIRUN),
        ("--use_horovod --num_workers_per_hls 8 --kubernetes_run=True", MPIRUN),
        ("--use_horovod", {**MPIRUN, **TWO_SERVERS}),
        ("--use_horovod", ALONE_IN_MPI),
    ],
)
def test_nothing_is_started_where_one_is_enough_or_ranks_are_there(text: str, environ: Mapping[str, str]) -> None:
    assert start(text, environ) is None


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("--use_horovod", "--num_workers_per_hls N"),
        ("-ds hpu", "--hvd_workers N"),
        ("--use_horovod --num_workers_per_hls 8 --kubernetes_run", "--mpijob"),
        ("--use_horovod --hvd_workers 8 --kubernetes_run", "--kubernetes_run"),
    ],
)
def test_a_launch_that_lacks_names_the_flag(text: str, flag: str) -> None:
    with pytest.raises(FlagError, match=flag):
        start(text, {})


def test_what_ranks_would_lack_is_found_before_they_are_started() -> None:
    with pytest.raises(DeviceError, match="multi_worker"):
        check_engine(read("-ds hpu"), lambda: "cpu")
    check_engine(read("-ds hpu"), lambda: "hpu")
    check_engine(read("-ds multi_worker"), lambda: "cpu")


@pytest.mark.skipif(util.find_spec("horovod") is not None, reason="Horovod is installed")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("resnet_train", "--use_synthetic_data --use_horovod --num_workers_per_hls 8"),
        ("ssd_train", "--use_fake_data --use_horovod --num_workers_per_hls 2"),
        ("ssd_mxnet_train", "--synthetic --system C4140"),
    ],
)
def test_without_horovod_one_line_says_so(
    program: str, words: str, run_main: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_main(import_module(f"gaudi_apps.{program}").main, [*words.split(), "--model_dir", tmp_path / "run"])
    assert (done.status, done.out, done.err.count("\n")) == (78, "", 1)
    assert "Horovod" in done.err
    assert not (tmp_path / "run").exists()


def plan(run_main: Callable[..., Any], words: str) -> dict[str, Any]:
    program, *arguments = words.split()
    arguments += ["--use_synthetic_data", "--mode", "plan", "--json"]
    done = run_main(import_module(f"gaudi_apps.{program}").main, arguments)
    assert done.status == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    return document


LARS = "resnet_train -dt bf16 -dlit bf16 -te 40 -ebe 40 --optimizer LARS"


@pytest.mark.parametrize(
    ("words", "servers", "size", "batch", "rate"),
    [
        (f"{LARS} -bs 256 --use_horovod --num_workers_per_hls 8", "", 8, 2048, 9.5),
        (f"{LARS} --batch_size 2048 --distribution_strategy=hpu --num_workers_per_hls 8", "", 8, 2048, 9.5),
        (f"{LARS} -bs 256 --use_horovod --num_workers_per_hls 8", "10.0.0.1,10.0.0.2", 16, 4096, 9.5),
        (f"{LARS} -bs 256 --use_horovod", "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4", 32, 8192, 9.5),
        (f"{LARS} -bs 4096 --distribution_strategy hpu --num_workers_per_hls 8", "10.0.0.1,10.0.0.2", 16, 4096, 9.5),
        (f"{LARS} -bs 256 --use_horovod --num_workers_per_hls 1", "", 1, 256, 2.5),
    ],
)
def test_the_plan_is_that_of_the_ranks_that_would_run(
    words: str,
    servers: str,
    size: int,
    batch: int,
    rate: float,
    run_main: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if servers:
        monkeypatch.setenv("MULTI_HLS_IPS", servers)
    document = plan(run_main, words)
    assert (document["workers"], document["global_batch"], document["peak_learning_rate"]) == (size, batch, rate)
    launch = document["launch"]
    if size == 1:
        assert launch is None
        return
    assert launch["processes"] == size
    assert launch["command"][0] == "gaudi-run"
    ranks = [(line["first_rank"], line["last_rank"], line["hosts"]) for line in launch["lines"]]
    hosts = servers.split(",") if servers else ["localhost"]
    each_host = [(8 * index, 8 * index + 7, [host]) for index, host in enumerate(hosts)]
    assert ranks in ([(0, size - 1, hosts)], each_host)  # by mpirun, or host by host
    for line in launch["lines"]:
        given = shlex.split(words)[1:]
        place = line["argv"].index("gaudi_apps.resnet_train")
        assert line["argv"][place + 1 :] == [*given, "--use_synthetic_data"]


def test_the_plan_is_a_text_with_the_command_line_of_each_host(
    run_main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTI_HLS_IPS", "10.0.0.1,10.0.0.2")
    monkeypatch.setenv("DOCKER_SSHD_PORT", "4022")
    words = ["-ds", "multi_worker", "-bs", "64", "--num_workers_per_hls", "2"]
    arguments = ["--mode", "plan", "--use_synthetic_data", *words]
    done = run_main(import_module("gaudi_apps.resnet_train").main, arguments)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("ranks ")]
    assert [lines[place].split(",")[0] for place in starts] == ["ranks 0 to 1 on 10.0.0.1", "ranks 2 to 3 on 10.0.0.2"]
    assert all(" -p 4022 " in lines[place] for place in starts)
    for place in starts:
        assert lines[place + 1].endswith(" ".join(words))


def test_what_would_not_start_is_part_of_the_plan() -> None:
    for text in ("--use_horovod", "--use_horovod --num_workers_per_hls 8 --kubernetes_run"):
        report = report_launch(read(text), {}, lambda: "cpu", PROGRAM)
        assert report is not None
        assert (report.command, report.processes, report.lines, len(report.notes)) == ((), 0, (), 1)


def test_hosts_that_are_none_are_an_error(run_main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTI_HLS_IPS", "10.0.0.1;id")
    arguments = ["--use_synthetic_data", "--use_horovod", "--mode", "plan"]
    done = run_main(import_module("gaudi_apps.resnet_train").main, arguments)
    assert (done.status, done.out) == (78, "")


def test_without_an_engine_the_servers_have_no_effect_and_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gaudi_apps.cli.launch import start_processes

    start_processes(read(""), TWO_SERVERS, lambda: "cpu", PROGRAM)
    assert "MULTI_HLS_IPS" in capsys.readouterr().err
    start_processes(read(""), {}, lambda: "cpu", PROGRAM)
    assert capsys.readouterr().err == ""


def test_a_plan_is_of_the_command_without_the_flags_of_the_plan() -> None:
    forms = ("--mode plan --json", "--mode=plan --json=True", "-mode plan --json True", "--json true --mode plan")
    for form in forms:
        words = f"{form} --steps 5 --model_dir runs/plan"
        assert drop_plan_flags(words.split()) == ["--steps", "5", "--model_dir", "runs/plan"], form
