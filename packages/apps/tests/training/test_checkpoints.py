from __future__ import annotations

import errno
import itertools
import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_apps.training import checkpoint as checkpoints
from gaudi_apps.training.checkpoint import MANIFEST, TENSORS, CheckpointFolder, load_checkpoint
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_ops.program import exit_status_of

METADATA = {"categories": [{"id": 1, "name": "cät"}]}


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
    path = folder.save(12, make_tensors(), METADATA)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000012"
    assert names(path) == [MANIFEST, TENSORS]
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE((path / name).stat().st_mode) for name in names(path)} == {0o666 & ~umask}
    loaded = folder.load_newest()
    assert (loaded.step, loaded.metadata) == (12, METADATA)
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
    assert folder.load_newest().metadata == {"run": 2}
    assert names(tmp_path) == ["step-00000001"]


def test_none_is_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="has no checkpoint") as caught:
        CheckpointFolder(tmp_path).load_newest()
    assert caught.value.path == str(tmp_path)
    assert "--model_dir" in (caught.value.remedy or "")


def list_damages(content: bytes, places: Sequence[int]) -> Iterator[tuple[str, bytes | None]]:
    """Draw a damage of a file: lost, cut off at a place, or one byte of it changed there."""
    yield "lost", None
    for place in places:
        yield f"cut off at {place}", content[:place]
        # Of a newline, 7 makes a carriage return, which reading as text would change back.
        for mask in (1, 7, 32, 128):
            changed = bytearray(content)
            changed[place] ^= mask
            yield f"byte {place} changed by {mask}", bytes(changed)
    yield "longer", content + b"\0"
    yield "of something else", b"[1, 2]"


def choose_places(name: str, content: bytes) -> list[int]:
    """Offsets of every kind that a file has: some random ones of each kind, and its first and last."""
    if name == MANIFEST:
        starts = [0, *(content.index(word) for word in (b"manifest_sha256", b'"facts"', b'"sha256"', b'"step"'))]
    else:
        header = int.from_bytes(content[:8], "little")
        starts = [0, 8, 8 + header]  # length of the header, header, numbers
    bounds = [*sorted(starts), len(content)]
    drawn = random.Random(7)
    kinds = [range(first, last) for first, last in itertools.pairwise(bounds)]
    return sorted({place for kind in kinds for place in (kind[0], kind[-1], *drawn.sample(kind, min(len(kind), 8)))})


@pytest.mark.parametrize("name", [TENSORS, MANIFEST])
def test_damage_anywhere_is_refused_and_named(tmp_path: Path, name: str) -> None:
    path = CheckpointFolder(tmp_path).save(5, make_tensors(), METADATA)
    good = (path / name).read_bytes()
    cases = 0
    for what, damaged in list_damages(good, choose_places(name, good)):
        (path / name).unlink(missing_ok=True)
        if damaged is not None:
            (path / name).write_bytes(damaged)
        with pytest.raises(DataError, match="step-00000005") as caught:
            pytest.fail(f"{what}: loaded {load_checkpoint(path)}")
        assert "\n" not in str(caught.value), what
        cases += 1
    assert cases >= 100
    (path / name).write_bytes(good)
    assert load_checkpoint(path).step == 5


@pytest.mark.parametrize(
    "changes", [{"version": 1}, {"version": 3}, {"format": "another"}, {"sha256": {}}, {"sha256": 3}]
)
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = CheckpointFolder(tmp_path).save(5, make_tensors(), {})
    manifest = json.loads((path / MANIFEST).read_text())["manifest"]
    (path / MANIFEST).write_bytes(checkpoints._render(manifest | changes))
    with pytest.raises(DataError, match="step-00000005"):
        load_checkpoint(path)


def test_the_damaged_file_is_named(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(5, make_tensors(), {})
    content = (path / MANIFEST).read_bytes()
    manifest = json.loads(content)["manifest"]
    for damaged in (content + b" ", checkpoints._render(manifest | {"version": 3})):
        (path / MANIFEST).write_bytes(damaged)
        with pytest.raises(DataError, match=f"^{path / MANIFEST}: "):
            load_checkpoint(path)
    (path / MANIFEST).write_bytes(content)
    (path / TENSORS).write_bytes(b"")
    with pytest.raises(DataError, match=f"^{path / TENSORS}: "):
        load_checkpoint(path)


@pytest.mark.parametrize("name", [TENSORS, MANIFEST])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_a_file_that_the_system_cannot_read_now_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, make_tensors(step), {})
    failing = {MANIFEST: "read_file", TENSORS: "hash_file"}[name]
    read = getattr(checkpoints, failing)

    def fail(path: Path) -> Any:
        if path == folder.path(2) / name:
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(checkpoints, failing, fail)
    told: list[str] = []
    with pytest.raises(OSError) as caught:
        folder.load_newest(report=told.append)
    assert (caught.value.errno, caught.value.filename, told) == (number, str(folder.path(2) / name), [])
    assert exit_status_of(caught.value) == 74


