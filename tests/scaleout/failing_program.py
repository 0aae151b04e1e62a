"""resnet_train with a fault of one rank at a phase that it reports, and a network that costs little.

Arguments: the fault as JSON, "small" for a network that costs next to nothing, or "narrow" for the real one with fewer
channels, then those of the program. A fault has `rank`, `phase`,
`step` (null: any), a channel `told`, on which the rank says that it fails now, a `gate` at which others are late until
it has failed, and `act`: the name of a signal that it sends to itself, "nan" for a batch that is not finite, or ""
where somebody else acts.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from gaudi_apps import resnet_train
from gaudi_apps.cli.program import Program
from gaudi_apps.runtime.session import Session
from gaudi_apps.training import checkpoint as checkpoints
from gaudi_distributed.failure import RankClient

# In these phases ranks wait for each other in the middle of it: the others are late, and the fault comes meanwhile.
COLLECTIVE = ("broadcast", "step")
# What a rank has to get there. Should it not, it fails on the way, which ends as well.
FAULT_SECONDS = 0.4
_open_session = Session.__init__


def main(fault: dict[str, Any], network: str, arguments: list[str]) -> None:
    # What the program starts several ranks by.
    Program.module = property(lambda _: (__file__, json.dumps(fault), network))  # type: ignore[method-assign,assignment]
    if network == "small":
        Session.__init__ = open_session  # type: ignore[method-assign,assignment]
    else:
        from narrow_program import narrow  # type: ignore[import-not-found]

        narrow()
    if fault:
        report = RankClient.set_progress

        def report_and_fail(client: RankClient, step: int, phase: str, images: int = 0) -> None:
            report(client, step, phase, images)
            fail_at(fault, client, step, phase)

        RankClient.set_progress = report_and_fail  # type: ignore[method-assign,assignment]
    resnet_train.main(arguments)


def open_session(self: Session, *arguments: Any) -> None:
    """Open it, which imports TensorFlow; what needs TensorFlow can be imported from then on."""
    _open_session(self, *arguments)
    from gaudi_models import classifiers

    classifiers.build_classifier = build_small_classifier  # type: ignore[assignment]


def fail_at(fault: dict[str, Any], client: Any, step: int, phase: str) -> None:
    """Fail after a report, or be late so that another one fails while it waits."""
    if phase != fault["phase"] or fault["step"] not in (None, step) or fault.get("done"):
        return
    fault["done"] = True
    is_failing = client._rank_info.rank == fault["rank"]
    if fault["act"] == "nan":
        if is_failing:
            act(fault)
    elif phase in COLLECTIVE:
        if is_failing:
            threading.Timer(FAULT_SECONDS, act, [fault]).start()
        else:
            be_late(fault)
    elif is_failing and phase == "checkpoint" and fault["rank"] == 0 and fault["act"]:
        fail_between_files(fault)
    elif is_failing:
        act(fault)
        threading.Event().wait()  # for what somebody else does


def be_late(fault: dict[str, Any]) -> None:
    """Wait until the other rank has failed."""
    with Path(fault["gate"]).open() as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)


def fail_between_files(fault: dict[str, Any]) -> None:
    """Fail when half of the checkpoint is written."""
    write = vars(checkpoints)["write_file"]

    def write_late(*given: Any, **options: Any) -> None:
        act(fault)
        write(*given, **options)

    vars(checkpoints)["write_file"] = write_late  # of the manifest, after the tensors


def act(fault: dict[str, Any]) -> None:
    Path(fault["told"]).write_text("fails\n")
    if fault["act"] == "nan":
        spoil_batches()
    elif fault["act"]:
        os.kill(os.getpid(), signal.Signals[fault["act"]])


def spoil_batches() -> None:
    """From now on, no image of a batch is a number."""
    from gaudi_apps.training.keras_task import KerasTask

    train_step = KerasTask.train_step

    def spoil(self: Any, batch: Any, rate: float) -> Any:
        return train_step(self, {**batch, "images": batch["images"] * math.nan}, rate)

    KerasTask.train_step = spoil  # type: ignore[method-assign,assignment]


def build_small_classifier(name: str, num_classes: int, *, image_size: int, **options: Any) -> Any:
    """Build a model with the inputs, outputs and names of a classifier."""
    from gaudi_models.layers import make_batch_norm
    from gaudi_ops.tf.keras_api import keras

    layers, dtype = keras.layers, options.get("dtype", "float32")
    images = keras.Input([image_size, image_size, 3], name="images")
    x = layers.Rescaling(1 / 128, name="scale", dtype=dtype)(images)
    x = layers.Conv2D(8, 3, 4, use_bias=False, name="conv1", dtype=dtype)(x)
    x = make_batch_norm(options.get("reduce_statistics"), momentum=0.9, name="conv1_bn", dtype=dtype)(x)
    x = layers.ReLU(name="relu", dtype=dtype)(x)
    x = layers.GlobalAveragePooling2D(name="features", dtype="float32")(x)
    return keras.Model(images, layers.Dense(num_classes, name="logits", dtype="float32")(x), name=name)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:])
