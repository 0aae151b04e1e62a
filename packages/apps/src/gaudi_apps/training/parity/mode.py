"""Record the first steps of a training, or compare them with a recording of another side, in mode parity."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gaudi_apps.cli.flag_rules import list_per_side, list_settings
from gaudi_apps.cli.flags import RECORDED, ParityFlags, split_side_flag
from gaudi_apps.runtime.errors import OtherSideError, ParityError
from gaudi_apps.runtime.session import Session, list_start_metadata
from gaudi_apps.training.checkpoint import ModelConfig, require_classes
from gaudi_apps.training.parity.compare import (
    Difference,
    choose_tolerances,
    compare_step,
    find_first,
    make_document,
    print_document,
    print_table,
    require_comparable,
)
from gaudi_apps.training.parity.record import (
    Recording,
    ReferenceStep,
    StepTensor,
    read_recording,
    require_new,
    write_recording,
)
from gaudi_apps.training.plan import Plan, version_setting
from gaudi_apps.training.trainer import TrainableTask, TrainingData

# Values of a start that sides may differ in.
_SIDE_METADATA = ("device", "precision", "python", "versions", "code")


def run_parity(session: Session, flags: ParityFlags, other: Path | None, *, as_json: bool) -> None:
    """Compare this side with a recording, or record this side.

    Args:
        session: of this side; nothing is written into its folder of a run.
        flags: checked.
        other: folder of a recording; None: record this side.
        as_json: print one JSON object on standard output.

    Raises:
        ParityError: the sides differ.
        ConfigurationError: the recording is of other data, flags or tensors.
        DataError: the recording is damaged.
    """
    if flags.parity_output is not None:
        require_new(Path(flags.parity_output))
    recording = None if other is None else read_recording(other)
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        this = _ThisSide(session, flags.parity_steps)
        if recording is None:
            folder = Path(flags.parity_output or "")
            write_recording(folder, this.settings, this.side, this.compute(None))
            print(f"{folder}: recorded; compare by --parity_against recorded={folder}")
            return
        require_comparable(this.settings, recording)
        differences = _compare(this, recording, flags)
    if as_json:
        print_document(make_document(differences, this.side, recording.side))
    else:
        print_table(differences)
    first = find_first(differences)
    if first is not None:
        one = differences[first]
        raise ParityError(
            f"parity: {one.tensor.describe()} is the first tensor that differs, by {one.largest:.3g}; the tolerance is "
            f"{one.bound:.3g}",
            field=one.tensor.key,
        )


class _ThisSide:
    """Compute the side of this process."""

    def __init__(self, session: Session, steps: int) -> None:
        self._framework = session.app.framework
        self._data = session.app.open_training_data()
        session.choose_version()
        self._plan = session.app.make_plan(self._data.num_images)
        self._steps = steps
        self._task, model_config, weights = _begin(session, self._data)
        start = list_start_metadata(session.app, self._data.fingerprint)
        self.side = {"weights": weights, **{name: start[name] for name in _SIDE_METADATA}}
        self.settings = _list_settings(session, self._data, self._plan, model_config, steps)

    def compute(self, recording: Recording | None) -> Iterator[list[StepTensor]]:
        """Yield all tensors of each step, which follows the recording if there is one."""
        reference = None if recording is None else lambda step: _read_reference(recording, step)
        batches = self._data.batches(0)
        return self._framework.replay_steps(self._task, batches, self._plan.learning_rate, self._steps, reference)


def _compare(this: _ThisSide, recording: Recording, flags: ParityFlags) -> list[Difference]:
    precisions = [str(side.get("precision")) for side in (this.side, recording.side)]
    tolerances = choose_tolerances(precisions, flags.parity_rtol, flags.parity_atol)
    differences: list[Difference] = []
    for step, tensors in enumerate(this.compute(recording), 1):
        differences += compare_step(tensors, recording, step, tolerances)
    return differences


def _begin(session: Session, data: TrainingData) -> tuple[TrainableTask, ModelConfig, str]:
    """Build the network that a training would begin with, and find the source of its weights."""
    run = session.settings
    if run.checkpoint != "newest" or session.checkpoints.steps():
        restored = session.restore_selected()
        require_classes(restored.model_config, data.model_config, f"checkpoint of step {restored.step}")
        return restored.task, restored.model_config, f"checkpoint of step {restored.step}"
    if run.weights is None:
        model_config = session.app.describe_model(data, None)
        return session.build_task(model_config, averages=False), model_config, f"seed {run.device.seed}"
    from gaudi_models.weights import read_weights

    weights = read_weights(run.weights)
    model_config = session.app.describe_model(data, weights)
    task = session.build_task(model_config, averages=False)
    print(task.load_weights(weights).describe())
    return task, model_config, "file of weights"


def _list_settings(
    session: Session, data: TrainingData, plan: Plan, model_config: ModelConfig, steps: int
) -> dict[str, Any]:
    """List the JSON values that both sides must have in common."""
    app = session.app
    flags = list_settings(app.resolved_config, plan.global_batch, rate_needs_length=app.rate_needs_length)
    for name in list_per_side(type(app.config)):
        flags.pop(name, None)
    version = version_setting(app.recipe_version)
    return {"data": data.fingerprint, "parity_steps": steps, **model_config, **flags, **version}


def _read_reference(recording: Recording, step: int) -> ReferenceStep:
    def read(part: str) -> dict[str, Any]:
        return {one.name: recording.read(one) for one in recording.list_step(step) if one.part == part}

    return ReferenceStep(read("batch"), read("output"), read("update"))


@contextlib.contextmanager
def recorded_side(flags: ParityFlags, command: Sequence[str]) -> Iterator[Path | None]:
    """Give the folder of a recording of the other side within a context; None if this side is to be recorded.

    Args:
        flags: checked.
        command: of this side.

    Raises:
        OtherSideError: the other side failed.
    """
    given = dict(split_side_flag(entry) for entry in flags.parity_against)
    if not given:
        yield None
    elif RECORDED in given:
        yield Path(given[RECORDED])
    else:
        with tempfile.TemporaryDirectory(prefix="parity-") as parent:
            folder = Path(parent) / "other"
            _record([*command, *other_arguments(flags, folder)], " ".join(flags.parity_against))
            yield folder


def other_arguments(flags: ParityFlags, folder: Path) -> tuple[str, ...]:
    """Return the arguments that make the command of this side record the other side in a folder."""
    arguments = []
    for name, value in map(split_side_flag, flags.parity_against):
        switches = {"true": f"--{name}", "false": f"--no_{name}"}
        if name != RECORDED:
            arguments.append(switches.get(value, f"--{name}={value}"))
    return (*arguments, "--parity_against", f"--parity_output={folder}")


def _record(command: Sequence[str], text: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        last = next((line for line in reversed(said) if "error: " in line), said[-1] if said else "no output")
        status = done.returncode if done.returncode > 0 else 70
        raise OtherSideError(f"the other side ({text}): {last.partition('error: ')[2] or last}", status)
