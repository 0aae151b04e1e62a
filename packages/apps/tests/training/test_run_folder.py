from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.runtime.errors import RunChangedError
from gaudi_apps.training import run
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.recipe import Choice, Recipe, read_recipe
from gaudi_apps.training.run_dir import RUN_FILE, RunFolder
from gaudi_datasets.errors import DataError, UnsafeError

SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "base_lr": float("inf"),
    "drops": (40.0, 50.0),
    "data": "abc",
    "file": None,
}
FILES, FOLDERS = ("history.jsonl", "curves.png"), ("pictures",)


def begin(folder: Path, **changes: Any) -> bool:
    return RunFolder(folder).begin({**SETTINGS, **changes}, files=FILES, folders=FOLDERS)


def validate(folder: Path, **changes: Any) -> bool:
    return RunFolder(folder).validate({**SETTINGS, **changes}, files=FILES, folders=FOLDERS)


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def save_checkpoint(folder: Path, step: int = 1) -> None:
    CheckpointFolder(folder / "checkpoints").save(step, {"a": np.zeros(3)}, {})


def edit_record(folder: Path, **changes: Any) -> None:
    path = folder / RUN_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_run_is_begun_once_and_then_continued(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert not validate(folder)
    assert list(tmp_path.iterdir()) == []
    assert not begin(folder)
    assert list_files(folder) == [RUN_FILE]
    before = (folder / RUN_FILE).read_bytes()
    save_checkpoint(folder)
    (folder / "history.jsonl").touch()
    assert validate(folder)
    assert begin(folder)
    assert (folder / RUN_FILE).read_bytes() == before


def test_a_run_that_was_begun_under_former_names_of_flags_goes_on(tmp_path: Path) -> None:
    begin(tmp_path, pretrained_filepath="a.pth")
    now, aliases = {**SETTINGS, "weights": "a.pth"}, {"pretrained_filepath": "weights"}
    assert RunFolder(tmp_path).begin(now, files=FILES, folders=FOLDERS, aliases=aliases)
    with pytest.raises(RunChangedError) as caught:
        RunFolder(tmp_path).begin({**now, "weights": "b.pth"}, files=FILES, folders=FOLDERS, aliases=aliases)
    assert caught.value.field == "weights"


@pytest.mark.parametrize(
    ("changes", "field", "named"),
    [
        ({"batch_size": 16}, "batch_size", "8, this one 16;"),
        ({"drops": (40.0, 51.0)}, "drops", r"\[40.0, 50.0\], this one \[40.0, 51.0\]"),
        ({"file": "a.pth"}, "file", "None, this one 'a.pth'"),
        ({"new": 1}, "new", "None, this one 1"),
        (
            *({"base_lr": 1, "data": "x", "batch_size": 9}, "base_lr"),
            r"inf, this one 1 \(and 2 more: batch_size, data\)",
        ),
    ],
)
def test_changed_settings_are_refused_and_named(
    tmp_path: Path, changes: dict[str, Any], field: str, named: str
) -> None:
    begin(tmp_path)
    for refuse in (begin, validate):
        with pytest.raises(RunChangedError, match=f" {field} {named}") as caught:
            refuse(tmp_path, **changes)
        assert (caught.value.exit_status, caught.value.path, caught.value.field) == (
            78,
            str(tmp_path / RUN_FILE),
            field,
        )
    assert "--clean to start over" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["checkpoints", "history.jsonl", "curves.png", "pictures"])
@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_what_no_run_wrote_is_not_written_over(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "dangling link":
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / name).mkdir() if kind == "folder" else (tmp_path / name).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    for refuse in (begin, validate):
        with pytest.raises(UnsafeError, match=r"run\.json no run wrote") as caught:
            refuse(tmp_path)
        assert (caught.value.exit_status, caught.value.path) == (77, str(tmp_path / name))
    assert not (tmp_path / RUN_FILE).exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "gaudi-apps run", "version": 2, "settings": {}, "files": []}',
        '{"format": "gaudi-apps run", "version": 1, "settings": [], "files": []}',
        '{"format": "gaudi-apps run", "version": 1, "settings": {}, "files": "abc"}',
        '{"format": "gaudi-apps run", "version": 1, "settings": {}, "files": [3]}',
        '{"format": "gaudi-apps run", "version": 1, "settings": {}, "files": ["a\\u0000b"]}',
        "\udcff",
    ],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN_FILE).write_text(text, errors="surrogateescape")
    (tmp_path / "a").write_text("mine")
    run = RunFolder(tmp_path)
    for act in (lambda: begin(tmp_path), run.clean, lambda: run.register_files(tmp_path / "a")):
        with pytest.raises(DataError, match="no record of") as caught:
            act()
        assert caught.value.path == str(tmp_path / RUN_FILE)
        assert "\n" not in str(caught.value)
    assert list_files(tmp_path) == ["a", RUN_FILE]


