"""Ask an environment's interpreter for its packages, and choose the frameworks that Horovod is built for."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_distributed.comm.horovod_engine import lacks_headers
from gaudi_distributed.comm.horovod_wheel import Environment, choose_frameworks, inspect_environment
from gaudi_distributed.errors import ConfigurationError, MissingProgramError

MakeEnvironment = Callable[..., Path]


def test_an_environment_tells_what_it_holds(make_environment: MakeEnvironment) -> None:
    python = make_environment(tensorflow_cpu="2.15.1", mxnet="1.9.1", numpy="1.23.5", horovod="0.28.0", six="1.17")
    environment = inspect_environment(python)
    assert environment == Environment(
        python,
        f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform.machine(),
        {"tensorflow-cpu": "2.15.1", "mxnet": "1.9.1", "numpy": "1.23.5"},
        "0.28.0",
    )
    assert environment.find_version("tensorflow") == "2.15.1"


def test_modules_beside_the_user_are_not_run(
    make_environment: MakeEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('from the working folder')")
    monkeypatch.chdir(tmp_path)
    assert inspect_environment(make_environment()).versions == {}


@pytest.mark.parametrize(
    ("script", "kind", "status"),
    [
        (None, MissingProgramError, 66),
        ("echo wrong >&2; exit 2", ConfigurationError, 78),
        ("echo 1", ConfigurationError, 78),
        ("echo '{\"versions\": 1}'", ConfigurationError, 78),
    ],
)
def test_what_is_no_interpreter(tmp_path: Path, script: str | None, kind: type[Exception], status: int) -> None:
    program = tmp_path / "program"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(kind, match=f"--python {program}") as caught:
        inspect_environment(program)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == status  # type: ignore[attr-defined]


def test_the_vendors_horovod_is_left_alone(make_environment: MakeEnvironment) -> None:
    with pytest.raises(ConfigurationError, match=r"habana-horovod 1\.14\.0"):
        inspect_environment(make_environment(tensorflow_cpu="2.15.0", habana_horovod="1.14.0"))


BOTH = {"tensorflow": "2.15.1", "mxnet": "1.9.1"}


@pytest.mark.parametrize(
    ("versions", "wanted", "chosen"),
    [
        ({"tensorflow-cpu": "2.15.1", "mxnet": "1.9.1"}, {}, BOTH),
        ({"tensorflow": "2.18.0"}, {}, {"tensorflow": "2.18.0"}),
        ({"tensorflow": "2.15.1", "mxnet": "1.9.1"}, {"mxnet": False}, {"tensorflow": "2.15.1"}),
        ({"tensorflow": "2.21.0", "mxnet-cu112": "1.9.1"}, {"tensorflow": False}, {"mxnet": "1.9.1"}),
        ({"tensorflow": "2.15.1", "mxnet": "1.9.1"}, {"mxnet": True, "tensorflow": True}, BOTH),
    ],
)
def test_frameworks_are_those_that_are_installed(
    versions: dict[str, str], wanted: dict[str, bool], chosen: dict[str, str]
) -> None:
    environment = Environment(Path("python"), "cp311", "x86_64", versions)
    assert choose_frameworks(environment, wanted) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("versions", "wanted", "said"),
    [
        ({}, {}, "neither TensorFlow"),
        ({"mxnet": "1.9.1"}, {"mxnet": False}, "neither TensorFlow"),
        ({"tensorflow": "2.15.1"}, {"mxnet": True}, "--with_mxnet"),
        ({"tensorflow": "2.20.0"}, {}, "use TensorFlow"),
        ({"tensorflow-cpu": "2.21.0-rc1", "mxnet": "1.9.1"}, {}, "TensorFlow 2.21.0-rc1"),
    ],
)
def test_what_horovod_cannot_be_built_for(versions: dict[str, str], wanted: dict[str, bool], said: str) -> None:
    environment = Environment(Path("python"), "cp311", "x86_64", versions)
    with pytest.raises(ConfigurationError, match=said):
        choose_frameworks(environment, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "lacks"), [("2.15.1", False), ("2.19.1", False), ("2.20.0", True), ("3.0.0", True), ("", False)]
)
def test_headers_are_shipped_up_to_a_version(version: str, lacks: bool) -> None:
    assert lacks_headers(version) is lacks
