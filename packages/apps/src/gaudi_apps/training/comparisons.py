"""The modes that compare two runs of the user's own configuration: parity and verify-resume.

Parity records the first steps of a training, or compares them with a recording of another side, tensor by tensor,
within the tolerances of the precisions of both sides.

Verify-resume trains twice: one run goes through; another is ended by SIGKILL at drawn moments and started again with
the same command until it is done. Both are processes of their own, as the real ones are, and end in the same bits.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from gaudi_apps.cli.flag_rules import find_aliases, find_rules, list_settings, make_short_run, select_flags
from gaudi_apps.cli.flags import RECORDED, ParityFlags, split_side_flag
from gaudi_apps.runtime.errors import OtherSideError, ParityError, ResumeError
from gaudi_apps.runtime.session import Session, list_start_metadata
from gaudi_apps.training.application import Application
from gaudi_apps.training.checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder, ModelConfig, require_classes
from gaudi_apps.training.plan import Plan, version_setting
from gaudi_apps.training.recording import (
    Difference,
    Recording,
    StepTensor,
    choose_tolerances,
    compare_step,
    find_first,
    read_recording,
    require_comparable,
    require_new,
    without_reference,
    write_recording,
)
from gaudi_apps.training.run_dir import read_initial_weights
from gaudi_apps.training.trainer import TrainableTask, TrainingData
from gaudi_datasets.program import count_things, make_console
from gaudi_ops.files import write_file
from gaudi_ops.program import say

STEPS = 6
_STEP = re.compile(r"step (\d+)/")
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
        reference = without_reference if recording is None else recording.read_part
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
    weights = read_initial_weights(run.weights, data.model_config)
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
    for name in select_flags(type(app.config), "per_side"):
        flags.pop(name, None)
    version = version_setting(app.recipe_version)
    return {"data": data.fingerprint, "parity_steps": steps, **model_config, **flags, **version}


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


def _list_variables() -> dict[str, str]:
    """List the variables of a process that is no rank of the run of this one, which gaudi-run may have started."""
    # Imported here, as most runs do not need it.
    from gaudi_distributed.launch.planning import without_rank

    return without_rank(os.environ)


def _record(command: Sequence[str], text: str) -> None:
    variables = _list_variables()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        last = next((line for line in reversed(said) if "error: " in line), said[-1] if said else "no output")
        status = done.returncode if done.returncode > 0 else 70
        raise OtherSideError(f"the other side ({text}): {last.partition('error: ')[2] or last}", status)


def verify_resume(app: Application) -> None:
    """Prove it for the configuration of a program in a temporary folder, and print a report."""
    run = app.settings
    given = 0 if app.recipe.chooses("steps") else run.steps
    steps = given or max(STEPS, run.kills + 1)
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        end, kills = compare_runs(app, Path(folder), steps=steps, kills=run.kills, seed=run.device.seed)
    say(f"{count_things(end.step, 'step')}, killed {count_things(kills, 'time')}: the same as without")
    say(f"weights and optimizer state  {end.sha256}")
    say(f"sequence of image ids        {end.run_state.image_sequence}")


def compare_runs(app: Application, folder: Path, *, steps: int, kills: int, seed: int) -> tuple[Checkpoint, int]:
    """Train twice, once with kills, and compare the ends bit for bit.

    Args:
        app: what to train; its folder of the run is not touched.
        folder: where both runs are made.
        steps: of each run.
        kills: how often the second run is ended, fewer than there are steps.
        seed: of the moments of the kills.

    Returns:
        the last checkpoint, and how many times the second run was ended: fewer than asked for where it came to its end
        before.

    Raises:
        ResumeError: the ends differ, or a run failed.
    """
    times: list[float] = []
    _run(_command(app, folder / "whole", steps), lambda process, step: times.append(time.monotonic()))
    # From one report of a step to the next, between them a checkpoint.
    seconds = (times[-1] - times[0]) / max(len(times) - 1, 1) if times else 0.0
    drawn = random.Random(seed)
    command = _command(app, folder / "killed", steps)
    planned = [(step, drawn.uniform(0, seconds)) for step in sorted(drawn.sample(range(1, steps), kills))]
    # Once a run has come to its end, there is nothing left to kill.
    kills = len(list(takewhile(lambda moment: _kill_after(command, *moment), planned)))
    if not kills:
        flag = next(f"--{name}" for name, rules in find_rules(type(app.config)).items() if rules.length == "steps")
        fault = "verify-resume: the run ended before it could be killed"
        raise ResumeError(fault, flag=flag, remedy=f"give more {flag}")
    _run(command)
    first, second = (CheckpointFolder(folder / name / CHECKPOINTS).load_newest() for name in ("whole", "killed"))
    for field, what, one, other in (
        ("steps", "steps", first.step, second.step),
        ("state", "weights and optimizer state", first.sha256, second.sha256),
        (
            *("image_sequence", "sequence of image ids"),
            *(first.run_state.image_sequence, second.run_state.image_sequence),
        ),
    ):
        if one != other:
            raise ResumeError(
                f"verify-resume: {what} differ after {kills} kills: {one} without, {other} with them", field=field
            )
    return first, kills


def _command(app: Application, model_dir: Path, steps: int) -> list[str]:
    """Return the program's command with the user's flags, but for those of a short run, through a file."""
    flags = {**make_short_run(app.config, steps), "model_dir": str(model_dir)}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}
    path = model_dir.with_suffix(".yaml")
    write_file(path, yaml.safe_dump(values))
    return [sys.executable, *app.program, "--config", str(path)]


def _kill_after(command: Sequence[str], step: int, delay: float) -> bool:
    """Run until a step is reported and a little longer, so that the kill falls anywhere in saving and stepping.

    Returns:
        False: the run came to its end before, which beside other work it may.
    """
    timers: list[threading.Timer] = []

    def kill_soon(process: subprocess.Popen[str], done: int) -> None:
        if timers:  # a step later at the latest, so that each of the kills has a step of its own
            process.kill()
        elif done >= step:
            timers.append(threading.Timer(delay, process.kill))
            timers[0].start()

    try:
        status = _run(command, kill_soon, ends_with=(-signal.SIGKILL, 0))
    finally:
        for timer in timers:
            timer.cancel()
    if status == 0 and not timers:
        raise ResumeError(f"verify-resume: a run ended with status 0 before step {step}")
    return status != 0


def _run(
    command: Sequence[str],
    at_step: Callable[[subprocess.Popen[str], int], None] = lambda process, step: None,
    *,
    ends_with: Sequence[int] = (0,),
) -> int:
    """Run the program, say when it reports a step, and return its status.

    Raises:
        OtherSideError: it failed, and this ends with its status.
        ResumeError: it was killed, or should have been.
    """
    last = "it said nothing"
    variables, merged = _list_variables(), subprocess.STDOUT
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=merged, text=True, env=variables) as process:
        for line in process.stdout or ():
            last = line.strip() or last
            if found := _STEP.match(line):
                at_step(process, int(found[1]))
    if process.returncode not in ends_with:
        told = f"verify-resume: a run ended with status {process.returncode}, not {ends_with[0]}: {last}"
        raise OtherSideError(told, process.returncode) if process.returncode > 0 else ResumeError(told)
    return process.returncode
