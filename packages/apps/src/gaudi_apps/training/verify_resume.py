"""The mode verify-resume: kill a short run of the user's own configuration again and again, and compare.

One run goes through; another is ended by SIGKILL at drawn moments and started again with the same command until it is
done. Both are processes of their own, as the real ones are.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import yaml

from gaudi_apps.cli.flag_rules import find_rules, make_short_run
from gaudi_apps.runtime.errors import ResumeError
from gaudi_apps.training.application import Application
from gaudi_apps.training.checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder
from gaudi_datasets.program import count_things
from gaudi_ops.files import write_file
from gaudi_ops.program import say

STEPS = 6
_STEP = re.compile(r"step (\d+)/")


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
    """Run the program, say when it reports a step, and return its status; raise ResumeError if that is another one."""
    last = "it said nothing"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            last = line.strip() or last
            if found := _STEP.match(line):
                at_step(process, int(found[1]))
    if process.returncode not in ends_with:
        raise ResumeError(f"verify-resume: a run ended with status {process.returncode}, not {ends_with[0]}: {last}")
    return process.returncode
