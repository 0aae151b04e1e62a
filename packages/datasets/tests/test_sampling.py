from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_datasets.sampling import InputOptions, SampleOrder, deal_positions, image_generator

RANKS = range(1, 9)
NUM_IMAGES = 48  # divided by some of the global batches, not by others


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("size", RANKS)
def test_no_image_is_trained_on_twice_within_an_epoch(size: int, batch_size: int) -> None:
    """Every rank makes the same steps; together these are whole permutations, one after the other."""
    orders = [SampleOrder(NUM_IMAGES, InputOptions(batch_size, rank=rank, size=size)) for rank in range(size)]
    steps = -(-3 * NUM_IMAGES // (batch_size * size))
    seen: dict[int, list[int]] = {}
    for step in range(steps):
        for order in orders:
            indices, epochs = order.at_step(step)
            assert indices.shape == epochs.shape == (batch_size,)
            for index, epoch in zip(indices.tolist(), epochs.tolist(), strict=True):
                seen.setdefault(epoch, []).append(index)
    assert [sorted(seen[epoch]) for epoch in range(3)] == [list(range(NUM_IMAGES))] * 3
    assert all(len(set(indices)) == len(indices) for indices in seen.values())


@given(num_images=st.integers(1, 200), batch_size=st.integers(1, 9), size=st.sampled_from(RANKS))
@settings(max_examples=200, deadline=None)
def test_every_image_is_evaluated_once_in_equal_steps(num_images: int, batch_size: int, size: int) -> None:
    parts = [deal_positions(num_images, InputOptions(batch_size, rank=rank, size=size)) for rank in range(size)]
    steps = -(-num_images // (batch_size * size))
    assert [len(part) for part in parts] == [steps * batch_size] * size
    assert sorted(np.concatenate(parts).tolist()) == list(range(steps * batch_size * size))
    for part in parts:
        assert (np.diff(part) > 0).all()


def test_generators_are_their_own_by_each_number() -> None:
    numbers = [(seed, epoch, image) for seed in (0, 1, -1) for epoch in (0, 1) for image in (-1, 0, 2**62)]
    drawn = {tuple(image_generator(*three).random(3)) for three in numbers}
    assert len(drawn) == len(numbers)
    assert tuple(image_generator(1, 1, 0).random(3)) in drawn
