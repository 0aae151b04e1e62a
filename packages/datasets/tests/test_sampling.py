from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gaudi_datasets.sampling import (
    READ_AHEAD,
    REPEAT,
    InputOptions,
    SampleOrder,
    balance_classes,
    count_repeated,
    find_repeat_factors,
    image_generator,
    reading_ahead,
    shard_indices,
    synthetic_image_ids,
)

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


def list_epochs(factors: list[float], epochs: int, seed: int = 0) -> list[list[tuple[int, int]]]:
    """List the images of the first epochs, each with the number of its repeat."""
    order = SampleOrder(len(factors), InputOptions(1, seed=seed), np.array(factors))
    found: list[list[tuple[int, int]]] = []
    for epoch in range(epochs):
        steps = [order.at_step(epoch * order.num_images + place) for place in range(order.num_images)]
        assert {int(epochs[0]) % REPEAT for _, epochs in steps} == {epoch}
        found.append([(int(images[0]), int(epochs[0]) // REPEAT) for images, epochs in steps])
    return found


@given(factors=st.lists(st.floats(1, 6), min_size=1, max_size=30), seed=st.integers(0, 2**40))
@example(factors=[1.8, 1.8, 1.8, 1.5, 1.8, 1.8], seed=0)
@settings(max_examples=100, deadline=None)
def test_repeats_are_their_factors_rounded_up_or_down_in_epochs_of_one_length(factors: list[float], seed: int) -> None:
    length = count_repeated(np.array(factors))
    assert abs(length - math.fsum(factors)) < 0.5 + 1e-9  # of a half, the last bit of the sum decides
    for epoch in list_epochs(factors, 3, seed=seed):
        assert len(epoch) == length
        counts = np.bincount([image for image, _ in epoch], minlength=len(factors))
        # The fractions are scaled so that they sum to a whole number.
        assert (counts >= np.floor(factors)).all()
        assert (counts <= np.ceil(factors) + 1).all()
        assert sorted(epoch) == [(image, repeat) for image, count in enumerate(counts) for repeat in range(count)]


@pytest.mark.costly
def test_repeats_are_their_factors_on_average() -> None:
    factors = [1.0, 1.25, 2.5, 1.75, 3.1, 1.4]  # 11 together
    epochs = list_epochs(factors, 2000)
    means = np.bincount([image for epoch in epochs for image, _ in epoch]) / len(epochs)
    np.testing.assert_allclose(means, factors, atol=0.04)


def test_factors_of_one_are_the_order_without_factors_but_for_its_draws() -> None:
    plain = SampleOrder(7, InputOptions(7))
    repeated = SampleOrder(7, InputOptions(7), np.ones(7))
    for step in range(3):
        np.testing.assert_array_equal(repeated.at_step(step), plain.at_step(step))


@pytest.mark.parametrize(("batch_size", "size"), [(1, 3), (4, 1), (2, 2), (5, 2)])
def test_repeats_do_not_depend_on_batches_ranks_and_where_a_run_goes_on(batch_size: int, size: int) -> None:
    factors = np.array([1, 2.3, 1.7, 1, 1.5])
    alone = SampleOrder(5, InputOptions(1, seed=3), factors)
    expected = [np.concatenate(alone.at_step(step)) for step in range(60)]
    steps = 60 // (batch_size * size)
    for step in (steps - 1, 0, 1):  # each by an order that saw no other step
        orders = [SampleOrder(5, InputOptions(batch_size, seed=3, rank=r, size=size), factors) for r in range(size)]
        found = np.concatenate([np.stack(order.at_step(step), 1) for order in orders])
        first = step * batch_size * size
        np.testing.assert_array_equal(found, expected[first : first + batch_size * size])


@given(data=st.data(), num_images=st.integers(1, 20), threshold=st.floats(0.01, 1))
@settings(max_examples=100, deadline=None)
def test_repeat_factors_are_those_of_lvis(data: st.DataObject, num_images: int, threshold: float) -> None:
    """As in the paper's appendix, image by image and class by class."""
    objects = data.draw(st.lists(st.tuples(st.integers(0, num_images - 1), st.integers(1, 5)), max_size=40))
    classes_of = [{label for image, label in objects if image == one} for one in range(num_images)]
    expected = []
    for own in classes_of:
        shares = [sum(label in other for other in classes_of) / num_images for label in own]
        expected.append(max([1.0, *((threshold / share) ** 0.5 for share in shares)]))
    images, labels = np.array(objects, np.int64).reshape(-1, 2).T
    found = find_repeat_factors(images, labels.astype(np.int32), num_images, threshold)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_balanced_classes_count_alike_and_objects_as_before() -> None:
    labels = np.repeat(np.array([1, 2, 4], np.int32), [6, 3, 1])
    weights = balance_classes(labels, 5)
    np.testing.assert_allclose(weights, [1, 10 / 18, 10 / 9, 1, 10 / 3, 1], rtol=1e-6)
    assert weights[labels].mean() == pytest.approx(1)
    np.testing.assert_array_equal(balance_classes(labels[:0], 2), [1, 1, 1])


@pytest.mark.parametrize(
    ("batch_size", "announcements"),
    [
        (100, ((5, (5, 6, 7, 8)), (6, (9,)), (7, (10,)), (2, (2, 3, 4, 5)))),
        (128, ((3, (3, 4, 5)), (4, (6,)))),
        (READ_AHEAD, ((0, (0, 1)), (1, (2,)), (1, (1, 2)))),
    ],
)
def test_a_source_is_told_of_the_images_of_the_next_steps(
    batch_size: int, announcements: tuple[tuple[int, tuple[int, ...]], ...]
) -> None:
    told: list[int] = []
    options = InputOptions(batch_size)
    order = SampleOrder(1000, options, expect=lambda indices: told.extend(indices.tolist()))
    expected = SampleOrder(1000, options)

    def list_images(*steps: int) -> list[int]:
        return [index for step in steps for index in expected.at_step(step)[0].tolist()]

    for step, announced in announcements:
        told.clear()
        assert np.array_equal(order.at_step(step)[0], expected.at_step(step)[0])
        assert told == list_images(*announced)


def test_a_source_is_told_of_each_image_of_an_evaluation_once() -> None:
    told: list[int] = []
    positions = np.roll(np.arange(0, 2 * READ_AHEAD + 20, 2), 3)
    read = reading_ahead(lambda index: -index, lambda indices: told.extend(indices.tolist()), positions)
    for number, index in enumerate(positions.tolist()):
        assert read(index) == -index
        assert told == positions[: number + READ_AHEAD + 1].tolist()
    assert reading_ahead(abs, None, positions) is abs
