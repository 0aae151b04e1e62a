"""The lane for a GPU, without one: its error, its catalogue, and its comparison of devices with the CPU as both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as program  # noqa: E402
from benchmarks.catalogue import GPU_SHARES  # noqa: E402
from benchmarks.gpu import card, parity, programs, training  # noqa: E402
from benchmarks.results import GPU_RESULTS, read_earlier  # noqa: E402

from gaudi_distributed import DeviceError  # noqa: E402
from gaudi_distributed.errors import MissingProgramError  # noqa: E402
from gaudi_models import architectures  # noqa: E402


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs of a machine that has some."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")


@pytest.mark.usefixtures("hidden")
def test_without_a_gpu_the_lane_ends_with_a_named_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "gpu"]) == DeviceError.exit_status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "CUDA_VISIBLE_DEVICES" in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.usefixtures("hidden")
def test_without_a_gpu_a_benchmark_does_not_compute() -> None:
    with pytest.raises(DeviceError) as error:
        next(parity.run(1.0))
    assert error.value.field == "CUDA_VISIBLE_DEVICES"


def test_without_nvidia_smi_the_card_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card.read_card() == {}
    with pytest.raises(DeviceError):
        card.describe_card()


def test_what_nvidia_smi_says_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = "NVIDIA A10G, 580.1, 23028 MiB, 210 MHz, 1710 MHz, 405 MHz, 15.2 W"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert card.read_card() == dict(zip(card.QUERY, answer.split(", "), strict=True))


def test_every_benchmark_of_a_gpu_is_in_the_catalogue() -> None:
    modules = (ROOT / "benchmarks" / "gpu").glob("*.py")
    found = {path.stem for path in modules if "\n    main(run)\n" in path.read_text(encoding="utf-8")}
    assert found == GPU_SHARES.keys()


def test_benchmarks_of_a_gpu_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.parse(["--device", "gpu", "--only", "parity"]).only == ["parity"]
    with pytest.raises(SystemExit) as end:
        program.parse(["--only", "parity"])
    assert end.value.code == 2
    assert "--only parity" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", parity.list_operations())
def test_the_cpu_agrees_with_itself(name: str) -> None:
    figures = list(parity.compare_devices(card.CPU, {name: parity.list_operations()[name]}))
    assert [figure.passed for figure in figures] == [True] * 3
    exact = [figure for figure in figures if not figure.name.endswith("bf16: error")]
    assert max(figure.value for figure in exact) < parity.FLOOR


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "ssd"])
def test_networks_on_the_cpu_agree_with_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eighth of their channels, for what is compared here is each layer with itself."""
    for constant, value in (("resnet.STEM_FILTERS", 8), ("resnet.STAGE_FILTERS", (8, 16, 32, 64))):
        monkeypatch.setattr(f"gaudi_models.{constant}", value)
    levels = [(inner // 8, outer // 8, *rest) for inner, outer, *rest in architectures.SSD_EXTRA_LEVELS]
    monkeypatch.setattr(architectures, "SSD_EXTRA_LEVELS", tuple(levels))
    network = {name: parity.list_networks(batch=2, side=64)[name]}
    figures = list(parity.compare_devices(card.CPU, network, ("fp32", "bf16")))  # what the lane compares them in
    assert [figure.passed for figure in figures] == [True] * 4
    assert {figure.value for figure in figures if "bf16: error" not in figure.name} == {0.0}


def test_a_device_that_computes_otherwise_is_noticed() -> None:
    calls: list[str] = []

    def compute(dtype: str) -> list[Any]:
        calls.append(dtype)
        return [np.ones(4, np.float32) * (1.01 if len(calls) > 2 else 1.0)]  # the CPU comes first

    figures = list(parity.compare_devices(card.CPU, {"one": compute}))
    assert [figure.passed for figure in figures] == [False] * 3
    assert figures[0].value == pytest.approx(0.01)
    assert parity.find_error([np.array([np.nan])], [np.array([1.0])]) == float("inf")


def test_records_are_named_by_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(programs.RECORDS, str(tmp_path))
    with pytest.raises(MissingProgramError) as error:
        programs.find_records()
    assert error.value.field == programs.RECORDS
    (tmp_path / "train.json").touch()
    assert programs.find_records() == tmp_path


def test_the_evaluation_of_a_run_is_read() -> None:
    figures = training.read_evaluation(ROOT / "tests" / "former_version" / "ssd_train")
    assert figures["AP50"] == 0.0
    assert "AR100" in figures


def test_committed_results_of_a_gpu_can_be_compared_with() -> None:
    named = {where for where, _ in read_earlier(GPU_RESULTS.read_text(encoding="utf-8"))}
    assert set() < named <= GPU_SHARES.keys()
