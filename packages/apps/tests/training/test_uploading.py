"""Uploads: the store keeps a run whose upload fails, or whose checkpoints change; stores are in tests/remote."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gaudi_apps.runtime.errors import FailureReporter
from gaudi_apps.training import checkpoint
from gaudi_apps.training.checkpoint import BEST, CHECKPOINTS, CheckpointFolder
from gaudi_apps.training.run_dir import RUN_FILE, RunFolder
from gaudi_apps.training.stored_runs import StoredRun
from gaudi_apps.training.uploading import Uploads
from gaudi_datasets.errors import TransferError
from gaudi_datasets.fetching.uploads import StoredFile

URL = "s3://bucket/run"


class Shelf:
    """A store in memory, which may take nothing, or have something happen once it has taken tensors."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.is_broken = False
        self.after_tensors: list[Callable[[], None]] = []

    def name(self, name: str) -> str:
        return f"{URL}/{name}"

    def read(self, name: str) -> bytes:
        return self.files[name]

    def find_file(self, name: str) -> StoredFile | None:
        return self.list_files().get(name)

    def list_files(self, known: str | None = None) -> dict[str, StoredFile]:
        del known
        return {name: StoredFile(len(content), str(hash(content))) for name, content in self.files.items()}

    def download(self, name: str, size: int, target: Path, *, sha256: str | None = None) -> None:
        del size, sha256
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.files[name])

    def upload(self, name: str, path: Path) -> None:
        self._require_answer(name)
        self.files[name] = path.read_bytes()
        if name.endswith(".safetensors") and self.after_tensors:
            self.after_tensors.pop()()

    def remove(self, name: str) -> None:
        self._require_answer(name)
        self.files.pop(name, None)

    def list_steps(self, kind: str) -> dict[int, int]:
        """Return the number of files of each step."""
        steps = [int(name.split("/")[1].removeprefix("step-")) for name in self.files if name.startswith(f"{kind}/")]
        return {step: steps.count(step) for step in sorted(steps)}

    def _require_answer(self, name: str) -> None:
        if self.is_broken:
            raise TransferError("the store does not answer", path=self.name(name), remedy="run it again later")


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def run(shelf: Shelf, tmp_path: Path) -> StoredRun:
    """Return a run that has begun, and of which the store has nothing."""
    (tmp_path / "copy").mkdir()
    run = start(shelf, tmp_path)
    begin(run)
    return run


def start(shelf: Shelf, tmp_path: Path) -> StoredRun:
    """Return the run as a new process has it."""
    run = StoredRun(URL, tmp_path / "copy")
    run.__dict__["store"] = shelf
    return run


def begin(run: StoredRun) -> None:
    RunFolder(run.folder, (CHECKPOINTS, BEST)).begin({}, files=[], folders=[])


def save(run: StoredRun, step: int, kind: str = CHECKPOINTS, keep: int = 2) -> None:
    CheckpointFolder(run.folder / kind, keep=keep).save(step, {"a": np.full(4, step, np.float32)}, {})


def read_id(content: bytes) -> str:
    return str(json.loads(content)["id"])


def clean(run: StoredRun) -> None:
    """Begin as --clean does, and lose the store before anything is removed there."""
    run.find_stored(begins=True)
    run.begin()
    RunFolder(run.folder, (CHECKPOINTS, BEST)).clean()
    begin(run)
    save(run, 100)
    with pytest.raises(TransferError):
        run.upload(5)


def test_a_run_after_clean_is_kept_where_the_store_has_the_former_one(
    run: StoredRun, shelf: Shelf, tmp_path: Path
) -> None:
    save(run, 50)
    run.upload(5)
    shelf.is_broken = True
    clean(start(shelf, tmp_path))
    own = read_id((run.folder / RUN_FILE).read_bytes())
    assert read_id(shelf.files[RUN_FILE]) != own
    for _ in range(2):  # a second start is killed before it uploads
        again = start(shelf, tmp_path)
        again.fetch(None, begins=True)
        again.begin()
    assert CheckpointFolder(again.folder / CHECKPOINTS).steps() == [100]
    shelf.is_broken = False
    with pytest.raises(TransferError) as caught:  # an evaluation puts nothing of it among files of the former run
        again.upload(None)
    assert caught.value.path == URL
    again.upload(5)
    assert read_id(shelf.files[RUN_FILE]) == own
    assert shelf.list_steps(CHECKPOINTS) == {100: 2}


def test_a_run_that_was_not_noted_is_replaced(run: StoredRun, shelf: Shelf, tmp_path: Path) -> None:
    save(run, 50)
    run.upload(5)
    shelf.is_broken = True
    clean(start(shelf, tmp_path))
    record = json.loads(shelf.files[RUN_FILE])
    shelf.files[RUN_FILE] = json.dumps(record | {"id": "of another machine"}).encode()
    start(shelf, tmp_path).fetch("", begins=True)
    assert read_id((run.folder / RUN_FILE).read_bytes()) == "of another machine"


@pytest.mark.parametrize("cleans", [False, True])
def test_the_command_that_uploads_the_rest_does_not_clean(run: StoredRun, shelf: Shelf, cleans: bool) -> None:
    uploads = Uploads(run, 5, cleans=cleans)
    shelf.is_broken = True
    with pytest.raises(TransferError) as caught, uploads.completed(FailureReporter()):
        pass
    assert ("without --clean" in str(caught.value.remedy)) is cleans


def test_the_last_upload_reports_each_file(run: StoredRun, shelf: Shelf) -> None:
    phases = []

    class Reporter(FailureReporter):
        def at(self, step: int, phase: str, images: int = 0) -> None:
            phases.append((phase, len(shelf.files)))

    save(run, 1)
    uploads = Uploads(run, 5)
    with uploads.completed(Reporter()):
        run.upload(5)
        assert phases == []
        save(run, 2)
        save(run, 3)
    assert phases == [("upload", 3), *(("upload", count) for count in range(3, 7))]


def test_the_last_whole_best_checkpoint_stays_until_the_next_is_there(run: StoredRun, shelf: Shelf) -> None:
    def replace_best() -> None:
        save(run, 150, BEST, keep=1)

    save(run, 90, BEST, keep=1)
    run.upload(5)
    save(run, 100, BEST, keep=1)
    shelf.after_tensors.append(replace_best)
    run.upload(5)
    assert shelf.list_steps(BEST) == {90: 2, 100: 1}
    run.upload(5)
    assert shelf.list_steps(BEST) == {150: 2}


def test_tensors_that_a_killed_upload_left_are_removed(run: StoredRun, shelf: Shelf, tmp_path: Path) -> None:
    save(run, 1)
    run.upload(5)
    for step in (2, 3):
        shelf.files[f"{CHECKPOINTS}/step-{step:08d}/state.safetensors"] = b"half"
    again = start(shelf, tmp_path)
    again.fetch(None, begins=True)
    again.begin()
    save(again, 3)
    again.upload(5)
    assert shelf.list_steps(CHECKPOINTS) == {1: 2, 3: 2}


def test_an_upload_does_not_take_a_disk_that_fails_for_the_lack_of_a_run(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(checkpoint, "read_file", fail)
    with pytest.raises(OSError) as caught:
        run.upload(5)
    assert caught.value.errno == errno.ESTALE
