from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.stores import find_cache
from gaudi_datasets.layouts.file_checksums import cache_folder
from gaudi_datasets.output_files import resumable_folder


def test_unfinished_work_stays_unless_the_data_is_at_fault(tmp_path: Path) -> None:
    folder = tmp_path / "a" / ".work"

    def work(error: BaseException) -> None:
        with resumable_folder(folder):
            (folder / "x").write_text("x")
            raise error

    for error in (KeyboardInterrupt(), OSError("the disk is full")):
        with pytest.raises(type(error)):
            work(error)
        assert [path.name for path in folder.parent.iterdir()] == [".work"]
        assert (folder / "x").exists()
    with pytest.raises(DataError):
        work(DataError("fault"))
    assert list(folder.parent.iterdir()) == []


def test_nothing_stays_of_finished_or_empty_work(tmp_path: Path) -> None:
    folder = tmp_path / "a" / ".work"
    with pytest.raises(KeyboardInterrupt), resumable_folder(folder):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with resumable_folder(folder):
        (folder / "x").write_text("x")
        (folder / "left").write_text("y")
        (folder / "x").rename(folder.parent / "x")
    assert [path.name for path in folder.parent.iterdir()] == ["x"]


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / ".work"
    with resumable_folder(folder):
        with pytest.raises(UnsafeError, match="another process writes"), resumable_folder(folder):
            pass
        assert folder.is_dir()


def test_without_a_home_the_cache_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", find)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for cache in (find_cache, cache_folder):
        with pytest.raises(MissingInputError) as caught:
            cache("records")
        assert caught.value.exit_status == 66
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert find_cache("records") == cache_folder("records") == Path("/somewhere/gaudi/records")
