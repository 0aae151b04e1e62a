from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.inference import exported_models
from gaudi_apps.inference.exported_models import choose_export, open_model
from gaudi_apps.inference.exporter import list_kinds
from gaudi_apps.inference.predictor import find_export, read_model
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_distributed.devices.machine import name_processor


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run with exports of its checkpoint `a` and of another one, and everything installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(exported_models, "import_runtime", lambda name: None)
    monkeypatch.setattr(exported_models, "find_obstacle", lambda name, precision: "")
    rates = {"saved_model": 50, "openvino": 10, "openvino-int8": 30, "openvino-bf16": 20, "onnx": 12, "tflite": 11}
    for kind, rate in rates.items():
        write_manifest(tmp_path, kind, rate)
    write_manifest(tmp_path, "onnx-int8", 99, checkpoint="b")
    return tmp_path


def write_manifest(run: Path, kind: str, rate: float, speed: dict[str, Any] | None = None, **values: Any) -> None:
    manifest = {
        "format": "gaudi-apps export",
        "kind": kind,
        "precision": kind.partition("-")[2] or "fp32",
        "checkpoint": "a",
        "image_size": 300,
        "classes": [],
        "sha256": {},
        "evaluation": {"AP": 0.4, "of_network": 0.5},
        "speed": {
            "images_per_second": {"1": rate, "16": rate},
            "of_network": 8,
            "processor": name_processor(),
            "threads": 2,
            "device": "CPU",
            "network_device": "CPU",
            **(speed or {}),
        },
        **values,
    }
    (run / "export" / kind).mkdir(parents=True)
    (run / "export" / kind / "export.json").write_text(json.dumps(manifest))


def test_an_export_that_cannot_be_read_or_tells_no_speed_is_left_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"onnx": "[" * 100_000, "tflite": "[]"}
    for kind, text in broken.items():
        (run / "export" / kind / "export.json").write_text(text)
    for kind in ("openvino", "openvino-bf16"):
        path = run / "export" / kind / "export.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "speed": {}}))
    chosen = choose_export(run, "a", "auto")
    assert chosen is not None
    assert chosen.folder.name == "openvino-int8"
    told = capsys.readouterr().err
    assert [f"/{kind}/export.json: " in told for kind in ("onnx", "openvino", "openvino-bf16")] == [True] * 3


@pytest.mark.parametrize(
    ("runtime", "kind"),
    [("auto", "openvino-int8"), ("openvino", "openvino-int8"), ("onnxruntime", "onnx"), ("litert", "tflite")],
)
def test_the_fastest_checked_export_of_the_checkpoint_is_chosen_and_named(
    run: Path, runtime: Any, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = choose_export(run, "a", runtime)
    assert chosen is not None
    assert chosen.folder == run / "export" / kind
    assert kind in capsys.readouterr().err


def test_an_export_is_run_from_the_folder_that_it_is_in(run: Path) -> None:
    folder = run / "export" / "onnx-v1"
    (run / "export" / "onnx").rename(folder)
    chosen = choose_export(run, "a", "onnxruntime")
    assert chosen is not None
    assert (chosen.folder, chosen.format) == (folder, "onnx")
    chosen.manifest["sha256"]["model.onnx"] = "0" * 64
    for content in (None, b"other"):
        if content is not None:
            (folder / "model.onnx").write_bytes(content)
        with pytest.raises(DataError) as caught:
            open_model(chosen, bytes)
        assert caught.value.path == str(folder / "model.onnx")


def test_the_network_is_used_where_nothing_faster_was_checked(run: Path, tmp_path: Path) -> None:
    assert choose_export(run, "a", "tensorflow") is None
    assert choose_export(run, "c", "auto") is None
    assert choose_export(run, "", "auto") is None
    slow = tmp_path / "slow"
    write_manifest(slow, "openvino", 7)
    assert choose_export(slow, "a", "auto") is None
    assert choose_export(slow, "a", "openvino") is not None


def test_a_runtime_without_a_checked_export_is_refused(run: Path) -> None:
    with pytest.raises(MissingInputError) as caught:
        choose_export(run, "c", "openvino")
    assert (caught.value.flag, caught.value.path) == ("--runtime", str(run / "export"))
    with pytest.raises(MissingInputError):
        find_export(run / "export", "openvino")
    assert find_export(run / "export", "auto") is None


@pytest.mark.parametrize(
    ("kind", "runtime"),
    [("onnx", "onnxruntime"), ("openvino-int8", "openvino"), ("tflite", "litert"), ("saved_model", "")],
)
def test_the_folder_of_an_export_names_its_kind_and_runtime(run: Path, kind: str, runtime: str) -> None:
    with pytest.raises(DataError, match=f" {kind}(;|$)") as refused:
        read_model(run / "export" / kind, "tensorflow")
    assert refused.value.path == str(run / "export" / kind)
    remedy = refused.value.remedy or ""
    assert ("--runtime" in remedy, f"runtime={runtime!r}" in remedy) == (bool(runtime), bool(runtime))


def test_speeds_are_compared_on_one_processor_alone(tmp_path: Path, run: Path) -> None:
    """The fastest export was measured elsewhere, and so was the slower one of two where none was measured here."""
    write_manifest(run, "openvino-fp16", 1000, {"processor": "another"})
    chosen = choose_export(run, "a", "openvino")
    assert chosen is not None
    assert chosen.folder.name == "openvino-int8"
    elsewhere = tmp_path / "elsewhere"
    for kind, rate, processor in (("onnx", 20, "x"), ("openvino", 10, "x"), ("tflite", 99, "y")):
        write_manifest(elsewhere, kind, rate, {"processor": processor})
    chosen = choose_export(elsewhere, "a", "auto")
    assert chosen is not None
    assert chosen.folder.name == "onnx"


def test_the_network_is_used_where_a_gpu_or_nobody_knows_what_measured_it(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, former = tmp_path / "gpu", tmp_path / "former"
    write_manifest(gpu, "openvino", 30, {"network_device": "GPU"})
    write_manifest(former, "openvino", 30)
    path = former / "export" / "openvino" / "export.json"
    manifest = json.loads(path.read_text())
    manifest["speed"] = {"images_per_second": {"1": 30}, "of_network": 8, "processors": 2}
    path.write_text(json.dumps(manifest))
    for folder in (gpu, former):
        assert choose_export(folder, "a", "auto") is None
        assert "openvino" in capsys.readouterr().err
        assert choose_export(folder, "a", "openvino") is not None


def test_what_cannot_be_run_here_is_left_out_and_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "openvino" else True)
    chosen = choose_export(run, "a", "auto")
    assert chosen is not None
    assert chosen.folder.name == "onnx"
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told[:3]] == ["openvino", "openvino-bf16", "openvino-int8"]
    monkeypatch.undo()
    monkeypatch.setattr(exported_models, "find_obstacle", lambda name, precision: "no bits" * (precision == "int8"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    chosen = choose_export(run, "a", "auto")
    assert chosen is not None
    assert chosen.folder.name == "openvino-bf16"


def test_a_kind_that_is_asked_for_twice_is_one() -> None:
    assert list_kinds(("onnx", "onnx"), ("fp32", "fp32")) == [("onnx", "fp32")]
