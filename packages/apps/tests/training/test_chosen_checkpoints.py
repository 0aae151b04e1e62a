"""The checkpoint of a run that is used, and the errors where it does not fit the model or the data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from gaudi_apps.training.checkpoint import (
    BEST,
    CHECKPOINTS,
    MANIFEST,
    RUN_FILE,
    CheckpointFolder,
    RunState,
    describe_class_change,
    find_checkpoints,
    find_run_checkpoint,
    load_checkpoint,
    load_chosen,
    name_some,
    require_classes,
    require_names,
    require_shape,
)
from gaudi_datasets.errors import DataError, MissingInputError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run with checkpoints of steps 1 to 7, of which that of step 3 is the best."""
    for name, steps in ((CHECKPOINTS, range(1, 8)), (BEST, (3,))):
        for step in steps:
            CheckpointFolder(tmp_path / name).save(step, {"one": np.array(step)}, {})
    return tmp_path


@pytest.mark.parametrize(
    ("which", "name", "steps"),
    [
        ("newest", CHECKPOINTS, [7]),
        ("best", BEST, [3]),
        ("4", CHECKPOINTS, [4]),
        ("004", CHECKPOINTS, [4]),
        ("all", CHECKPOINTS, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_checkpoints_are_found_by_name_and_step(run: Path, which: str, name: str, steps: list[int]) -> None:
    assert find_checkpoints(run, which) == [CheckpointFolder(run / name).path(step) for step in steps]
    told: list[str] = []
    assert load_chosen(run, which, told.append).step == steps[0]
    assert told == []


def test_of_an_unreadable_newest_one_is_told_where_it_is_chosen(run: Path) -> None:
    (CheckpointFolder(run / CHECKPOINTS).path(7) / MANIFEST).write_text("{")
    told: list[str] = []
    assert load_chosen(run, "newest", told.append).step == 6
    assert len(told) == 1


def test_a_step_that_is_not_there_names_the_last_five(run: Path) -> None:
    with pytest.raises(MissingInputError) as caught:
        find_checkpoints(run, "8")
    assert caught.value.path == str(run / CHECKPOINTS)
    assert re.findall(r"\d", str(caught.value.remedy)) == ["3", "4", "5", "6", "7"]


def test_what_to_do_without_a_checkpoint_depends_on_what_there_is(tmp_path: Path) -> None:
    def find_remedy(which: str) -> str | None:
        with pytest.raises(MissingInputError) as caught:
            find_checkpoints(tmp_path, which)
        assert caught.value.path == str(tmp_path / (BEST if which == "best" else CHECKPOINTS))
        return caught.value.remedy

    none = {find_remedy(which) for which in ("best", "newest", "all", "1")}
    CheckpointFolder(tmp_path / CHECKPOINTS).save(1, {"one": np.array(1)}, {})
    no_best, no_step = find_remedy("best"), find_remedy("2")
    assert len({*none, no_best, no_step}) == 3
    assert "--eval_epochs" in str(no_best)


def test_of_a_run_its_best_checkpoint_is_used_and_else_its_newest(run: Path, tmp_path: Path) -> None:
    best = CheckpointFolder(run / BEST)
    others = CheckpointFolder(run / CHECKPOINTS)
    assert find_run_checkpoint(run) == best.path(3)
    assert find_run_checkpoint(run / CHECKPOINTS) == others.path(7)
    best.clear()
    assert find_run_checkpoint(run) == others.path(7)
    # These are no runs: a checkpoint, a file, nothing, a folder of something else.
    (run / "weights").write_bytes(b"")
    (run / "other").mkdir()
    for path in (others.path(7), run / "weights", run / "none", run / "other"):
        assert find_run_checkpoint(path) is None
    (run / "other" / RUN_FILE).write_text("{}")
    with pytest.raises(MissingInputError) as caught:
        find_run_checkpoint(run / "other")
    assert caught.value.path == str(run / "other")


def test_a_checkpoint_is_of_the_step_that_names_its_folder(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / CHECKPOINTS)
    path = folder.save(1, {"one": np.array(1)}, {})
    assert load_checkpoint(path.rename(tmp_path / "weights")).step == 1
    with pytest.raises(DataError) as caught:
        load_checkpoint((tmp_path / "weights").rename(folder.path(2)))
    assert caught.value.field == "step"


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"id": "other", "settings": {}}, "run"),
        ({"settings": {"seed": 2}}, "seed"),
        ({"settings": {"seed": 1, "data": 2, "more": 3}}, None),
        ({"id": "other"}, None),  # a record without settings is none
    ],
)
def test_a_checkpoint_is_of_the_run_that_it_lies_in(
    tmp_path: Path, record: dict[str, object], field: str | None
) -> None:
    path = CheckpointFolder(tmp_path / CHECKPOINTS).save(1, {"one": np.array(1)}, {"settings": {"seed": 1, "data": 1}})
    assert load_checkpoint(path).run_state.settings["seed"] == 1
    (tmp_path / RUN_FILE).write_text(json.dumps(record))
    if field is None:
        assert load_checkpoint(path).step == 1
    else:
        with pytest.raises(DataError) as caught:
            load_checkpoint(path)
        assert caught.value.field == field


