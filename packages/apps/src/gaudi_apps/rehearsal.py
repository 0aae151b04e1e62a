"""A training up to its first step, to see whether it would begin."""

from __future__ import annotations

import numpy as np

from gaudi_apps.loop import require_finite
from gaudi_apps.preparing import prepare_training
from gaudi_apps.session import Session, warn


def rehearse_training(session: Session) -> None:
    """Do what training does up to its first step, and this step, on all ranks together; nothing is written or removed.

    Raises:
        NonFiniteError: loss, gradient or rate of the step is not finite.
        Exception: what training would raise.
    """
    start = prepare_training(session)
    task, done, rate = start.beginning.task, start.beginning.progress.step, start.plan.learning_rate
    for text in start.plan.warnings:
        warn(text)
    if done >= start.plan.total_steps:
        print(f"dry run: nothing to train: the checkpoint has {done} of {start.plan.total_steps} steps")
        return
    batch = next(start.data.batches(done))
    scalars = task.train_step(batch, rate(done))
    require_finite(done + 1, rate(done), scalars, np.asarray(batch["image_ids"]))
    workers = f" on {session.communicator.size} processes" * (session.communicator.size > 1)
    print(f"dry run{workers}: step {done + 1}/{start.plan.total_steps} of {session.model_dir} would be made")
    print(f"{start.data.num_images} images an epoch, {start.plan.global_batch} a step, loss {scalars['loss']:.4g}")
