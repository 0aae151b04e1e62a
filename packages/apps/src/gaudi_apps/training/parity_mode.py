"""Record the first steps of a training, or compare them with a recording of another side, in mode parity.

Tensors are compared one by one, within the tolerances of the precisions of both sides.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from gaudi_apps.cli.flag_rules import find_aliases, list_per_side, list_settings
from gaudi_apps.cli.flags import RECORDED, ParityFlags, split_side_flag
from gaudi_apps.runtime.errors import OtherSideError, ParityError
from gaudi_apps.runtime.session import Session, list_start_metadata
from gaudi_apps.training.checkpoint import ModelConfig, read_initial_weights, require_classes
from gaudi_apps.training.plan import Plan, version_setting
from gaudi_apps.training.recording import (
    Array,
    Part,
    Recording,
    ReferenceStep,
    StepTensor,
    TensorMetadata,
    read_recording,
    require_new,
    write_recording,
)
from gaudi_apps.training.trainer import TrainableTask, TrainingData
from gaudi_datasets.program import make_console
from gaudi_distributed.errors import ConfigurationError
from gaudi_ops.program import say

_BLOCK = 1 << 20

# Of each part, a and r: two tensors may differ by a + r x their largest absolute value.
Tolerances: TypeAlias = Mapping[Part, tuple[float, float]]


@dataclass(frozen=True)
class Difference:
    """Hold the difference of a tensor between two sides.

    Attributes:
        tensor: that was compared.
        largest: absolute difference of two values; not finite where a value is not.
        norm: of the differences, divided by the larger norm of the two tensors.
        bound: tolerance of `largest`.
    """

    tensor: TensorMetadata
    largest: float
    norm: float
    bound: float

    @property
    def is_beyond(self) -> bool:
        """Tell whether the difference is above the tolerance."""
        return not (math.isfinite(self.largest) and self.largest <= self.bound)


def require_comparable(
    settings: Mapping[str, Any], recording: Recording, aliases: Mapping[str, str] | None = None
) -> None:
    """Check that a recording is of the same data and flags as this side.

    Args:
        settings: of this side.
        recording: of the other side, maybe by an earlier release.
        aliases: names that settings had in earlier releases, each with the name of today.

    Raises:
        ConfigurationError: a setting differs; the error names it, with both values.
    """
    here = json.loads(json.dumps(settings))  # where a tuple is a list
    there = {(aliases or {}).get(name, name): value for name, value in recording.settings.items()}
    for name in [*here, *there]:
        own, other = here.get(name), there.get(name)
        if own != other:
            raise ConfigurationError(
                f"{recording.folder}: {name} is {_shorten(other)} there and {_shorten(own)} here",
                path=recording.folder,
                field=name,
                remedy=f"compare with a recording of the same {name}",
            )


def compare_step(
    own: Sequence[StepTensor], recording: Recording, step: int, tolerances: Tolerances
) -> list[Difference]:
    """Compare the tensors of a step with the recorded ones.

    Raises:
        ConfigurationError: a tensor is on one side only, or has another shape on the other.
        DataError: the recording is damaged.
    """
    recorded = {tensor.key: tensor for tensor in recording.list_step(step)}
    for one in own:
        there = recorded.pop(one.metadata.key, None)
        if there is None or (there.shape, there.layer) != (one.metadata.shape, one.metadata.layer):
            shape = "and is missing there" if there is None else f"and {list(there.shape)}, layer {there.layer!r} there"
            raise ConfigurationError(
                f"{recording.folder}: {one.metadata.describe()}: has shape {list(one.metadata.shape)} here, {shape}",
                path=recording.folder,
                field=one.metadata.key,
                remedy="record it again",
            )
    if recorded:
        unknown = next(iter(recorded.values()))
        raise ConfigurationError(
            f"{recording.folder}: {unknown.describe()}: is missing here",
            path=recording.folder,
            field=unknown.key,
            remedy="record it again",
        )
    return [_compare(one.metadata, one.values, recording.read(one.metadata), tolerances) for one in own]


def find_first(differences: Sequence[Difference]) -> int | None:
    """Find the index of the first difference above its tolerance; None if all are within."""
    return next((place for place, one in enumerate(differences) if one.is_beyond), None)


def _compare(tensor: TensorMetadata, own: Array, other: Array, tolerances: Tolerances) -> Difference:
    apart = largest = own_squares = other_squares = squares = 0.0
    own, other = own.reshape(-1), other.reshape(-1)
    for start in range(0, own.size, _BLOCK):
        a, b = (side[start : start + _BLOCK].astype(np.float64) for side in (own, other))
        with np.errstate(invalid="ignore", over="ignore"):
            # Not max(), which may lose a NaN.
            apart = float(np.maximum(apart, np.abs(a - b).max()))
            largest = float(np.maximum(largest, np.maximum(np.abs(a), np.abs(b)).max()))
            own_squares, other_squares = own_squares + float(a @ a), other_squares + float(b @ b)
            squares += float((a - b) @ (a - b))
    norm = math.sqrt(max(own_squares, other_squares))
    absolute, relative = tolerances[tensor.part]
    bound = absolute + relative * largest
    return Difference(tensor, apart, math.sqrt(squares) / norm if norm else 0.0, bound)


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Weights are float32 in every precision, and both sides begin with the same ones.
START = 1e-6
START_ABSOLUTE = 1e-8
ABSOLUTE = 1e-6


# Of outputs of a layer or a loss on equal inputs, and of gradients and updates, which depend on all layers. Measured on
# SSD-ResNet34 and ResNet-50, bfloat16 against float32: .007 and .15.
_FP32 = (1e-4, 1e-3)
_BF16 = (0.05, 0.3)
_BACKWARD: tuple[Part, ...] = ("gradient", "update")


def choose_tolerances(precisions: Collection[str], rtol: float | None = None, atol: float | None = None) -> Tolerances:
    """Choose the tolerances of each part of a step, absolute and relative, by the precisions of both sides.

    Args:
        precisions: of both sides, ``"fp32"``, ``"bf16"`` and so on; more may follow after a space.
        rtol: replaces the relative tolerance of all tensors.
        atol: replaces the absolute tolerance of all tensors.
    """
    exact = {precision.partition(" ")[0] for precision in precisions} == {"fp32"}
    forward, backward = _FP32 if exact else _BF16
    parts: tuple[Part, ...] = get_args(Part)
    defaults = {part: (ABSOLUTE, backward if part in _BACKWARD else forward) for part in parts}
    defaults["weight"] = (START_ABSOLUTE, START)
    return {
        part: (absolute if atol is None else atol, relative if rtol is None else rtol)
        for part, (absolute, relative) in defaults.items()
    }


_BEFORE, _AFTER = 3, 4
_WIDTH = 140


def print_table(differences: Sequence[Difference], console: Console | None = None) -> None:
    """Print the first tensor that differs and its neighbours, or those closest to their tolerance if none does."""
    first = find_first(differences)
    # In a file or a pipe there is no width to keep to.
    console = console or make_console(width=None if sys.stdout.isatty() else _WIDTH)
    if first is None:
        title = f"{len(differences)} tensors agree within the tolerance; the closest to it:"
        shown = sorted(range(len(differences)), key=lambda place: _share(differences[place]), reverse=True)
        shown = sorted(shown[: _BEFORE + 1 + _AFTER])
    else:
        beyond = sum(one.is_beyond for one in differences)
        title = f"{beyond} of {len(differences)} tensors differ; the first and its neighbours:"
        shown = list(range(max(0, first - _BEFORE), min(len(differences), first + _AFTER + 1)))
    table = Table(title=title, title_justify="left")
    for heading in ("", "step", "part", "tensor", "layer"):
        table.add_column(heading, overflow="fold")
    for heading in ("max difference", "relative norm", "tolerance"):
        table.add_column(heading, justify="right")
    for place in shown:
        one, tensor = differences[place], differences[place].tensor
        mark = "first" if place == first else "differs" if one.is_beyond else ""
        cells = (f"{tensor.step}", tensor.part, tensor.name, tensor.layer)
        figures = (f"{figure:.3g}" for figure in (one.largest, one.norm, one.bound))
        table.add_row(mark, *cells, *figures)
    console.print(table)


def make_document(
    differences: Sequence[Difference], side: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all differences as JSON values; a number that is not finite is null."""
    first = find_first(differences)
    return {
        "equal": first is None,
        "first": None if first is None else _describe(differences[first]),
        "this_side": dict(side),
        "other_side": dict(other),
        "tensors": [_describe(one) for one in differences],
    }


