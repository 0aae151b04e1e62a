from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gaudi_apps.training import recording as recordings
from gaudi_apps.training.recording import MANIFEST, StepTensor, make_tensor, read_recording, write_recording
from gaudi_datasets.errors import DataError, FlagError, MissingInputError, UnsafeError
from gaudi_ops.files import hash_file

SETTINGS = {"data": "a1", "batch_size": 2}
SIDE = {"precision": "fp32"}


def make_steps() -> list[list[StepTensor]]:
    return [
        [
            make_tensor(step, "batch", "image_ids", np.array([step, 2])),
            make_tensor(step, "output", "conv1", np.arange(6.0, dtype=np.float32).reshape(2, 3).T, "conv1"),
            make_tensor(step, "loss", "loss", np.array(0.5 * step, np.float32)),
        ]
        for step in (1, 2)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "recording"
    write_recording(path, SETTINGS, SIDE, make_steps())
    return path


def test_what_is_written_is_read(folder: Path) -> None:
    recording = read_recording(folder)
    assert (recording.settings, recording.side, recording.steps) == (SETTINGS, SIDE, 2)
    written = [one for step in make_steps() for one in step]
    assert recording.tensors == tuple(one.metadata for one in written)
    for one in written:
        values = recording.read(one.metadata)
        assert values.dtype == one.values.dtype
        np.testing.assert_array_equal(values, one.values)
    assert [tensor.key for tensor in recording.list_step(2)] == [
        "step2/batch/image_ids",
        "step2/output/conv1",
        "step2/loss/loss",
    ]
    assert sorted(os.listdir(folder.parent)) == ["recording"]  # noqa: PTH208
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_nothing_is_written_over(folder: Path) -> None:
    with pytest.raises(UnsafeError, match="recording") as caught:
        write_recording(folder, SETTINGS, SIDE, make_steps())
    assert caught.value.flag == "--parity_output"


def test_a_stopped_recording_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Any:
        yield make_steps()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_recording(tmp_path / "new" / "recording", SETTINGS, SIDE, fail())
    assert not (tmp_path / "new").exists()


def test_a_recording_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_BYTES", 100)
    with pytest.raises(FlagError, match=r"recording: .*step 2; .*--batch_size"):
        write_recording(tmp_path / "recording", SETTINGS, SIDE, make_steps())
    assert not any(tmp_path.iterdir())


def test_no_recording(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"manifest\.json"):
        read_recording(tmp_path)


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    document = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(edit(document)))


def test_other_bytes_of_the_tensors_are_found(folder: Path) -> None:
    file = folder / "step-0002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"step-0002\.safetensors: is not"):
        read_recording(folder)
    file.unlink()
    with pytest.raises(DataError, match=r"step-0002\.safetensors: is missing"):
        read_recording(folder)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda d: d | {"version": 9}, "version 9"),
        (lambda d: d | {"format": "other"}, "format 'other'"),
        (lambda d: {name: value for name, value in d.items() if name != "side"}, "'side'"),
        (lambda d: d | {"settings": []}, "settings"),
        (lambda d: d | {"steps": []}, "0 steps"),
        (lambda d: d | {"steps": [{}] * 101}, "101 steps"),
        (lambda d: [], MANIFEST),
        (lambda d: d | {"tensors": d["tensors"] * 2}, "twice"),
        (lambda d: d | {"tensors": [{"step": 1}]}, MANIFEST),
        (lambda d: d | {"tensors": [d["tensors"][0] | {"part": "../x"}]}, "tensor {"),
        (lambda d: d | {"tensors": [d["tensors"][0] | {"step": 3}]}, "tensor {"),
        (lambda d: d | {"tensors": [d["tensors"][0] | {"step": True}]}, "tensor {"),
        (lambda d: d | {"tensors": [d["tensors"][0] | {"shape": [-1]}]}, "tensor {"),
        (lambda d: d | {"tensors": [d["tensors"][0] | {"name": 3}]}, "tensor {"),
    ],
)
def test_a_manifest_is_not_trusted(folder: Path, edit: Callable[[Any], Any], fault: str) -> None:
    change(folder, edit)
    with pytest.raises(DataError) as caught:
        read_recording(folder)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_no_json(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DataError, match="not a recording"):
        read_recording(folder)


def test_a_manifest_has_a_largest_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(DataError, match=r"manifest.json: is larger than"):
        read_recording(folder)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"step1/batch/image_ids": np.zeros(2, np.float32)},
        {"step1/batch/image_ids": np.zeros([2, 1], np.int64)},
    ],
)
def test_tensors_are_what_the_manifest_says(folder: Path, tensors: dict[str, Any]) -> None:
    file = folder / "step-0001.safetensors"
    save_file(tensors, file)
    entry = {"bytes": file.stat().st_size, "sha256": hash_file(file)}
    change(folder, lambda document: document | {"steps": [entry, document["steps"][1]]})
    recording = read_recording(folder)
    with pytest.raises(DataError, match=r"step-0001.safetensors: step1/batch/image_ids: "):
        recording.read(recording.tensors[0])
