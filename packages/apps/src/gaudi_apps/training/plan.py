"""The plan of a run, step by step, in plain Python; its table, and the version of the recipes that it follows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gaudi_apps.cli.launch import LaunchReport
from gaudi_apps.errors import RunChangedError
from gaudi_ops.schedules import Schedule

if TYPE_CHECKING:
    from gaudi_apps.training.run_dir import RunFolder


DROP_FACTORS = (0.1, 0.01, 0.001, 0.0001)


@dataclass(frozen=True)
class RateChange:
    """From `step` on the learning rate is `learning_rate`, for the reason given."""

    step: int
    learning_rate: float
    reason: str


@dataclass(frozen=True)
class Plan:
    """Numbers of a run; every step counts from 0 and is the first one that something holds for.

    `learning_rate` is the rate of a step. `drop_steps` are where a piecewise rate drops to `drop_factors` of its peak;
    the first step with the lower rate is `drop_delay` later, for TensorFlow's piecewise constant counts the boundary to
    what is before it. `evaluation_steps` lie between two evaluations during training, 0 where there are none
    besides those after `evaluated_steps`. `global_batch` is of all `workers`, the processes that train together.
    """

    images: int
    global_batch: int
    steps_per_epoch: int
    total_steps: int
    epochs: float
    peak_learning_rate: float
    lr_schedule: str
    warmup_steps: int
    drop_steps: tuple[int, ...]
    checkpoint_steps: int
    evaluation_steps: int
    learning_rate: Schedule = field(repr=False, compare=False)
    warnings: tuple[str, ...] = ()
    workers: int = 1
    drop_factors: tuple[float, ...] = DROP_FACTORS
    evaluated_steps: tuple[int, ...] = ()
    drop_delay: int = 0

    @property
    def own_batch(self) -> int:
        """Images a step of one process."""
        return self.global_batch // self.workers

    @property
    def rate_changes(self) -> tuple[RateChange, ...]:
        """The steps where the rate begins, peaks, drops and ends, in order; a drop may lie past the end."""
        marks = [(0, "start"), (self.total_steps - 1, "last step")]
        if self.warmup_steps:
            marks.append((self.warmup_steps, "warm-up ends"))
        if self.lr_schedule == "piecewise":
            marks += [
                (step + self.drop_delay, f"drop to {factor:g}")
                for step, factor in zip(self.drop_steps, self.drop_factors, strict=False)
            ]
        marks = [(step, f"{what}, not reached" if step >= self.total_steps else what) for step, what in marks]
        return tuple(RateChange(step, self.learning_rate(step), what) for step, what in sorted(marks))

    def as_json(self) -> dict[str, Any]:
        """Its numbers by name, and where the rate changes."""
        numbers = {name: value for name, value in asdict(self).items() if name != "learning_rate"}
        return {**numbers, "rate_changes": [asdict(change) for change in self.rate_changes]}

    def count_checkpoints(self, keep: int) -> int:
        """Checkpoints on disk at the end, of which so many are kept; the last step always writes one."""
        return min(keep, -(-self.total_steps // self.checkpoint_steps))


def count_steps(epochs: float, steps_per_epoch: int) -> int:
    """Steps of so many epochs: at least one for any part of an epoch, and 0 for 0."""
    return max(1, int(epochs * steps_per_epoch)) if epochs else 0


def describe_large_batch(batch: int, num_images: int) -> str:
    """The warning about a step of more images than there are."""
    return f"a batch of {batch} is larger than the {num_images} images: a step sees some of them twice"


def describe_long_warmup(warmup_steps: int, total_steps: int, remedy: str) -> str:
    """The warning about a warm-up that the run does not outlast."""
    return f"the warm-up of {warmup_steps} steps is not over when the run ends at step {total_steps}: {remedy}"


def describe_late_drops(steps: Sequence[int], total_steps: int, remedy: str) -> str:
    """The warning about drops of the rate that the run does not reach."""
    named = " and ".join(map(str, steps))
    return f"the drop at step {named} is not reached: the run ends at step {total_steps}; {remedy}"


CURRENT = 2
SETTING = "recipe_version"


def find_recipe_version(folder: RunFolder, *, clean: bool = False) -> int:
    """Find the version of the run in a folder.

    Args:
        folder: of a run, or without one.
        clean: whether the run there is removed before a new one begins.

    Returns:
        the current version where no run goes on.

    Raises:
        RunChangedError: the run was begun by a newer release of this package.
        DataError: the record of the run cannot be read.
    """
    settings = None if clean else folder.read_settings()
    if settings is None:
        return CURRENT
    version = settings.get(SETTING, 1)
    if version not in range(1, CURRENT + 1):
        raise RunChangedError(
            f"{folder.folder}: the run there has {SETTING} {version!r}, and this release knows up to {CURRENT}; "
            "update gaudi-apps, or give another --model_dir"
        )
    return int(version)


def find_version_in(model_dir: str) -> int:
    """Find the version of the run in a folder by its path, see `find_recipe_version`."""
    if not Path(model_dir).exists():
        return CURRENT
    # Imported here, for it imports NumPy, and a plan without a run needs none.
    from gaudi_apps.training.run_dir import RunFolder

    return find_recipe_version(RunFolder(Path(model_dir)))


def note_version(version: int) -> dict[str, int]:
    """List what a run notes of its version: nothing of version 1, as its release did."""
    return {SETTING: version} if version > 1 else {}


BYTES_PER_VALUE = {"bf16": 2, "fp32": 4}
MEMORY_COVERS = (
    "weights, momentum, gradients and what the forward pass keeps, of one process; not the library, not the input"
)


def print_json(document: Mapping[str, Any], launch: LaunchReport | None = None, console: Console | None = None) -> None:
    """Print one JSON object, with what would be started as `launch`."""
    launched = {"launch": None if launch is None else launch.as_json()}
    (console or make_console()).print(json.dumps({**document, **launched}, indent=2), markup=False)


def print_tables(
    model_dir: str | Path,
    facts: Iterable[tuple[str, str]],
    plan: Plan,
    launch: LaunchReport | None = None,
    console: Console | None = None,
) -> None:
    """Print the facts of a run row by row, its learning rate, the plan's warnings, and what would be started."""
    console = console or make_console()
    table = Table(title=f"Plan of {model_dir}", title_justify="left", show_header=False, box=None)
    for name, text in facts:
        table.add_row(name, text)
    console.print(table)
    console.print(_tabulate_rates(plan))
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if launch is not None:
        console.print(launch.describe(), end="", markup=False)