def test_a_folder_in_the_place_of_a_file_is_damage(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(5, make_tensors(), {})
    (path / TENSORS).unlink()
    (path / TENSORS).mkdir()
    with pytest.raises(DataError) as caught:
        load_checkpoint(path)
    assert caught.value.exit_status == 65


@pytest.mark.parametrize("lost", [TENSORS, MANIFEST])
def test_of_an_unreadable_newest_one_is_told_and_the_one_before_is_used(tmp_path: Path, lost: str) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.save(step, make_tensors(step), {})
    (folder.path(3) / lost).unlink()
    told: list[str] = []
    assert folder.load_newest(report=told.append).step == 2
    assert len(told) == 1
    assert "step-00000003" in told[0]
    for step in (1, 2):
        (folder.path(step) / lost).write_bytes(b"")
    with pytest.raises(DataError, match="of its 3 checkpoints") as caught:
        folder.load_newest(report=told.append)
    assert caught.value.path == str(tmp_path)
    assert [text.partition("step-")[2][:8] for text in told[1:]] == ["00000003", "00000002", "00000001"]


def test_a_damaged_newer_one_takes_no_place_and_is_written_anew(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(6, make_tensors(), {})
    (folder.path(6) / TENSORS).write_bytes(b"")
    (folder.path(6) / "mine.txt").write_text("mine")
    folder.save(4, make_tensors(), {})
    folder.save(5, make_tensors(5), {})
    assert folder.steps() == [5, 6]
    assert folder.load_newest().step == 5
    folder.save(6, make_tensors(6), {})
    assert folder.steps() == [6]
    assert folder.load_newest().tensors["layer/kernel"].tobytes() == make_tensors(6)["layer/kernel"].tobytes()
    assert names(folder.path(6)) == [MANIFEST, "mine.txt", TENSORS]
    assert names(tmp_path) == ["step-00000006"]


@pytest.mark.parametrize("failing", ["write_file", "_publish"])
def test_saving_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """The disk fills up at one of the moments of writing, after the tensors are partly there."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, make_tensors(1), {})

    def fail(path: Path, *others: Any) -> None:
        if failing == "write_file":
            path.write_bytes(b"half")
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
    (tmp_path / "step-00000009.tmp").mkdir()
    (tmp_path / "step-00000001").mkdir()  # it was about to be removed
    folder.save(3, make_tensors(), {})
    assert names(tmp_path) == ["step-00000003"]
    assert folder.load_newest().step == 3


def test_clearing_leaves_what_is_of_others(tmp_path: Path) -> None:
    folder, other = CheckpointFolder(tmp_path / "run"), CheckpointFolder(tmp_path / "other")
    for each in (folder, other):
        for step in (1, 2):
            each.save(step, make_tensors(), {})
    draft = folder.folder / "step-00000003.tmp"
    draft.mkdir()
    (draft / TENSORS).write_bytes(b"half")
    (folder.path(2) / "mine.txt").write_text("mine")
    (folder.folder / "notes.txt").write_text("mine")
    folder.path(7).symlink_to(other.path(1))
    assert folder.steps() == [1, 2]
    folder.clear()
    assert names(folder.folder) == ["notes.txt", "step-00000002", "step-00000007"]
    assert names(folder.path(2)) == ["mine.txt"]
    assert other.steps() == [1, 2]
    assert other.load_newest().step == 2
    other.clear()
    assert not other.folder.exists()
    other.clear()


def test_a_disk_that_is_full_leaves_the_last_good_one(tmp_path: Path) -> None:
    """Files of this process may have no more than 4096 bytes, after the first checkpoint."""
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_ops.program import run_program

def main():
    folder = CheckpointFolder(Path(sys.argv[1]), keep=1)
    folder.save(1, {"a": np.arange(5000.0)}, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    folder.save(2, {"a": np.arange(5000.0)}, {})

run_program(main, prog="saver")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 74, done.stderr
    assert done.stderr == f"saver: error: {tmp_path}/step-00000002: File too large\n"
    assert names(tmp_path) == ["step-00000001"]
    assert CheckpointFolder(tmp_path).load_newest().tensors["a"].tolist() == list(range(5000))


def test_checkpoints_of_later_steps_are_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (7, 4):
        folder.save(step, {"a": np.zeros(1)}, {})
    folder.remove_later(4)
    assert folder.steps() == [4]


@pytest.mark.parametrize(
    "metadata",
    [
        {"settings": []},
        {"position": 3},
        {"position": {"epoch": 1}},
        {"position": {"epoch": "1", "image": 0}},
        {"position": {"epoch": -1, "image": 0}},
        {"batch_norm_images": True},
        {"image_sequence": None},
        {"early_stop": []},
        {"refits": [[1]]},
        {"refits": ["ab"]},
        {"refits": 4},
        {"refits": [[float("inf"), 1]]},
        {"refits": [[True, 1]]},
    ],
)
def test_values_of_another_type_are_damage(tmp_path: Path, metadata: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, make_tensors(), {})
    folder.save(2, make_tensors(), metadata)
    with pytest.raises(DataError) as raised:
        load_checkpoint(folder.path(2))
    assert folder.path(2).name in str(raised.value)
    assert folder.load_newest().step == 1


def test_no_checkpoint_is_saved_without_the_id_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / checkpoints.RUN_FILE
    record.write_text(json.dumps({"id": "a", "settings": {}}))
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    folder.save(1, make_tensors(), {})

    def fail(path: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "read_file", fail)
        with pytest.raises(OSError) as caught:
            folder.save(2, make_tensors(), {})
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(record))
    content = record.read_bytes()
    record.write_text("{")
    with pytest.raises(DataError) as damaged:
        folder.save(2, make_tensors(), {})
    assert damaged.value.path == str(record)
    record.write_bytes(content)
    assert folder.load_newest().step == 1


def test_an_error_of_the_library_of_tensors_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Any:
        raise OSError("Input/output error (os error 5)")  # as safetensors does, in Rust

    folder = CheckpointFolder(tmp_path)
    folder.save(2, {"a": np.zeros(3)}, {})
    monkeypatch.setattr("gaudi_apps.training.checkpoint.load_file", fail)
    with pytest.raises(OSError) as caught:
        load_checkpoint(folder.path(2))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(folder.path(2) / "state.safetensors"))
