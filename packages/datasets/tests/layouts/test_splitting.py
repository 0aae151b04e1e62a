from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_datasets.errors import DataError, FlagError
from gaudi_datasets.layouts.splitting import choose_validation, hash_files


def choose(
    classes: Sequence[Sequence[int]], share: float = 0.2, seed: int = 0, contents: Sequence[int] = ()
) -> list[bool]:
    names = [f"{number}.jpg" for number in range(len(classes))]
    listed = list(contents) or list(range(len(classes)))
    return choose_validation(classes, names, listed, share=share, seed=seed, name="x").tolist()


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=2, max_size=60),
    st.sampled_from([0.1, 0.2, 0.35, 0.5]),
    st.integers(0, 5),
)
def test_validation_has_about_its_share(classes: list[list[int]], share: float, seed: int) -> None:
    chosen = choose(classes, share, seed)
    assert 0 < sum(chosen) < len(classes)
    assert sum(chosen) <= max(1, share * len(classes) + 0.5 + 1e-6)
    assert choose(classes, share, seed) == chosen


def test_each_class_has_its_share() -> None:
    classes = [[0]] * 100 + [[1]] * 20 + [[0, 2]] * 10
    chosen = np.array(choose(classes))
    assert [int(chosen[:100].sum()), int(chosen[100:120].sum()), int(chosen[120:].sum())] == [20, 4, 2]


def test_the_choice_does_not_depend_on_the_order_of_images() -> None:
    classes = [[number % 3] for number in range(30)]
    names = [f"{number}.jpg" for number in range(30)]
    order = np.random.default_rng(0).permutation(30)
    first = choose_validation(classes, names, list(range(30)), share=0.3, seed=1, name="x")
    second = choose_validation(
        [classes[row] for row in order], [names[row] for row in order], order.tolist(), share=0.3, seed=1, name="x"
    )
    assert {names[row] for row in np.flatnonzero(first)} == {names[order[row]] for row in np.flatnonzero(second)}


def test_equal_images_are_on_one_side() -> None:
    contents = [number // 3 for number in range(30)]
    chosen = np.array(choose([[0]] * 30, 0.3, contents=contents)).reshape(10, 3)
    assert (chosen.all(axis=1) | ~chosen.any(axis=1)).all()
    assert chosen.sum() == 9


def test_too_few_images_and_wrong_shares_are_refused() -> None:
    with pytest.raises(DataError):
        choose([[0]])
    with pytest.raises(DataError):
        choose([[0], [0]], contents=[1, 1])
    for share in (0, 1, -1):
        with pytest.raises(FlagError) as error:
            choose([[0], [0]], share)
        assert error.value.flag == "--val_share"


def test_files_are_equal_by_their_content(tmp_path: Path) -> None:
    contents = [b"a" * 50_000, b"a" * 49_999 + b"b", b"a" * 50_000, b"b", b"c", b"b"]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    hashes = hash_files(paths)
    equal = [[one == other for other in hashes] for one in hashes]
    assert equal == [[one == other for other in contents] for one in contents]