def test_clean_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    begin(tmp_path)
    save_checkpoint(tmp_path, 1)
    save_checkpoint(tmp_path, 2)
    for name in ("history.jsonl", "notes.txt", "pictures/1.png", "pictures/mine.png", "traces/a/b/c.pb", "mine/d.pb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    run = RunFolder(tmp_path)
    run.register_files(tmp_path / "pictures" / "1.png", tmp_path / "traces" / "a" / "b" / "c.pb")
    run.register_files(tmp_path / "pictures" / "1.png")
    assert json.loads((tmp_path / RUN_FILE).read_text())["files"] == [
        "curves.png",
        "history.jsonl",
        "pictures/1.png",
        "traces/a/b/c.pb",
    ]
    assert run.clean() == 3  # there was no curves.png
    assert list_files(tmp_path) == [
        "checkpoints",
        "checkpoints/notes.txt",
        "mine",
        "mine/d.pb",
        "notes.txt",
        "pictures",
        "pictures/mine.png",
    ]


def test_a_run_may_begin_after_clean(tmp_path: Path) -> None:
    begin(tmp_path)
    save_checkpoint(tmp_path)
    (tmp_path / "curves.png").touch()
    RunFolder(tmp_path).clean()
    assert list(tmp_path.iterdir()) == []
    assert not begin(tmp_path, batch_size=3)


def test_clean_without_a_run(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "nowhere").clean() == 0
    assert RunFolder(tmp_path).clean() == 0
    save_checkpoint(tmp_path)
    before = list_files(tmp_path)
    with pytest.raises(UnsafeError, match=r"no run\.json, so --clean") as caught:
        RunFolder(tmp_path).clean()
    assert caught.value.path == str(tmp_path)
    assert list_files(tmp_path) == before


def test_nothing_is_noted_where_no_run_is(tmp_path: Path) -> None:
    RunFolder(tmp_path).register_files(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../mine.txt", "pictures/../../mine.txt", "{outside}/mine.txt", "linked/mine.txt", "", "."]
)
def test_clean_does_not_leave_the_folder(tmp_path: Path, name: str) -> None:
    """Somebody wrote a name into run.json, or put a link in the place of a folder."""
    folder = tmp_path / "run"
    begin(folder)
    save_checkpoint(folder)
    (folder / "history.jsonl").write_text("ours")
    (tmp_path / "mine.txt").write_text("mine")
    (folder / "linked").symlink_to(tmp_path)
    edit_record(folder, files=["history.jsonl", name.format(outside=tmp_path)])
    before = list_files(tmp_path)
    with pytest.raises(UnsafeError, match=r"is outside .*run\.json") as caught:
        RunFolder(folder).clean()
    assert caught.value.exit_status == 77
    assert list_files(tmp_path) == before


def test_clean_follows_no_link(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    for each in (folder, other):
        begin(each)
    save_checkpoint(other)
    (folder / "history.jsonl").symlink_to(other / RUN_FILE)
    assert RunFolder(folder).clean() == 1
    assert (other / RUN_FILE).exists()

    begin(folder)
    (folder / "checkpoints").symlink_to(other / "checkpoints")
    with pytest.raises(UnsafeError, match="is outside") as caught:
        RunFolder(folder).clean()
    assert caught.value.path == str(folder / "checkpoints")
    assert CheckpointFolder(other / "checkpoints").steps() == [1]


def test_a_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    begin(real)
    save_checkpoint(real)
    (tmp_path / "link").symlink_to(real)
    assert begin(tmp_path / "link")
    RunFolder(tmp_path / "link").clean()
    assert list(real.iterdir()) == []


def test_the_recipe_of_a_run_is_there_before_the_run(tmp_path: Path) -> None:
    """A process that ends between the two files leaves what a second start goes on by."""
    files, recipe = (*FILES, "recipe.json"), Recipe((Choice("steps", 7, "fitted"),), minutes=1.0, is_fitted=True)
    document = recipe.to_document()
    with pytest.raises(TypeError):  # of a value that the second file cannot hold
        RunFolder(tmp_path / "a").begin({"x": object()}, files=files, folders=FOLDERS, recipe=document)
    assert list_files(tmp_path / "a") == ["recipe.json"]
    assert RunFolder(tmp_path / "a").clean() == 0
    assert not RunFolder(tmp_path / "a").begin(SETTINGS, files=files, folders=FOLDERS, recipe=document)
    assert read_recipe(tmp_path / "a", (), 1.0) == recipe

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "recipe.json").write_text('{"of": "somebody"}')
    with pytest.raises(UnsafeError):
        RunFolder(tmp_path / "b").begin(SETTINGS, files=files, folders=FOLDERS, recipe=document)


@pytest.mark.parametrize("name", ["split.json", "checked.json", "training_data.json", "metrics.csv", "mlflow.json"])
def test_files_of_somebody_else_are_not_those_of_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("own")
    with pytest.raises(UnsafeError):
        RunFolder(tmp_path).validate(SETTINGS, files=run.FILES, folders=run.FOLDERS)
