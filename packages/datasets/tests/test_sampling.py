from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_datasets.sampling import InputOptions, SampleOrder, image_generator, shard_indices, synthetic_image_ids

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
    parts = [shard_indices(num_images, InputOptions(batch_size, rank=rank, size=size)) for rank in range(size)]
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


@pytest.mark.parametrize(
    ("seed", "epoch", "image"), [(0, 0, 0), (5, 7, 3), (2**63 + 1, 2**63 + 3, 2**63 + 5), (-1, 0, -1)]
)
def test_draws_are_those_of_philox(seed: int, epoch: int, image: int) -> None:
    """The epoch is the upper half of the key, the image the highest quarter of the counter."""
    key = seed % 2**64 + (epoch % 2**64 << 64)
    expected = np.random.Generator(np.random.Philox(key=key, counter=image % 2**64 << 192)).random(4)
    np.testing.assert_array_equal(image_generator(seed, epoch, image).random(4), expected)


@pytest.mark.parametrize(("batch_size", "size"), [(1, 3), (4, 1), (2, 2), (5, 2)])
def test_the_sequence_of_images_does_not_depend_on_batches_and_ranks(batch_size: int, size: int) -> None:
    """Image by image it is that of the epochs' permutations, from the generator that no image has."""
    expected = np.concatenate([image_generator(3, epoch, -1).permutation(7) for epoch in range(6)])
    orders = [SampleOrder(7, InputOptions(batch_size, seed=3, rank=rank, size=size)) for rank in range(size)]
    steps = 42 // (batch_size * size)
    found = [order.at_step(step)[0] for step in range(steps) for order in orders]
    np.testing.assert_array_equal(np.concatenate(found), expected[: steps * batch_size * size])


def test_fake_images_are_parts_of_one_global_batch() -> None:
    parts = [synthetic_image_ids(InputOptions(3, rank=rank, size=2)) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]
    assert {part.dtype for part in parts} == {np.dtype(np.int64)}


def test_one_process_is_the_default() -> None:
    options = InputOptions(4)
    assert (options.seed, options.rank, options.size) == (0, 0, 1)
    assert (options.image_size, options.flip_probability, options.cache_encoded) == (300, 0.5, False)
    assert shard_indices(5, options).tolist() == list(range(8))
