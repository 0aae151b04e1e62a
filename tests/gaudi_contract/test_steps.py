"""The training steps of the programs, traced for HPU: static shapes, and only operations known to run there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from gaudi_apps.classification.flags import LearningConfig
from gaudi_apps.classification.task import ClassificationTask
from gaudi_apps.detection.detector import SSDTask
from gaudi_apps.training.keras_task import KerasTask
from gaudi_distributed import SingleProcess
from gaudi_models.classifiers import build_classifier
from gaudi_ops import SSD300
from gaudi_ops.tf.graphs import Operation, find_dynamic, list_operations
from gaudi_ops.tf.hpu import find_unsupported, load_hpu_operations

BATCH = 2
POLICY = "mixed_bfloat16"
Batch = dict[str, tf.TensorSpec]


@pytest.fixture(autouse=True)
def _hpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace here what is traced where TensorFlow has an HPU."""
    monkeypatch.setattr("gaudi_ops.tf.hpu.has_hpu", lambda: True)


def make_config(optimizer: Any, **others: Any) -> LearningConfig:
    known: dict[str, Any] = {
        "optimizer": optimizer, "momentum": 0.9, "weight_decay": 1e-4, "lars_epsilon": 0.0, "single_l2": False,
        "label_smoothing": 0.1, "dropout": 0.0, "mixup_alpha": 0.0, "ema_decay": 0.0, "pruning": None,
        "momentum_form": "keras", "decay_form": "l2", **others,
    }  # fmt: skip
    return LearningConfig(**{name: known[name] for name in LearningConfig.__dataclass_fields__})


def make_ssd() -> tuple[KerasTask, Batch]:
    boxes = SSD300.num_boxes
    task = SSDTask(81, keras_policy=POLICY, weight_decay=5e-4, communicator=SingleProcess())
    return task, {
        "images": tf.TensorSpec([BATCH, 300, 300, 3], tf.bfloat16),
        "classes": tf.TensorSpec([BATCH, boxes], tf.int32),
        "offsets": tf.TensorSpec([BATCH, boxes, 4], tf.float32),
        "num_matched": tf.TensorSpec([BATCH], tf.int32),
        "image_ids": tf.TensorSpec([BATCH], tf.int64),
    }


def make_classifier(name: str, config: LearningConfig) -> tuple[KerasTask, Batch]:
    model = build_classifier(name, 1001, dtype=POLICY)
    task = ClassificationTask(
        model, config, seed=0, head_only=False, communicator=SingleProcess(), averages=bool(config.ema_decay)
    )
    return task, {
        "images": tf.TensorSpec([BATCH, 224, 224, 3], tf.bfloat16),
        "labels": tf.TensorSpec([BATCH], tf.int32),
        "image_ids": tf.TensorSpec([BATCH], tf.int64),
    }


def trace(task: KerasTask, batch: Batch) -> list[Operation]:
    step = tf.function(task._train_step, autograph=False)
    concrete = step.get_concrete_function(batch, tf.TensorSpec([], tf.float32))
    return list_operations(concrete, [layer.name for layer in task.model.layers])


STEPS: dict[str, Callable[[], tuple[KerasTask, Batch]]] = {
    "ssd": make_ssd,
    "resnet50": lambda: make_classifier("resnet50", make_config("SGD")),
    "resnet50 with LARS, one L2 and averages": lambda: make_classifier(
        "resnet50", make_config("LARS", single_l2=True, ema_decay=0.999)
    ),
    "resnext101": lambda: make_classifier("resnext101", make_config("SGD")),
}


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Operation]]:
    """Trace the steps; each takes seconds."""
    return {}


@pytest.fixture
def operations(steps: dict[str, list[Operation]], request: pytest.FixtureRequest) -> list[Operation]:
    if request.param not in steps:
        steps[request.param] = trace(*STEPS[request.param]())
    return steps[request.param]


