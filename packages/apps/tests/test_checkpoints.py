from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_apps import checkpoints
from gaudi_apps.checkpoints import MANIFEST, TENSORS, CheckpointFolder, load_checkpoint
from gaudi_datasets.errors import DataError, MissingInputError

FACTS = {"categories": [{"id": 1, "name": "cät"}]}


def make_tensors(seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(seed)
    return {
        "layer/kernel": generator.standard_normal((3, 4)).astype(np.float32),
        "layer/bias": np.array([0.0, -0.0, np.nextafter(np.float32(1), np.float32(2))], np.float32),
        "scalar": np.array(7, np.int64),
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert folder.steps() == []
    path = folder.save(12, make_tensors(), FACTS)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000012"
    assert names(path) == [MANIFEST, TENSORS]
    loaded = folder.load_newest()
    assert (loaded.step, loaded.facts) == (12, FACTS)
    assert loaded.tensors.keys() == make_tensors().keys()
    for name, tensor in make_tensors().items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].tobytes() == tensor.tobytes()


def test_the_newest_is_that_of_the_highest_step(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (900, 1000, 100_000_000, 99_999_999):
        folder.save(step, make_tensors(step), {})
    assert folder.steps() == [900, 1000, 99_999_999, 100_000_000]
    assert folder.load_newest().step == 100_000_000


def test_the_newest_are_kept_and_nothing_of_others_is_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-best").mkdir()
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.save(1, make_tensors(), {})
    (folder.path(1) / "mine.txt").write_text("mine")
    for step in (2, 3, 4):
        folder.save(step, make_tensors(), {})
    assert folder.steps() == [3, 4]
    assert names(tmp_path) == ["notes.txt", "step-00000001", "step-00000003", "step-00000004", "step-best"]
    assert names(folder.path(1)) == ["mine.txt"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, make_tensors(0), {"run": 1})
    folder.save(1, make_tensors(1), {"run": 2})
    assert folder.load_newest().facts == {"run": 2}
    assert names(tmp_path) == ["step-00000001"]


def test_none_is_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="has no checkpoint; train first, or give another --model_dir"):
        CheckpointFolder(tmp_path).load_newest()


@pytest.mark.parametrize("name", [TENSORS, MANIFEST])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty", "text"])
def test_damage_is_refused_and_named(tmp_path: Path, name: str, damage: str) -> None:
    path = CheckpointFolder(tmp_path).save(5, make_tensors(), {})
    content = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 128]) + content[middle + 1 :]
        damaged: dict[str, bytes] = {"truncated": content[:-20], "flipped": flipped, "empty": b"", "text": b"[1, 2]"}
        (path / name).write_bytes(damaged[damage])
    with pytest.raises(DataError, match="step-00000005") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"version": 2}, {"format": "another"}, {"facts": 3}, {"sha256": {}}, {"step": None}]
)
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = CheckpointFolder(tmp_path).save(5, make_tensors(), {})
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | changes))
    with pytest.raises(DataError, match="step-00000005"):
        load_checkpoint(path)


def test_a_damaged_newest_one_is_not_passed_over(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, make_tensors(), {})
    (folder.path(2) / TENSORS).unlink()
    with pytest.raises(DataError, match="step-00000002"):
        folder.load_newest()


@pytest.mark.parametrize("failing", ["save_file", "_sha256", "_sync"])
def test_saving_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """The disk fills up at one of the moments of writing, after the tensors are partly there."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, make_tensors(1), {})

    def fail(*arguments: Any) -> None:
        if failing == "save_file":
            Path(arguments[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, failing, fail)
        with pytest.raises(OSError, match="No space left"):
            folder.save(2, make_tensors(2), {})
    assert names(tmp_path) == ["step-00000001"]
    np.testing.assert_array_equal(folder.load_newest().tensors["layer/kernel"], make_tensors(1)["layer/kernel"])


def test_what_json_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        CheckpointFolder(tmp_path).save(2, make_tensors(), {"path": tmp_path})
    assert names(tmp_path) == []


def test_a_draft_of_a_killed_run_is_no_checkpoint_and_is_written_anew(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    draft = tmp_path / "step-00000003.tmp"
    draft.mkdir()
    (draft / TENSORS).write_bytes(b"half")
    assert folder.steps() == []
    folder.save(3, make_tensors(), {})
    assert names(tmp_path) == ["step-00000003"]
    assert folder.load_newest().step == 3
