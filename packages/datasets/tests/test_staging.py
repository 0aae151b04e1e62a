from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_datasets.staging import staging_folder


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