def print_document(document: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    say(*json.dumps(document, indent=2).splitlines())


def _describe(one: Difference) -> dict[str, Any]:
    tensor = one.tensor
    figures = {"max_difference": one.largest, "relative_norm": one.norm, "tolerance": one.bound}
    return {
        "step": tensor.step,
        "part": tensor.part,
        "name": tensor.name,
        "layer": tensor.layer,
        "shape": list(tensor.shape),
        **{name: figure if math.isfinite(figure) else None for name, figure in figures.items()},
        "differs": one.is_beyond,
    }


def _share(one: Difference) -> float:
    """Return the difference as a share of the tolerance."""
    return one.largest / one.bound if one.bound else float(one.largest > 0)


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
            say(f"{folder}: recorded; compare by --parity_against recorded={folder}")
            return
        require_comparable(this.settings, recording, find_aliases(type(session.app.config)))
        precisions = [str(side.get("precision")) for side in (this.side, recording.side)]
        tolerances = choose_tolerances(precisions, flags.parity_rtol, flags.parity_atol)
        differences: list[Difference] = []
        for step, tensors in enumerate(this.compute(recording), 1):
            differences += compare_step(tensors, recording, step, tolerances)
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


def _begin(session: Session, data: TrainingData) -> tuple[TrainableTask, ModelConfig, str]:
    """Build the network that a training would begin with, and find the source of its weights."""
    run = session.settings
    if run.checkpoint not in (None, "newest") or session.checkpoints.steps():
        restored = session.restore_selected()
        require_classes(restored.model_config, data.model_config, f"checkpoint of step {restored.step}")
        return restored.task, restored.model_config, f"checkpoint of step {restored.step}"
    if run.weights is None:
        model_config = session.app.describe_model(data, None)
        return session.build_task(model_config, averages=False), model_config, f"seed {run.device.seed}"
    weights = read_initial_weights(run.weights)
    model_config = session.app.describe_model(data, weights)
    task = session.build_task(model_config, averages=False)
    say(*task.load_weights(weights).describe().splitlines())
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
