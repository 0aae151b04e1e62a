"""Choose the flags of a training from its data and its machine, and fit its length to a time.

A recipe is a list of flags with values and reasons. They stand in front of the command line, so a flag that the user
gives wins. A run keeps its recipe in ``recipe.json``, and goes on by it on any machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

from gaudi_apps.runtime.errors import RunChangedError
from gaudi_datasets.errors import DataError, FlagError
from gaudi_datasets.program import count_things
from gaudi_ops.files import read_text

if TYPE_CHECKING:
    from gaudi_datasets.layouts.splitting import SplitData
    from gaudi_distributed.cluster.rank_info import RankInfo

RECIPE, SPLIT, CHECKED = "recipe.json", "split.json", "checked.json"
RUN_LOG = "run_log.json"  # as in gaudi_apps.training.run_dir, which takes long to import
FORMAT, VERSION = "gaudi-apps recipe", 1

# The process began a moment before: the command line imports this module first of all that takes time.
STARTED = time.monotonic()

Value: TypeAlias = bool | int | float | str


class Choice(NamedTuple):
    """A flag, the value that the recipe gives it, and the reason in a few words."""

    flag: str
    value: Value
    reason: str


@dataclass(frozen=True)
class Recipe:
    """The flags that follow from data and machine.

    Attributes:
        choices: in the order in which they are shown.
        given: names of the flags that the user gives, which win.
        notes: lines for the user: what is missing, and what it would bring.
        minutes: that the length was fitted to, or is to be; 0: the length does not follow from a time.
        is_fitted: the length was fitted on the machine that the run began on.
    """

    choices: tuple[Choice, ...] = ()
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    minutes: float = 0.0
    is_fitted: bool = False

    @property
    def effective(self) -> tuple[Choice, ...]:
        """Return the choices that the user does not replace."""
        return tuple(choice for choice in self.choices if choice.flag not in self.replaced)

    @property
    def replaced(self) -> frozenset[str]:
        """Return the names of the flags whose choice the user replaces: also the steps, by epochs."""
        return self.given | {"steps"} if "epochs" in self.given else self.given

    def to_arguments(self) -> list[str]:
        """Return the effective choices as a command line."""
        words = []
        for flag, value, _ in self.effective:
            words.append((f"--{flag}" if value else f"--no_{flag}") if isinstance(value, bool) else f"--{flag}={value}")
        return words

    def replace_values(self, fitted: Sequence[Choice]) -> Recipe:
        """Return the recipe of a run whose length was fitted.

        Args:
            fitted: the number of steps, and then what follows from it; this is used only where the recipe had chosen
                it before.
        """
        steps, *others = fitted
        by_flag = {choice.flag: choice for choice in others}
        kept = tuple(by_flag.get(choice.flag, choice) for choice in self.choices if choice.flag != steps.flag)
        return replace(self, choices=(steps, *kept), is_fitted=True)

    def chooses(self, flag: str) -> bool:
        """Return whether a flag has the value of the recipe."""
        return any(choice.flag == flag for choice in self.effective)

    def list_rows(self) -> list[tuple[str, str, str]]:
        """Return flag, value and reason of each choice; a flag that the user gives has neither here."""
        return [
            (flag, "as given", "") if flag in self.replaced else (flag, format_value(value), reason)
            for flag, value, reason in self.choices
        ]

    def as_json(self) -> list[dict[str, Value]]:
        """Return the effective choices as JSON values."""
        return [choice._asdict() for choice in self.effective]

    def to_document(self) -> dict[str, Any]:
        """Return the content of ``recipe.json``; `read_recipe` reads it."""
        document = asdict(self) | {"choices": [choice._asdict() for choice in self.choices]}
        del document["given"], document["notes"]
        return {"format": FORMAT, "version": VERSION, **document}

    def describe(self) -> str:
        """Describe the effective choices in a line."""
        listed = ", ".join(f"{flag} {format_value(value)}" for flag, value, _ in self.effective)
        return f"recipe auto: {listed}; --mode plan gives the reasons"


NO_RECIPE = Recipe()


def format_value(value: Value) -> str:
    """Format the value of a flag for a table."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.6g}" if isinstance(value, float) else f"{value}"