def make_console() -> Console:
    """Standard output, whose lines may be long."""
    return Console(highlight=False, soft_wrap=True)


def list_plan(plan: Plan, keep_checkpoints: int) -> Iterator[tuple[str, str]]:
    """What a table says of any plan, row by row."""
    shares = f", {plan.own_batch} on each of {plan.workers} processes" if plan.workers > 1 else ""
    yield "batch", f"{plan.global_batch}{shares}"
    yield "steps", f"{plan.total_steps} ({plan.epochs:.4g} epochs of {plan.steps_per_epoch})"
    yield "peak rate", f"{plan.peak_learning_rate:.4g}"
    yield "warm-up", f"{plan.warmup_steps} steps"
    if plan.lr_schedule == "piecewise":
        yield "drops", " and ".join(f"{step}" for step in plan.drop_steps)
    kept = plan.count_checkpoints(keep_checkpoints)
    yield "checkpoints", f"every {plan.checkpoint_steps} steps, {kept} kept"


def _tabulate_rates(plan: Plan) -> Table:
    table = Table(title="Learning rate", title_justify="left")
    for heading in ("step", "epoch", "rate"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for change in plan.rate_changes:
        epoch = change.step / plan.steps_per_epoch
        table.add_row(f"{change.step}", f"{epoch:.4g}", f"{change.learning_rate:.4g}", change.reason)
    return table


def part_of(kept: int, found: int | None) -> str:
    """How many of how many, or how many where all are kept."""
    if found is None or found == kept:
        return f"{kept}"
    return f"{kept} of {found}"


def format_bytes(count: float) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more: 3.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
