"""Launches by name: every preset of servers is pinned in golden/, and programs register their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gaudi_distributed
from gaudi_distributed.errors import ConfigurationError, FlagError
from gaudi_distributed.launch.flags import parse_flags
from gaudi_distributed.launch.presets import SERVERS, Preset, describe_presets, find_preset

GOLDEN = Path(__file__).parent / "golden"
TWO = "--hosts 10.0.0.1:8,10.0.0.2:8"

LAUNCHES = {
    "habana-8": "--preset habana-8 ssd_train --use_horovod",
    "habana-16": f"--preset habana-16 {TWO} ssd_train --use_horovod",
    "habana-16-tcp": f"--preset habana-16-tcp --interface eth0 {TWO} ssd_train --use_horovod",
    "habana-16-hierarchical": f"--preset habana-16-hierarchical --interface eth0 {TWO} ssd_train --use_horovod",
    "habana-16-mpijob": "--preset habana-16 --mpijob - --image registry/gaudi:1 ssd_train --use_horovod",
    "gloo": "--np 3 --hosts 10.0.0.1:2,10.0.0.2:1 --backend gloo --interface eth0 ssd_train --use_horovod",
    "multi_worker": "--hosts 10.0.0.1:1,[fd00::2]:1 --backend multi_worker --ssh_config /etc/hosts ssd_train",
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_would_run(name: str, plan: Callable[..., str]) -> None:
    assert plan(LAUNCHES[name]) == (GOLDEN / f"{name}.txt").read_text()


def test_every_preset_is_pinned() -> None:
    assert set(SERVERS) <= set(LAUNCHES)
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*LAUNCHES, "errors"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--preset habana-9 ssd_train", "does not exist"),
        ("--preset habana-8", "name a program"),
        ("--preset habana-16 ssd_train", "needs 2 hosts with 8"),
        ("--preset habana-8 --np 4 ssd_train", "for 8 ranks, 8"),
        ("--preset habana-16 --hosts a:16 ssd_train", "needs 2 hosts with 8"),
        ("--preset habana-16 --scale_out tcp --np 16 --num_workers_per_hls 4 --hosts a,b x", "8 on a host"),
    ],
)
def test_a_preset_is_for_its_hosts_and_program(words: str, said: str, plan: object) -> None:
    assert callable(plan)
    with pytest.raises(ConfigurationError, match=said):
        plan(words)


def test_a_program_registers_its_presets(register: Callable[[str], None]) -> None:
    register("own_presets:PRESETS")
    assert find_preset("own-2") == Preset("two ranks", 1, 2, "none", command=("own_train", "--fast"), lane="own")
    assert "  own-2                   two ranks\n" in f"{describe_presets()}\n"
    with pytest.raises(FlagError):
        find_preset("own-2").complete(("other_train",), "own-2")


def test_a_registration_that_does_not_load_is_named(register: Callable[[str], None]) -> None:
    register("own_presets:LAUNCHES")
    with pytest.raises(ConfigurationError, match="own_presets:LAUNCHES"):
        find_preset("own-2")


def test_flags_are_read_without_looking_for_presets(register: Callable[[str], None]) -> None:
    register("own_presets:LAUNCHES")
    assert parse_flags(["--preset", "own-2", "x"]).preset == "own-2"


@pytest.mark.parametrize(("flags", "status"), [(("--preset", "ssd-habana-8"), 64), (("--submission",), 78)])
def test_without_the_programs_it_is_said_which_package_they_come_with(flags: tuple[str, ...], status: int) -> None:
    """In a Python without site-packages, where nothing is installed."""
    source = str(Path(gaudi_distributed.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {source!r}); from gaudi_distributed.launch.cli import main; main({[*flags]!r})"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == status
    assert done.stderr.endswith("pip install gaudi-apps\n")
