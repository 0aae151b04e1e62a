"""What a training will do, step by step, from its recipe and the number of training images."""

from __future__ import annotations

from collections.abc import Iterator

from gaudi_apps.classification.recipe import RateRecipe, Recipe
from gaudi_apps.plan import DROP_FACTORS, Plan, count_steps, describe_large_batch
from gaudi_ops import schedules


def make_plan(recipe: Recipe, num_images: int) -> Plan:
    """Plan the training of `num_images` images an epoch.

    An epoch is as many whole steps as its images fill. Where epochs are not whole, their steps are cut off once, from
    all epochs together.
    """
    rate, batch = recipe.rate, recipe.data.global_batch
    steps_per_epoch = max(1, num_images // batch)
    exact = steps_per_epoch if rate.whole_epochs else num_images / batch
    length = rate.steps or max(1, rate.epochs * exact)
    total_steps = int(length)
    warmup_steps = int(rate.warmup_epochs * exact)
    drop_steps = tuple(int(epoch * exact) for epoch in rate.drop_epochs) if rate.kind == "piecewise" else ()
    checkpoint_steps = total_steps if recipe.checkpoint_steps is None else recipe.checkpoint_steps or steps_per_epoch
    return Plan(
        images=num_images,
        global_batch=batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        epochs=total_steps / steps_per_epoch,
        peak_learning_rate=rate.peak,
        lr_schedule=rate.kind,
        warmup_steps=warmup_steps,
        drop_steps=drop_steps,
        checkpoint_steps=checkpoint_steps,
        evaluation_steps=count_steps(recipe.eval_epochs, steps_per_epoch) if recipe.run.scores else 0,
        learning_rate=make_schedule(rate, length if rate.fractional_decay else total_steps, warmup_steps, drop_steps),
        warnings=tuple(_find_misfits(recipe, num_images, total_steps, warmup_steps, drop_steps)),
        workers=recipe.run.distribution.place.size,
        drop_delay=rate.drop_delay,
    )


def make_schedule(
    rate: RateRecipe, length: float, warmup_steps: int, drop_steps: tuple[int, ...]
) -> schedules.Schedule:
    """Return the learning rate of every step.

    Args:
        rate: the curve.
        length: steps in all; with a fraction where the last epoch ends within a step.
        warmup_steps: of them.
        drop_steps: where a piecewise rate drops.
    """
    if rate.kind == "cyclical":
        after = schedules.triangular(rate.end, rate.peak, rate.half_cycle, decay=rate.cycle_decay)
    elif rate.kind == "polynomial":
        after = schedules.polynomial(rate.peak, decay_steps(length, warmup_steps), rate.end, first_step=warmup_steps)
    elif rate.kind == "cosine":
        after = schedules.cosine(rate.peak, int(length))
    elif rate.kind == "piecewise":
        lower_from = [step + rate.drop_delay for step in drop_steps]
        after = schedules.piecewise_constant(rate.peak, lower_from, DROP_FACTORS[: len(drop_steps)])
    else:
        after = schedules.constant(rate.peak)
    return schedules.linear_warmup(after, warmup_steps, rate.peak)


def decay_steps(length: float, warmup_steps: int) -> float:
    """Count the steps from the highest rate of a polynomial to its end."""
    return max(1, length - warmup_steps + 1)


def _find_misfits(
    recipe: Recipe, num_images: int, total_steps: int, warmup_steps: int, drop_steps: tuple[int, ...]
) -> Iterator[str]:
    """What is allowed but rarely meant, a line each."""
    batch = recipe.data.global_batch
    if batch > num_images:
        yield describe_large_batch(batch, num_images)
    if warmup_steps >= total_steps:
        yield (
            f"the warm-up of {warmup_steps} steps is not over when the run ends at step {total_steps}: "
            "lower --warmup_epochs"
        )
    # A drop at the very end, as that of epoch 90, is part of the originals' recipes.
    late = [str(step) for step in drop_steps if step > total_steps]
    if late:
        yield f"the drop at step {', '.join(late)} is not reached: the run ends at step {total_steps}"
    pruning = recipe.learning.pruning
    if pruning is not None and pruning.end_step > total_steps:
        yield (
            f"pruning ends at step {pruning.end_step}, the run at step {total_steps}: it does not come to "
            f"{pruning.final_sparsity:g}; lower --pruning_end_step"
        )