@pytest.mark.parametrize("operations", STEPS, indirect=True)
def test_a_step_has_static_shapes_and_known_operations_only(
    operations: list[Operation], registry: dict[str, Any]
) -> None:
    assert len(operations) > 1000
    assert find_dynamic(operations) == []
    assert find_unsupported(operations) == []
    assert find_kernel_faults(operations, registry) == []


def find_kernel_faults(operations: list[Operation], registry: dict[str, Any]) -> list[str]:
    """Lines for operations whose kind the wheel registers for HPU, but not with their types."""
    faults = []
    for one in operations:
        kernels = registry["kernels"].get(one.kind)
        if kernels and not any(
            all(set(one.types.get(name, ())) <= set(types) for name, types in kernel.items()) for kernel in kernels
        ):
            faults.append(f"{one}: no kernel for HPU takes {dict(one.types)}")
    return faults


def test_what_the_list_says_of_the_registry_is_so(registry: dict[str, Any]) -> None:
    known = load_hpu_operations()
    assert set(known["operations"].values()) == set(known["sources"])
    said = {kind for kind, source in known["operations"].items() if source == "registry"}
    assert said - registry["kernels"].keys() == set()


def plant(task: KerasTask, act: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """Let the loss of a step have something else in it; `act` gets batch and scalars."""
    compute = task.compute_loss

    def spoiled(batch: Any) -> dict[str, Any]:
        scalars = compute(batch)
        return {**scalars, "loss": scalars["loss"] + act(batch, scalars)}

    task.compute_loss = spoiled  # type: ignore[method-assign]


@pytest.fixture
def small() -> tuple[KerasTask, Batch]:
    return make_classifier("resnet18", make_config("SGD"))


def test_a_planted_dynamic_shape_is_named(small: tuple[KerasTask, Batch]) -> None:
    def act(batch: dict[str, Any], scalars: dict[str, Any]) -> Any:
        chosen = tf.boolean_mask(batch["labels"], batch["labels"] > 0)
        return tf.cast(tf.reduce_sum(chosen), tf.float32)

    plant(small[0], act)
    faults = find_dynamic(trace(*small))
    assert any("test_steps.py" in fault or "boolean_mask" in fault for fault in faults), faults
    assert all("has shape" in fault for fault in faults)


def test_a_planted_operation_is_named_with_what_made_it(small: tuple[KerasTask, Batch]) -> None:
    plant(small[0], lambda batch, scalars: tf.math.lgamma(scalars["loss"]))
    faults = find_unsupported(trace(*small))
    assert len(faults) >= 1
    assert faults[0].startswith("Lgamma 'Lgamma' of")
    assert faults[0].endswith("HPU")


def test_a_planted_layer_is_named(small: tuple[KerasTask, Batch]) -> None:
    from gaudi_ops.tf.keras_api import keras

    task, batch = small
    images = keras.Input([224, 224, 3])
    gelu = keras.layers.Activation("softsign", name="strange_layer")(images)
    task.model = keras.Model(images, task.model(gelu))
    faults = find_unsupported(trace(task, batch))
    assert any(fault.startswith("Softsign") and "of layer strange_layer" in fault for fault in faults)


def test_a_planted_type_is_named(small: tuple[KerasTask, Batch], registry: dict[str, Any]) -> None:
    plant(small[0], lambda batch, scalars: tf.cast(tf.reduce_sum(batch["image_ids"]), tf.float32))
    operations = trace(*small)
    assert any(fault.startswith("Sum 'Sum") and "is of int64" in fault for fault in find_unsupported(operations))
    assert any("no kernel for HPU takes" in fault for fault in find_kernel_faults(operations, registry))


def test_a_planted_batch_without_a_size_is_named(small: tuple[KerasTask, Batch]) -> None:
    task, batch = small
    loose = {name: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) for name, spec in batch.items()}
    faults = find_dynamic(trace(task, loose))
    assert any("tensor batch:0" in fault or "batch_1:0 has shape [?" in fault for fault in faults), faults[:3]
    assert any("of layer conv1" in fault for fault in faults)
