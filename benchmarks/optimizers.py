"""An update of ResNet-50's weights: LARS against SGD with momentum, in the programs' form and in that of Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.measurement import Figure, compare, interleave, main

MOST = 1.15
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
REPEATS = 30
CALLS = 5  # that are timed together


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure both forms."""
    from gaudi_ops.tf import LARS, LarsSGD, MomentumSGD
    from gaudi_ops.tf.keras_api import keras

    pairs = {
        "the programs": (
            use_core(lambda variables: MomentumSGD(variables, MOMENTUM, WEIGHT_DECAY)),
            use_core(lambda variables: LarsSGD(variables, MOMENTUM, WEIGHT_DECAY)),
        ),
        "Keras": (
            use_keras(keras.optimizers.SGD(0.1, MOMENTUM, weight_decay=WEIGHT_DECAY)),
            use_keras(LARS(0.1, MOMENTUM, WEIGHT_DECAY)),
        ),
    }
    for form, (sgd, lars) in pairs.items():
        timings = interleave({"SGD": sgd, "LARS": lars}, REPEATS, budget_seconds=budget_seconds / len(pairs))
        milliseconds = {name: round(1000 * timing.median / CALLS, 1) for name, timing in timings.items()}
        note = f"{milliseconds['LARS']} and {milliseconds['SGD']} ms"
        yield compare(f"an update in the form of {form}: LARS over SGD", timings, "LARS", "SGD", most=MOST, note=note)


def make_weights() -> tuple[list[Any], list[Any]]:
    """Trainable variables of a ResNet-50, and as many gradients."""
    import tensorflow as tf

    from gaudi_ops.tf.keras_api import keras

    variables = keras.applications.ResNet50(weights=None).trainable_variables
    return variables, [1e-3 * tf.random.stateless_normal(variable.shape, [0, 0]) for variable in variables]


def use_core(build: Callable[[Any], Any]) -> Callable[[], None]:
    """Make a function that updates some times, with an optimizer that is given the rate."""
    import tensorflow as tf

    variables, gradients = make_weights()
    optimizer, rate = build(variables), tf.constant(1e-3)
    return repeat(tf.function(lambda gradients: optimizer.apply(gradients, rate)), gradients, variables)


def use_keras(optimizer: Any) -> Callable[[], None]:
    """Make a function that updates some times, with a Keras optimizer."""
    import tensorflow as tf

    variables, gradients = make_weights()
    optimizer.build(variables)
    apply = tf.function(lambda gradients: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
    return repeat(apply, gradients, variables)


def repeat(apply: Callable[[Any], Any], gradients: list[Any], variables: list[Any]) -> Callable[[], None]:
    """Make a function that calls another one some times and waits for the last variable."""

    def call() -> None:
        for _ in range(CALLS):
            apply(gradients)
            variables[-1].numpy()

    return call


if __name__ == "__main__":
    main(run)