def test_the_newest_twenty_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in range(22):
        folder.save(step, {"one": np.array(step)}, {})
    assert folder.steps() == [*range(2, 22)]


def test_a_state_comes_back_from_its_json_values() -> None:
    state = RunState(5, {"seed": 1}, 4, 2, 3, "sequence", {"bad": 0}, ("a", "b"), ((1, 9), (2, 8)), 7)
    assert RunState.from_json(5, state.to_json()) == state
    assert RunState.from_json(0, {}) == RunState()
    for hashes in (["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="history"):
            RunState.from_json(1, {"history": hashes})


def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named() -> None:
    require_names(["a", "b"], ("b", "a"))
    for found, expected in ((["a"], ["a", "c", "b"]), (["c", "a", "b"], ["a"])):
        with pytest.raises(DataError) as caught:
            require_names(found, expected)
        assert caught.value.field == "b"
        assert " 2 tensors " in str(caught.value)
    require_shape("a", (2, 3), [2, 3])
    with pytest.raises(DataError) as caught:
        require_shape("a", (2, 3), [3, 2])
    assert caught.value.field == "a"
    assert "[2, 3]" in str(caught.value)
    assert "[3, 2]" in str(caught.value)


def test_classes_of_other_data_are_named() -> None:
    found = {"categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}], "more": 1}
    require_classes(found, {"categories": json.loads(json.dumps(found["categories"]))}, "run")
    with pytest.raises(DataError) as caught:
        require_classes(found, {"categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "cow"}]}, "run")
    assert (caught.value.record, caught.value.field) == ("run", "categories")
    assert str(caught.value).index('"dog"') < str(caught.value).index('"cow"')
    with pytest.raises(DataError) as caught:
        require_classes(found, {"classes": ["cat"]}, "run")
    assert (caught.value.record, caught.value.field) == ("run", "classes")


def test_the_first_three_names_are_shown_and_the_others_counted() -> None:
    assert name_some("new", []) == ""
    assert name_some("new", ["a", "ü", "c"]) == 'new: "a", "ü", "c"'
    assert name_some("new", list("abcde")) == 'new: "a", "b", "c" and 2 more'
    assert describe_class_change(["a", "b"], ["a", "b"]) == ""
    shown = re.findall(r"\b\w\b", describe_class_change(list("abcd"), list("dcba")))
    assert shown == ["a", "b", "c", "d", "c", "b"]
    gone, new = describe_class_change(["a", "b"], ["b", "c"]).split("; ")
    assert (gone.endswith(' "a"'), new.endswith(' "c"')) == (True, True)
