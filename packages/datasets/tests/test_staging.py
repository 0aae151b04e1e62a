from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_datasets.errors import DataError, UnsafeError
from gaudi_datasets.staging import resumable_folder, staging_folder, write_durably


def test_what_is_renamed_out_stays(tmp_path: Path) -> None:
    output_dir = tmp_path / "a" / "b"
    with staging_folder(output_dir) as staging:
        assert staging.parent == output_dir
        (staging / "x").write_text("x")
        (staging / "left").write_text("y")
        (staging / "x").rename(output_dir / "x")
    assert [path.name for path in output_dir.iterdir()] == ["x"]


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with staging_folder(tmp_path / "a" / "b") as staging:
            (staging / "x").write_text("x")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    with staging_folder(tmp_path):
        pass
    assert tmp_path.is_dir()


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
        with pytest.raises(UnsafeError, match="another process writes the same output"), resumable_folder(folder):
            pass
        assert folder.is_dir()


def test_a_file_is_written_as_a_whole(tmp_path: Path) -> None:
    write_durably(tmp_path / "x", b"one")
    write_durably(tmp_path / "x", b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"two"