def read_recipe(
    model_dir: Path, given: Collection[str], minutes: float | None, steps: int = 0, *, program: str = ""
) -> Recipe | None:
    """Read the recipe of the run in a folder.

    Args:
        model_dir: folder of the run.
        given: names of the flags that the user gives.
        minutes: that the user gives for the length; 0: none; None: nothing is trained.
        steps: that the user gives in place of minutes, as the config.yaml of a run does whose length was fitted.
        program: that reads it; empty: any.

    Returns:
        None where there is no run, or where it has no recipe.

    Raises:
        OSError: it cannot be read.
        DataError: the file is damaged.
        RunChangedError: the run is of another program, or its length was fitted to another time.
    """
    path = model_dir / RECIPE
    try:
        document = json.loads(read_text(path))
        recipe = parse_recipe(document, given)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"is no recipe of a run ({error})", path=path, remedy="give another --model_dir") from None
    owner = document.get("program") or _read_program(model_dir)
    if program and owner and owner != program:
        raise RunChangedError(
            f"the run there is of {owner}", path=model_dir, field="program", remedy="give another --model_dir"
        )
    fitted = [choice.value for choice in recipe.choices if choice.flag == "steps" and recipe.is_fitted]
    is_same = recipe.minutes == minutes or (not minutes and "steps" in given and [steps] == fitted)
    if minutes is not None and not is_same:
        _refuse_length(model_dir, recipe.minutes, minutes, given)
    return recipe


def _refuse_length(model_dir: Path, fitted: float, minutes: float, given: Collection[str]) -> NoReturn:
    """Raise RunChangedError for a run whose length was fitted to another time, or to none."""
    # Imported here, for it imports NumPy, and a plan needs none.
    from gaudi_apps.training.checkpoint import read_run_record

    if fitted:
        remedy = f"give --minutes {fitted:g}"
        other = next((f"--{name}" for name in ("steps", "epochs") if name in given), "no --minutes")
        wrong = f"was fitted to {_count_minutes(fitted)}, " + (
            f"not {minutes:g}" if minutes else f"and this command gives {other}"
        )
    else:
        flags = read_run_record(model_dir).get("settings", {})
        length = next((f"--{name} {flags[name]}" for name in ("steps", "epochs") if flags.get(name)), "its length")
        wrong, remedy = "was not fitted to a time", f"give {length} in place of --minutes"
    raise RunChangedError(
        f"the length of the run there {wrong}",
        path=model_dir / RECIPE,
        field="minutes",
        remedy=f"{remedy}, another --model_dir, or --clean to start over",
    )


def _count_minutes(minutes: float) -> str:
    return f"{minutes:g} minute{'s' * (minutes != 1)}"


