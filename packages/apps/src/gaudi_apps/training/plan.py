"""Plan a run step by step, print the plan, predict its cost on many ranks, and find the version of its rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gaudi_apps.runtime.errors import RunChangedError
from gaudi_datasets.fetching.stores import find_copy
from gaudi_datasets.memory import format_bytes
from gaudi_datasets.program import count_things, make_console
from gaudi_ops import scaling
from gaudi_ops.schedules import Schedule

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gaudi_apps.cli.flags import ProgramConfig
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.recipe import Recipe
    from gaudi_apps.training.run_dir import RunFolder
    from gaudi_models.architectures import Tensors


_LOOKED_AT = 4000  # steps, to find the highest rate of a run
DROP_FACTORS = (0.1, 0.01, 0.001, 0.0001)


class RateChange(NamedTuple):
    """A step from which on the learning rate is another one, and the reason."""

    step: int
    learning_rate: float
    reason: str


@dataclass(frozen=True)
class Plan:
    """The numbers of a run. Steps count from 0.

    Attributes:
        images: of an epoch.
        global_batch: images a step of all processes.
        steps_per_epoch, total_steps, epochs: length of the run.
        peak_learning_rate: after the warm-up.
        lr_schedule: name of the schedule.
        warmup_steps: of linear rise.
        drop_steps: where a piecewise rate drops to `drop_factors` of its peak.
        checkpoint_steps: between two checkpoints.
        evaluation_steps: between two evaluations during training; 0: none but those after `evaluated_steps`.
        learning_rate: rate of each step.
        warnings: of settings that are allowed but rarely meant.
        workers: processes that train together.
        drop_factors: see `drop_steps`.
        evaluated_steps: steps to evaluate after.
        drop_delay: steps from a drop step to the first step with the lower rate; 1 as in TensorFlow, whose piecewise
            constant counts the boundary to the interval before it.
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
        """Return the images a step of one process."""
        return self.global_batch // self.workers

    @property
    def rate_changes(self) -> tuple[RateChange, ...]:
        """List the steps where the rate begins, peaks, drops and ends, in order; a drop may lie past the end."""
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

    @property
    def reached_learning_rate(self) -> float:
        """Return the highest rate of a step of the run, which a long warm-up or a cosine may keep below the peak."""
        step = max(1, self.total_steps // _LOOKED_AT)
        near = {
            mark + shift for mark in (self.warmup_steps, *self.drop_steps, self.total_steps) for shift in (-1, 0, 1)
        }
        steps = {0, *range(0, self.total_steps, step), *(one for one in near if 0 <= one < self.total_steps)}
        return max(map(self.learning_rate, steps))

    def refit(self, done: int, total_steps: int) -> Plan:
        """Return the plan with another last step, to which the rate runs its course from a step on, without a jump.

        Args:
            done: steps that keep their rates.
            total_steps: of the run; more than are done.
        """
        rate, share = self.learning_rate, (self.total_steps - done) / (total_steps - done)

        def move(step: int) -> int:
            return step if step <= done else done + round((step - done) / share)

        return replace(
            self,
            total_steps=total_steps,
            epochs=self.epochs * total_steps / self.total_steps,
            warmup_steps=move(self.warmup_steps),
            drop_steps=tuple(map(move, self.drop_steps)),
            checkpoint_steps=total_steps if self.checkpoint_steps == self.total_steps else self.checkpoint_steps,
            learning_rate=lambda step: rate(step if step <= done else done + (step - done) * share),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name, and the changes of the rate."""
        numbers = {name: value for name, value in asdict(self).items() if name != "learning_rate"}
        return {**numbers, "rate_changes": [change._asdict() for change in self.rate_changes]}

    def count_checkpoints(self, keep: int, minutes: float = 0.0) -> int:
        """Count the checkpoints on disk at the end, when `keep` of them are kept; the last step always writes one.

        With `minutes` between two more of them, which take an unknown number of steps, it is the most there may be.
        """
        return min(keep, self.total_steps if minutes else -(-self.total_steps // self.checkpoint_steps))


def count_steps(epochs: float, steps_per_epoch: int) -> int:
    """Count the steps of some epochs: at least one for any part of an epoch, and 0 for 0."""
    return max(1, int(epochs * steps_per_epoch)) if epochs else 0


def list_usual_warnings(batch: int, num_images: int, warmup_steps: int, total_steps: int, remedy: str) -> Iterator[str]:
    """Yield the warnings about a batch larger than the data set, and about a warm-up that is longer than the run."""
    if batch > num_images:
        images = count_things(num_images, "image")
        yield f"a batch of {batch} is larger than the data set of {images}: a step sees some of them twice"
    if warmup_steps >= total_steps:
        warmup = count_things(warmup_steps, "step")
        yield f"the warm-up of {warmup} is not over when the run ends at step {total_steps}: {remedy}"


def describe_late_drops(steps: Sequence[int], total_steps: int, remedy: str) -> str:
    """Return the warning about drops of the rate after the end of the run."""
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


def find_version_in(model_dir: str, *, clean: bool = False) -> int:
    """Find the version of the run in a folder by its path, see `find_recipe_version`; `clean`: it would be removed."""
    folder = find_copy(model_dir)
    if clean or not folder.exists():
        return CURRENT
    # Imported here, for it imports NumPy, and a plan without a run needs none.
    from gaudi_apps.training.run_dir import RunFolder

    return find_recipe_version(RunFolder(folder))


def version_setting(version: int) -> dict[str, int]:
    """Return the version as a run stores it: nothing for version 1, as its release did."""
    return {SETTING: version} if version > 1 else {}


BYTES_PER_VALUE = {"bf16": 2, "fp32": 4}
MEMORY_COVERS = (
    "weights and their average, what the optimizer keeps, gradients and what the forward pass keeps, of one process; "
    "not the library, not the input"
)


@dataclass(frozen=True)
class TrainingSet:
    """The size of a data set; counts that are not known are None.

    Attributes:
        images: of an epoch.
        num_classes: besides the background.
        images_found: in the data, with those that are left out.
        boxes, boxes_found: the same of boxes.
        record_bytes: of the records on disk.
    """

    images: int
    num_classes: int
    images_found: int | None = None
    boxes: int | None = None
    boxes_found: int | None = None
    record_bytes: int | None = None


def describe_needs(
    plan: Plan,
    size: tuple[int, int],
    *,
    checkpoints: int,
    state_bytes: int,
    bytes_per_value: int,
    record_bytes: int | None = None,
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Estimate the disk and memory that a plan needs.

    Args:
        plan: of the training.
        size: of the network, as `gaudi_models.architectures.measure_ssd` computes it: parameters and kept values.
        checkpoints: number of those that are kept besides the best one.
        state_bytes: of one, as `gaudi_models.architectures.count_state_bytes` counts them.
        bytes_per_value: of the values that the forward pass keeps.
        record_bytes: of records that are there.

    Returns:
        parameters, disk (bytes) and memory (bytes, of one process, about) by name; and the rows of a table.
    """
    parameters, kept_values = size
    # A training has gradients, too, in float32.
    memory_bytes = state_bytes + 4 * parameters + plan.own_batch * kept_values * bytes_per_value
    has_best = bool(plan.evaluation_steps or plan.evaluated_steps)
    document = {
        "parameters": parameters,
        "checkpoint_bytes": state_bytes,
        "estimated_memory_bytes": memory_bytes,
        "estimated_memory_covers": MEMORY_COVERS,
    }
    disk = f"{format_bytes((checkpoints + has_best) * state_bytes)} of checkpoints" + ", the best one too" * has_best
    if record_bytes is not None:
        disk += f"; {format_bytes(record_bytes)} of records are there"
    return document, [("disk", disk), ("memory", f"about {format_bytes(memory_bytes)}: {MEMORY_COVERS}")]


RANKS_PER_HOST = 8
SIZES = (8, 64, 512)  # predicted besides --plan_ranks
# docs/scaling.md says where they come from.
ASSUMED = {"latency_us": 20.0, "disk_mbps": 500.0, "backward_share": 2 / 3, "hashing_mbps": 400.0, "joining_ms": 4.0}
CYCLE_MS = 1.0  # of Horovod, which begins an exchange at the end of one


def describe_scaling(
    config: ProgramConfig, plan: Plan, step: scaling.Step, tensors: Tensors, state_bytes: int, memory_bytes: int
) -> dict[str, Any]:
    """Predict the cost of --plan_ranks ranks and of fewer, each with as many images a step as in a plan.

    Args:
        config: validated; Horovod is assumed where it names no engine.
        plan: of the training.
        step: of it, without its seconds.
        tensors: of the network.
        state_bytes: of a checkpoint.
        memory_bytes: of one process, as `describe_needs` estimates them.

    Returns:
        ``{"scaling": ...}``: ``basis`` has values by name, each with what it is (given, measured, assumed, computed,
        estimated or unknown), and ``sizes`` a prediction for each number of ranks; or an empty document.
    """
    flags, distribution = config.scaling, config.distribution.to_distribution()
    if flags.plan_ranks is None:
        return {}
    # Imported here, as in `find_version_in`.
    from gaudi_apps.training.run_dir import read_step_seconds

    measured = read_step_seconds(find_copy(config.run.model_dir), plan.own_batch)
    gradients = sum(size for _, size in step.buckets)
    assumed: dict[str, Any] = {
        **ASSUMED,
        "host_bandwidth_gbps": flags.bandwidth_gbps,
        "ranks_per_host": min(RANKS_PER_HOST, flags.plan_ranks),
        "wait_ms": 0.0 if distribution.distribution_strategy != "off" else CYCLE_MS / 2,
    }
    computed = {
        "gradient_bytes": gradients,
        "buckets": len(step.buckets),
        "statistics_bytes": step.statistics,
        "batch_norm_sums": 0 if step.group == 1 else len(step.sums),
        "checkpoint_bytes": state_bytes,
    }
    basis: dict[str, tuple[Any, str]] = {
        "step_seconds": (measured, "unknown" if measured is None else "measured"),
        **{name: (value, "assumed") for name, value in assumed.items()},
        **{name: (value, "given") for name, value in asdict(flags).items() if value is not None},
        **{name: (value, "computed") for name, value in computed.items()},
        # The buckets are packed, and summed, beside the gradients.
        "memory_bytes": (memory_bytes + 2 * gradients, "estimated"),
    }
    values = {name: value for name, (value, _) in basis.items()}
    step = step._replace(seconds=values["step_seconds"] or 0.0, backward_share=values["backward_share"])
    messages = 2 * len(tensors.trainable) + 2 * len(tensors.channels)  # weights, velocities, means and variances
    ranks = [size for size in SIZES if size < flags.plan_ranks and size % min(size, values["ranks_per_host"]) == 0]
    sizes = [_predict(each, values, step, messages, plan.own_batch) for each in (*ranks, flags.plan_ranks)]
    document = {name: {"value": value, "is": kind} for name, (value, kind) in basis.items()}
    return {"scaling": {"basis": document, "sizes": sizes}}


def _predict(ranks: int, values: Mapping[str, Any], step: scaling.Step, messages: int, images: int) -> dict[str, Any]:
    """Predict the cost of a number of ranks; what needs a step's time is None where that is not known."""
    between, within = (values[name] * 1e9 / 8 for name in ("bandwidth_gbps", "host_bandwidth_gbps"))
    latency, wait, joining = values["latency_us"] / 1e6, values["wait_ms"] / 1e3, values["joining_ms"] / 1e3
    links = scaling.Links(ranks, min(ranks, values["ranks_per_host"]), between, within, latency, wait)
    found, size = scaling.predict_step(step, links), values["checkpoint_bytes"]
    disk, hashing = values["disk_mbps"] * 1e6, values["hashing_mbps"] * 1e6
    return {
        "ranks": ranks,
        "hosts": links.hosts,
        "allreduce_seconds": found.allreduce,
        "hidden_seconds": found.hidden if step.seconds else None,
        "batch_norm_seconds": found.batch_norm,
        "step_seconds": found.step if step.seconds else None,
        "efficiency": found.efficiency if step.seconds else None,
        "images_per_second": ranks * images / found.step if step.seconds else None,
        "checkpoint_seconds": scaling.checkpoint_seconds(size, disk, hashing, links),
        "start_seconds": scaling.start_seconds(size, messages, joining, links),
    }


def _tabulate_scaling(document: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of what `describe_scaling` returned: what it rests on, and its predictions."""
    table = _make_table("Many ranks: what is predicted from", "", "value", "is")
    for name, entry in document["basis"].items():
        table.add_row(name, _format_value(name, entry["value"]), entry["is"])
    yield table
    sizes = document["sizes"]
    table = _make_table("Many ranks: predicted", "ranks", *(f"{size['ranks']}" for size in sizes))
    for name in [*sizes[0]][1:]:
        table.add_row(name, *(_format_value(name, size[name]) for size in sizes))
    yield table


def _format_value(name: str, value: float | None) -> str:
    if value is None:
        return "?"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3g}"


def print_report(
    document: Mapping[str, Any],
    rows: Iterable[tuple[str, str]],
    plan: Plan,
    recipe: Recipe | None = None,
    *,
    model_dir: str | Path,
    as_json: bool,
    launch: LaunchReport | None = None,
    console: Console | None = None,
) -> None:
    """Print a plan as one JSON object, or as tables.

    Args:
        document: the plan as JSON values by name; lines about the data are ``found``.
        rows: of its table.
        plan: whose learning rate and warnings are printed.
        recipe: what was chosen from the data and the machine.
        model_dir: of the run.
        as_json: print the document.
        launch: the processes to start.
        console: to print to; standard output when None.
    """
    console = console or make_console(soft_wrap=True)
    if as_json:
        chosen = {"recipe": recipe.as_json()} if recipe is not None and recipe.choices else {}
        launched = {"launch": None if launch is None else launch.as_json()}
        console.print(json.dumps({**document, **chosen, **launched}, indent=2))
        return
    for line in document.get("found", ()):
        console.print(line)
    table = _make_table(f"Plan of {model_dir}", show_header=False, box=None)
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)
    if recipe is not None and recipe.choices:
        console.print(_tabulate_recipe(recipe))
        for note in recipe.notes:
            console.print(note)
    console.print(_tabulate_rates(plan))
    for scaled in _tabulate_scaling(document["scaling"]) if "scaling" in document else ():
        console.print(scaled)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow")
    if launch is not None:
        console.print(launch.describe(), end="")


def list_plan(plan: Plan, keep_checkpoints: int, checkpoint_minutes: float = 0.0) -> Iterator[tuple[str, str]]:
    """Yield the rows of a plan's table."""
    shares = f", {plan.own_batch} on each of {plan.workers} processes" if plan.workers > 1 else ""
    yield "batch", f"{plan.global_batch}{shares}"
    yield "steps", f"{plan.total_steps} ({plan.epochs:.4g} epochs of {plan.steps_per_epoch})"
    reached, peak = f"{plan.reached_learning_rate:.4g}", f"{plan.peak_learning_rate:.4g}"
    yield "peak rate", peak if reached == peak else f"{reached}, of {peak} that the flags ask for"
    yield "warm-up", count_things(plan.warmup_steps, "step")
    if plan.lr_schedule == "piecewise":
        yield "drops", " and ".join(f"{step}" for step in plan.drop_steps)
    kept = f"{plan.count_checkpoints(keep_checkpoints, checkpoint_minutes)} kept{' at most' * bool(checkpoint_minutes)}"
    by_minutes = f" and every {checkpoint_minutes:g} minutes" if checkpoint_minutes else ""
    yield "checkpoints", f"every {count_things(plan.checkpoint_steps, 'step')}{by_minutes}, {kept}"
    if plan.evaluation_steps and checkpoint_minutes:
        yield "evaluations", f"every {count_things(plan.evaluation_steps, 'step')}, the best checkpoint is kept"


def _make_table(title: str, *headings: str, **options: Any) -> Table:
    from rich.table import Table  # here, since help needs no table

    table = Table(title=title, title_justify="left", **options)
    for heading in headings:
        table.add_column(heading)
    return table


def _tabulate_recipe(recipe: Recipe) -> Table:
    table = _make_table("Recipe auto", "flag", "value", "reason")
    for row in recipe.list_rows():
        table.add_row(*row)
    return table


def _tabulate_rates(plan: Plan) -> Table:
    table = _make_table("Learning rate")
    for heading in ("step", "epoch", "rate"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for change in plan.rate_changes:
        epoch = change.step / plan.steps_per_epoch
        table.add_row(f"{change.step}", f"{epoch:.4g}", f"{change.learning_rate:.4g}", change.reason)
    return table
