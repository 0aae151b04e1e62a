"""Lay out exports for servers of others, and refuse what is no whole export."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.cli import run_commands
from gaudi_apps.inference.converters import decode_pixels, run_exported
from gaudi_apps.inference.exported_models import OnnxModel, SavedModel
from gaudi_apps.inference.serving.flags import LayoutFlags
from gaudi_apps.inference.serving.layouts import (
    Signature,
    Tensor,
    make_serving_config,
    make_triton_config,
    write_layout,
)
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_ops.files import FileError

SIGNATURE = Signature(
    [Tensor("encoded", "STRING", ())],
    [Tensor("boxes_yxyx", "FP32", (200, 4)), Tensor("num_detections", "INT32", ())],
)
TRITON = """\
name: "cells"
platform: "tensorflow_savedmodel"
max_batch_size: 4
input {
  name: "encoded"
  data_type: TYPE_STRING
  dims: [1]
  reshape { shape: [] }
}
output {
  name: "boxes_yxyx"
  data_type: TYPE_FP32
  dims: [200, 4]
}
output {
  name: "num_detections"
  data_type: TYPE_INT32
  dims: [1]
  reshape { shape: [] }
}
dynamic_batching {
  max_queue_delay_microseconds: 2500
}
parameters {
  key: "TF_SIGNATURE_DEF"
  value { string_value: "serving_default" }
}
"""
SERVING = """\
model_config_list {
  config {
    name: "cells"
    base_path: "/models/cells"
    model_platform: "tensorflow"
  }
}
"""


def test_configurations() -> None:
    assert make_triton_config("cells", "saved_model", SIGNATURE, 4, 2.5) == TRITON
    assert make_serving_config(["cells"]) == SERVING


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Write a folder with the files of an export, which no server could run."""
    folder = tmp_path / "saved_model"
    (folder / "variables").mkdir(parents=True)
    files = {"saved_model.pb": b"graph", "variables/variables.index": b"numbers"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    manifest = {"format": "gaudi-apps export", "kind": "saved_model", "classes": [{"name": "red"}]}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    (folder / "export.json").write_text(json.dumps({**manifest, "sha256": sums}))
    return folder


def test_versions_and_models_lie_side_by_side(export: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name, version in (("cells", 1), ("cells", 2), ("other", 1)):
        write_layout(LayoutFlags(str(export), "tensorflow_serving", models, name=name, version=version))
    found = sorted(path.relative_to(models).as_posix() for path in models.rglob("*") if path.is_file())
    versions = ("cells/1", "cells/2", "other/1")
    files = ("saved_model.pb", "variables/variables.index")
    assert found == sorted([*(f"{one}/{file}" for one in versions for file in files), "models.config"])
    assert (models / "models.config").read_text() == make_serving_config(["cells", "other"])
    assert {path.stat().st_mode & 0o777 for path in models.rglob("*") if path.is_dir()} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in models.rglob("*") if path.is_file()} == {0o644}
    shutil.rmtree(models / "other")
    write_layout(LayoutFlags(str(export), "tensorflow_serving", models, name="third"))
    assert (models / "models.config").read_text() == make_serving_config(["cells", "third"])
    with pytest.raises(UnsafeError) as caught:
        write_layout(LayoutFlags(str(export), "tensorflow_serving", models, name="cells", version=2))
    assert caught.value.path == str(models / "cells" / "2")


def test_folders_that_are_there_keep_their_modes(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for mode, notes in ((0o3775, 0), (0o700, 1)):
        models.chmod(mode)
        version, _ = write_layout(LayoutFlags(str(export), "tensorflow_serving", models, name=f"cells-{notes}"))
        assert models.stat().st_mode & 0o7777 == mode
        assert version.stat().st_mode & 0o777 == 0o755
        assert capsys.readouterr().err.count(f"{models}: ") == notes
    chmod = Path.chmod

    def change(path: Path, mode: int) -> None:
        if path == models:
            raise PermissionError(errno.EPERM, "another user's", str(path))
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", change)
    assert write_layout(LayoutFlags(str(export), "tensorflow_serving", models, name="other"))[0].is_dir()


def test_what_is_made_can_be_read_by_the_server(export: Path, tmp_path: Path) -> None:
    models = tmp_path / "all" / "models"
    before = os.umask(0o077)
    try:
        write_layout(LayoutFlags(str(export), "tensorflow_serving", models, name="cells"))
    finally:
        os.umask(before)
    modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in (models.parent, *models.parent.rglob("*"))}
    assert modes == {True: 0o755, False: 0o644}


@pytest.mark.parametrize("content", ["5", "null", "[1]", "[" * 100_000, "\xff"])
def test_a_damaged_manifest_is_named(export: Path, tmp_path: Path, content: str) -> None:
    (export / "export.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError) as caught:
        write_layout(LayoutFlags(str(export), "tensorflow_serving", tmp_path / "models"))
    assert caught.value.path == str(export / "export.json")


def test_a_pipe_is_no_file_of_an_export(export: Path, tmp_path: Path) -> None:
    os.mkfifo(export / "pipe")
    manifest = json.loads((export / "export.json").read_text())
    (export / "export.json").write_text(json.dumps(manifest | {"sha256": {"pipe": "0"}}))
    with pytest.raises(FileError) as caught:
        write_layout(LayoutFlags(str(export), "tensorflow_serving", tmp_path / "models"))
    assert caught.value.path == str(export / "pipe")


@pytest.mark.parametrize("name", ["", ".", "a\0b", "\ud800", "variables"])
def test_a_name_of_no_file_is_refused(export: Path, tmp_path: Path, name: str) -> None:
    manifest = json.loads((export / "export.json").read_text())
    (export / "export.json").write_text(json.dumps(manifest | {"sha256": manifest["sha256"] | {name: "0"}}))
    with pytest.raises(DataError) as caught:
        write_layout(LayoutFlags(str(export), "tensorflow_serving", tmp_path / "models"))
    assert (caught.value.path, caught.value.field) == (str(export / "export.json"), "sha256")


def test_a_configuration_of_another_model_stays(export: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_layout(LayoutFlags(str(export), "tensorflow_serving", models, name="cells"))
    config = models / "models.config"
    config.write_text(own := config.read_text().replace("/models/cells", "s3://cells"))
    with pytest.raises(UnsafeError) as caught:
        write_layout(LayoutFlags(str(export), "tensorflow_serving", models, name="other"))
    assert caught.value.path == str(config)
    assert config.read_text() == own
    assert not (models / "other" / "1").exists()


def test_what_stopped_before_the_version_is_done_again(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = LayoutFlags(str(export), "tensorflow_serving", tmp_path / "models", name="cells")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", fail)
        with pytest.raises(OSError, match="no space"):
            write_layout(flags)
    version, config = write_layout(flags)
    assert (version / "saved_model.pb").is_file()
    assert config.read_text() == SERVING


def test_what_is_no_whole_export_is_refused(export: Path, tmp_path: Path) -> None:
    flags = LayoutFlags(str(export), "tensorflow_serving", tmp_path / "models")
    with pytest.raises(MissingInputError):
        write_layout(LayoutFlags(str(tmp_path / "none"), "triton", tmp_path / "models"))
    manifest = json.loads((export / "export.json").read_text())
    (export / "export.json").write_text(json.dumps(manifest | {"kind": "tflite-fp16"}))
    with pytest.raises(DataError) as caught:
        write_layout(flags)
    assert caught.value.path == str(export)
    wrong: dict[str, Any]
    for wrong in ({"sha256": []}, {"classes": ["red"]}, {"kind": 3}, {"sha256": {"saved_model.pb/x": "0"}}):
        (export / "export.json").write_text(json.dumps(manifest | wrong))
        with pytest.raises(DataError):
            write_layout(flags)
    sums = manifest["sha256"] | {"../secret": "0"}
    (export / "export.json").write_text(json.dumps(manifest | {"sha256": sums}))
    with pytest.raises(UnsafeError):
        write_layout(flags)
    (export / "export.json").write_text(json.dumps(manifest))
    (export / "saved_model.pb").write_bytes(b"other")
    with pytest.raises(DataError) as caught:
        write_layout(flags)
    assert caught.value.path == str(export / "saved_model.pb")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    "flag", ["--name ../x", "--version 0", "--max_batch 0", "--server tensorflow_serving --max_batch 4"]
)
def test_a_value_out_of_bounds_is_refused(run_main: Callable[..., Any], flag: str) -> None:
    words = ["layout", "--export", "x", "--server", "triton", "-o", "y", *flag.split()]
    assert run_main(run_commands.main, words).status == 64


@pytest.mark.slow
def test_a_layout_runs_as_its_configuration_says(
    detector_exports: dict[Path, Any], noise_images: list[bytes], tmp_path: Path
) -> None:
    exports, models = next(iter(detector_exports)).parent, tmp_path / "models"
    version, config = write_layout(LayoutFlags(str(exports / "onnx"), "triton", models, name="cells", version=3))
    text = config.read_text()
    found = run_exported(OnnxModel(version / "model.onnx", decode_pixels, takes_floats=False), noise_images[:2])
    for name, values in found.items():
        kind = {"float32": "FP32", "int32": "INT32"}[values.dtype.name]
        assert f'name: "{name}"\n  data_type: TYPE_{kind}\n  dims: {list(values.shape[1:])}\n' in text
    assert 'name: "images"\n  data_type: TYPE_UINT8\n  dims: [-1, -1, 3]\n' in text
    assert (models / "cells" / "labels.txt").read_text() == "red\nblue\n"
    write_layout(LayoutFlags(str(exports / "onnx"), "triton", models, name="cells", version=4, max_batch=3))
    with pytest.raises(UnsafeError) as caught:
        write_layout(LayoutFlags(str(exports / "saved_model"), "triton", models, name="cells", version=5))
    assert caught.value.path == str(config)

    version, config = write_layout(LayoutFlags(str(exports / "saved_model"), "triton", models, name="saved"))
    outputs = SavedModel(version / "model.savedmodel").compute(noise_images[:2])
    text = config.read_text()
    assert {name for name in outputs if f'name: "{name}"' in text} == outputs.keys()
    assert 'name: "encoded"\n  data_type: TYPE_STRING\n  dims: [1]\n' in text

    version, _ = write_layout(LayoutFlags(str(exports / "saved_model"), "tensorflow_serving", tmp_path / "serving"))
    again = SavedModel(version).compute(noise_images[:2])
    np.testing.assert_array_equal(again["scores"], outputs["scores"])
