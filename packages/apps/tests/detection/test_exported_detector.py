from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.detection import exported_detector
from gaudi_apps.detection.exported_detector import choose_export, find_export
from gaudi_datasets.errors import MissingInputError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run with exports of its checkpoint `a` and of another one, and everything installed."""
    monkeypatch.setattr("gaudi_apps.detection.exported_detector.util.find_spec", lambda name: True)
    monkeypatch.setattr(exported_detector, "import_runtime", lambda name: None)
    rates = {"saved_model": 50, "openvino": 10, "openvino-int8": 30, "openvino-bf16": 20, "onnx": 12}
    for kind, rate in rates.items():
        write_manifest(tmp_path, kind, rate)
    write_manifest(tmp_path, "onnx-int8", 99, checkpoint="b")
    return tmp_path


def write_manifest(run: Path, kind: str, rate: float, **values: Any) -> None:
    manifest = {
        "format": "gaudi-apps export",
        "kind": kind,
        "precision": kind.partition("-")[2] or "fp32",
        "checkpoint": "a",
        "image_size": 300,
        "classes": [],
        "evaluation": {"AP": 0.4, "of_network": 0.5},
        "speed": {"images_per_second": {"1": rate, "16": rate}, "of_network": 8},
        **values,
    }
    (run / "export" / kind).mkdir(parents=True)
    (run / "export" / kind / "export.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("runtime", "kind"), [("auto", "openvino-int8"), ("openvino", "openvino-int8"), ("onnxruntime", "onnx")]
)
def test_the_fastest_checked_export_of_the_checkpoint_is_chosen_and_named(
    run: Path, runtime: Any, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = choose_export(run, "a", runtime)
    assert chosen is not None
    assert chosen.folder == run / "export" / kind
    assert kind in capsys.readouterr().err


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