def _read_program(model_dir: Path) -> Any:
    """Read which program wrote the log of a run; None where nothing tells it."""
    try:
        return json.loads(read_text(model_dir / RUN_LOG))["program"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def parse_recipe(document: Mapping[str, Any], given: Collection[str]) -> Recipe:
    """Return the recipe that `Recipe.to_document` described.

    Raises:
        ValueError, KeyError, TypeError: it is damaged.
    """
    if document["format"] != FORMAT or document["version"] != VERSION:
        raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
    choices = tuple(_parse_choice(entry) for entry in document["choices"])
    return Recipe(choices, frozenset(given), (), float(document["minutes"]), bool(document["is_fitted"]))


def _parse_choice(entry: Mapping[str, Any]) -> Choice:
    choice = Choice(entry["flag"], entry["value"], entry["reason"])
    if not (isinstance(choice.flag, str) and choice.flag.isidentifier() and isinstance(choice.reason, str)):
        raise ValueError(f"{choice.flag!r} is no flag")
    if not isinstance(choice.value, (bool, int, float, str)):
        raise ValueError(f"{choice.flag} has no value")
    return choice


@functools.lru_cache(maxsize=1)
def open_once(open_data: Callable[..., Any], path: str, val_share: float, seed: int, **options: str) -> Any:
    """Open the data set of --data as it is, by the `open_data` of its kind; it is opened once in a process.

    The options are what this `open_data` takes besides, such as `on_bad_image`.

    Raises:
        MissingInputError: it is not there.
        DataError: its layout is not known, it is of the other kind, or it is damaged.
        FlagError: the path is empty.
    """
    if not path:
        raise FlagError("--data: is empty; it must name a folder or a file", flag="--data")
    return open_data(path, val_share=val_share, seed=seed, **options)


def describe_found(path: str | None, found: SplitData[Any]) -> tuple[str, ...]:
    """Return the layout of the data set of --data, its size by split, and what was left out or guessed, a line each."""
    names = {"train": "training", "val": "validation", "test": "test"}
    sizes = (f"{count_things(len(source), 'image')} for {names[split]}" for split, source in found.sources.items())
    return (f"{path}: {found.layout}", ", ".join(sizes), *found.notes)


SHARE_OF_EVALUATION = 0.1  # of the time, at most
MOST_EVALUATIONS = 10
SCORING_SECONDS = 1.0  # of an evaluation, besides the network
END_SECONDS = 15.0  # the last checkpoint, curves, drawn images, the page; 8 were too few beside other work


@dataclass(frozen=True)
class Speed:
    """Speed of a machine, in seconds.

    Attributes:
        step: a training step.
        evaluation: an evaluation during training.
        report: the evaluation after it.
    """

    step: float
    evaluation: float
    report: float


class Length(NamedTuple):
    """Steps of a training, and steps between two of its evaluations; 0: none."""

    steps: int
    evaluation_steps: int


def count_steps_left(seconds: float, speed: Speed, evaluation_steps: int) -> int:
    """Count the steps that fit into the time that is left, besides the evaluations and the end; maybe none."""
    share = speed.evaluation / evaluation_steps if evaluation_steps else 0.0
    left = seconds - speed.report - END_SECONDS - speed.evaluation * bool(evaluation_steps)
    return max(0, int(left / (speed.step + share)))


def fit_length(seconds: float, speed: Speed, steps_per_epoch: int, evaluation_steps: int | None = None) -> Length:
    """Fit the length of a training to the time that is left.

    The last evaluation comes after the last step. There are as many as fit into a tenth of the time, at most 10 and at
    most one for each epoch, and one in any case.

    Args:
        seconds: that are left.
        speed: of the machine.
        steps_per_epoch: of the training.
        evaluation_steps: steps between two evaluations, if they are given; 0: none but the report.

    Raises:
        FlagError: not even one step fits.
    """
    left = seconds - speed.report - END_SECONDS
    if evaluation_steps is not None:
        steps, evaluations = count_steps_left(seconds, speed, evaluation_steps), 0
    else:
        evaluations = 0
        if speed.evaluation:
            evaluations = max(1, min(MOST_EVALUATIONS, int(SHARE_OF_EVALUATION * left / speed.evaluation)))
            epochs = (left - evaluations * speed.evaluation) / speed.step / steps_per_epoch
            evaluations = max(1, min(evaluations, int(epochs)))
        steps = int((left - evaluations * speed.evaluation) / speed.step)
    if steps < 1:
        share = 1.0 if evaluation_steps is None else 1 + 1 / evaluation_steps if evaluation_steps else 0.0
        needed = math.ceil(speed.step + share * speed.evaluation + speed.report + END_SECONDS)
        raise FlagError(
            f"--minutes: {max(0.0, seconds):.0f} s are left after the start, and a step with its evaluation needs "
            f"{needed} s",
            flag="--minutes",
            remedy=f"give at least {_count_minutes(math.ceil((needed - seconds) / 60))} more",
        )
    return Length(steps, -(-steps // evaluations) if evaluations else evaluation_steps or 0)


@dataclass(frozen=True)
class Host:
    """The machine as far as a recipe depends on it.

    Attributes:
        device: `"cpu"`, `"gpu"` or `"hpu"`.
        processors: that all ranks may use.
        has_bf16: whether the device computes bf16 faster than fp32.
        has_avx512: whether processors compute 16 numbers of fp32 at once, as all do that have bf16.
    """

    device: str
    processors: int
    has_bf16: bool
    has_avx512: bool = True

    def describe(self) -> str:
        """Describe the machine in a few words."""
        return count_things(self.processors, "processor") if self.device == "cpu" else f"a {self.device}"

    def assume_speed(self, with_bf16: float, with_avx512: float, without: float, of_accelerator: float) -> float:
        """Return the images a second to plan with, of a number for each kind of processor, and one for accelerators."""
        if self.device != "cpu":
            return of_accelerator
        return self.processors * (with_bf16 if self.has_bf16 else with_avx512 if self.has_avx512 else without)


def find_host(flags: Any, workers: int = 1) -> Host:
    """Find the machine that so many workers train on, by flags of the group `device` of a program in TensorFlow.

    Raises:
        DeviceError: the device that was asked for is not there.
    """
    # Imported here, for programs without a recipe need none of it.
    from gaudi_distributed import choose_device
    from gaudi_distributed.cluster.rank_info import detect_rank
    from gaudi_distributed.devices.machine import Machine, gather_processor

    device = choose_device(flags.device, use_hpu=not flags.no_hpu)
    processors = count_processors_of_all(detect_rank(os.environ), workers, flags.max_cpus)
    processor = gather_processor(Machine(), os.sched_getaffinity(0))
    return Host(device, processors, device != "cpu" or bool(processor.bf16_by), "avx512f" in processor.flags)


def count_processors_of_all(rank: RankInfo, workers: int, most: int = 0) -> int:
    """Count the processors of all workers; each uses `most` of them, or all where it is 0.

    A rank that was launched may be bound to its share of its host. Until then, workers are taken to be of this machine.
    """
    from gaudi_distributed.devices.machine import count_processors

    machine, here = (own := count_processors()), workers
    if rank.size > 1:
        here = rank.local_size
        with contextlib.suppress(OSError):  # what the first process may use, nothing has bound
            machine = max(own, count_processors(usable=os.sched_getaffinity(1)))
    return min(machine, here * min(own, most or own)) * max(1, workers // here)


START_SECONDS, SHARE_OF_START = 60.0, 0.25  # until the first step is compiled and measured, about, and at most
EVALUATIONS, MOST_EPOCHS = 8, 999_999  # the latter is what --eval_epochs takes


# Of a rate that ends with the run, which a recipe sees to.
COSINE = Choice("lr_schedule", "cosine", "ends at 0 with the last step")


def choose_type(host: Host) -> Choice:
    """Choose the precision that is the faster one on a machine."""
    if host.has_bf16:
        return Choice("dtype", "bf16", "bf16 is the faster one here")
    return Choice("dtype", "fp32", "this processor has no instructions for bf16")


def choose_steps(
    config: Any, given: Collection[str], steps_per_second: float, per_epoch: int, *, epochs: int, fewest: int
) -> Choice:
    """Choose the number of steps: the given one, what is likely to fit into the given minutes, or by epochs.

    Args:
        config: the flags, without a recipe.
        given: names of those that the user gives.
        steps_per_second: of the machine, about.
        per_epoch: steps of an epoch.
        epochs: of a training whose length is not given.
        fewest: steps of such a training, if the epochs are fewer.
    """
    if config.recipe.minutes:
        given_seconds = config.recipe.minutes * 60
        left = given_seconds - min(START_SECONDS, SHARE_OF_START * given_seconds)
        reason = f"about, for {_count_minutes(config.recipe.minutes)}; steps are measured at first and on the way"
        return Choice("steps", max(1, int(left * (1 - SHARE_OF_EVALUATION) * steps_per_second)), reason)
    if "steps" in given and config.run.steps:
        return Choice("steps", config.run.steps, "as given")
    if "epochs" in given:
        return Choice("steps", max(1, int(config.run.epochs * per_epoch)), "as given")
    steps = max(fewest, epochs * per_epoch)
    return Choice("steps", steps, f"{steps / per_epoch:.3g} epochs, {epochs} or {fewest} steps at least")


def choose_evaluations(given: Collection[str], steps: int, per_epoch: int, *, validates: bool) -> Iterator[Choice]:
    """Choose when to evaluate and to save.

    Args:
        given: names of the flags that the user gives.
        steps: of the training.
        per_epoch: steps of an epoch.
        validates: whether there are images to validate on.
    """
    if validates:
        every = min(max(per_epoch, -(-steps // EVALUATIONS)), MOST_EPOCHS * per_epoch)
        reason = f"{count_things(-(-steps // every), 'evaluation')}, the best checkpoint is kept"
        yield Choice("eval_epochs", count_epochs(every, per_epoch), reason)
    else:
        yield Choice("no_evaluate", True, "there are no images to validate on")
    if "save_checkpoints_epochs" not in given:
        yield Choice("save_checkpoints_steps", steps, "at the end")
    yield Choice("save_checkpoints_minutes", 10.0, "what a crash costs at most")
    yield Choice("keep_ckpt_max", 2, "besides the best one")


def fit_evaluations(length: Length, per_epoch: int, reason: str) -> Iterator[Choice]:
    """Return the flags of a training whose length was fitted to a time, first the number of steps."""
    yield Choice("steps", length.steps, reason)
    yield Choice("save_checkpoints_steps", length.steps, "at the end")
    if length.evaluation_steps:
        every = count_epochs(length.evaluation_steps, per_epoch)
        yield Choice("eval_epochs", every, "a tenth of the time at most, the best checkpoint is kept")


def count_epochs(steps: int, steps_per_epoch: int) -> float:
    """Return the epochs that become these steps where a fraction of a step is cut off."""
    return round((steps + 1e-3) / steps_per_epoch, 9)


def choose_average(steps: int) -> Choice:
    """Choose the decay of the average of the weights, which remembers about a third of a run at most."""
    decay = next((decay for limit, decay in AVERAGES if steps < limit), AVERAGES[-1][1])
    return Choice("ema_decay", decay, f"averages the weights of {count_things(steps, 'step')}")


AVERAGES = ((400, 0.99), (1000, 0.995), (5000, 0.998), (50000, 0.9995), (0, 0.9998))
