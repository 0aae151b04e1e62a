"""Flags end where the program begins, and what follows is left as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.choices import check_interface, choose_backend
from gaudi_distributed.launch.flags import parse_flags, without_flags


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--np", "2", "ssd_train", "--np", "3", "--dry_run"], ("ssd_train", "--np", "3", "--dry_run")),
        (["--np=2", "ssd_train"], ("ssd_train",)),
        (["--dry-run", "--np", "2", "--", "ssd_train", "--", "a"], ("ssd_train", "--", "a")),
        (["-np", "2", "-H", "a:1", "-x", "PATH", "ssd_train"], ("ssd_train",)),
        (["--np", "2"], ()),
        (["--np", "2", "--"], ()),
    ],
)
def test_the_program_is_left_alone(arguments: list[str], command: tuple[str, ...]) -> None:
    options = parse_flags(arguments)
    assert options.np == 2
    assert options.command == command


def test_hyphens_are_underscores() -> None:
    options = parse_flags(["--num-workers-per-hls", "4", "--ssh-config=a-b", "--forward", "A", "--forward", "B", "x"])
    assert (options.num_workers_per_hls, options.ssh_config, options.forward) == (4, "a-b", ("A", "B"))
    assert options.words[0] == "--num_workers_per_hls"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--np"], "--np/-np: expected one argument"),
        (["--host", "a"], "did you mean --hosts"),
        (["--np", "2", "--dry", "x"], "unknown flag --dry"),
        (["--np", "x"], "'x' is not"),
        (["--np", "2", "--", "--", "x"], "'--' stands in place"),
        (["--np", "2", "", "x"], "'' stands in place"),
    ],
)
def test_wrong_flags(arguments: list[str], words: str) -> None:
    with pytest.raises(FlagError, match=words) as caught:
        parse_flags(arguments)
    assert caught.value.exit_status == 64


def test_flags_can_be_taken_away() -> None:
    words = ("--np", "2", "--dry_run", "--image", "--np", "--mount=/a:/b", "--tag_output", "--mount", "/c:/d")
    assert without_flags(words, ("--image", "--dry_run", "--mount")) == ("--np", "2", "--tag_output")
    joined = ("-xNAME", "--image", "a", "-HA:2", "--dry_run", "-x", "--image")
    assert without_flags(joined, ("--image", "--dry_run")) == ("-xNAME", "-HA:2", "-x", "--image")


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from gaudi_distributed.launch.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'tensorflow', 'numpy', 'horovod', 'habana_frameworks', 'mxnet'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.startswith("usage: gaudi-run [flags] program [arguments]\n")
    assert done.stdout.endswith("[]\n")
    for name in ("--hosts", "--backend", "--slurm_script", "habana-16-tcp"):
        assert name in done.stdout


@pytest.mark.parametrize("text", ["eth0", "enp1s0f0", "br-lan.5", "10.0.0.0/24", "10.0.0.1/24"])
def test_interfaces(text: str) -> None:
    check_interface(text, "--interface")


@pytest.mark.parametrize("text", ["", "-eth0", "eth0 eth1", "a" * 16, "10.0.0.0/33", "a/b", "$(x)", "eth0\n"])
def test_no_interfaces(text: str) -> None:
    with pytest.raises(FlagError, match="--interface"):
        check_interface(text, "--interface")


@pytest.mark.parametrize("backend", [[], ["--backend", "gloo"]])
@pytest.mark.parametrize("ranks", [128, 129])
def test_many_ranks_through_gloo_are_told_of(backend: list[str], ranks: int, tmp_path: Path) -> None:
    """The choice of the user is kept, and Open MPI is named where mpirun is found."""
    options = parse_flags([*backend, "--np", str(ranks), "x"])
    assert choose_backend(options, None, {"PATH": str(tmp_path)}, ranks)[0] == "gloo"
    (tmp_path / "mpirun").touch(0o755)
    chosen, line = choose_backend(options, None, {"PATH": str(tmp_path)}, ranks)
    assert chosen == ("gloo" if backend else "openmpi")
    assert bool(line) == (chosen == "gloo" and ranks > 128)
    assert ("openmpi" in line) == bool(line)
