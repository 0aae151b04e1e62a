"""Run launches one after another, each with a log and cleared page caches; start one again where it ends with 75."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gaudi_distributed.errors import (
    ConfigurationError,
    FlagError,
    HostNotReachedError,
    OutputLog,
    RunEndedError,
    StoppedError,
    open_log,
    say,
)
from gaudi_distributed.failure.messages import LOST
from gaudi_distributed.launch.choices import choose_preset
from gaudi_distributed.launch.flags import PROGRAM, Options
from gaudi_distributed.launch.planning import CACHES_CLEARED, RESTART, Launch, count_restarts, plan_launch
from gaudi_distributed.launch.presets import load_entry_points
from gaudi_distributed.launch.processes import LaunchPlan
from gaudi_distributed.launch.running import catch_signals, start, tell

# The entry point of this group is the series of `--submission`.
SERIES_GROUP = "gaudi_distributed.experiments"
_CLEAR_SECONDS = 600.0


@dataclass(frozen=True)
class Experiment:
    """One launch of a series of experiments.

    Attributes:
        options: of the launch.
        number: index of the experiment, from 1.
        count: number of experiments.
        log: file that gets all of its output.
        clears_caches: clear the page caches of all hosts before it.
    """

    options: Options
    number: int = 1
    count: int = 1
    log: Path | None = None
    clears_caches: bool = False


@dataclass(frozen=True)
class ExperimentSeries:
    """Register the experiments of a program with `gaudi-run --submission`.

    Attributes:
        variables: names of the environment variables that describe them; a job's script passes them on.
        expand: returns the experiments for the options and the environment.
    """

    variables: tuple[str, ...]
    expand: Callable[[Options, Mapping[str, str]], list[Experiment]]


def list_experiments(options: Options, environ: Mapping[str, str]) -> list[Experiment]:
    """Return the launches to run one after another; one, unless `--submission` is given.

    Raises:
        ConfigurationError: no program that is installed has registered experiments, or its variables are wrong.
        FlagError: they were to start again by themselves.
    """
    if options.submission and options.max_restarts:
        raise FlagError(
            "--max_restarts: a trial of --submission that starts again has other times and caches",
            flag="--max_restarts",
            remedy="leave it out",
        )
    return load_series().expand(options, environ) if options.submission else [Experiment(options)]


def load_series() -> ExperimentSeries:
    """Return the experiments of `--submission`; ConfigurationError if no installed program registered any."""
    for series in load_entry_points(SERIES_GROUP):
        if isinstance(series, ExperimentSeries):
            return series
    raise ConfigurationError(
        "--submission: is of gaudi-apps, which is not installed", flag="--submission", remedy="pip install gaudi-apps"
    )


def list_clearing(plan: LaunchPlan, environ: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the commands, each with its host: write what is not on disk yet, then drop what is cached.

    Who is not root asks sudo, which may not ask back. Other hosts are reached by ssh, or in a job of SLURM by srun.
    """
    commands: list[tuple[str, tuple[str, ...]]] = []
    # sysctl may lie in a folder that only root has in PATH.
    folders = os.pathsep.join((environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    for host in plan.cluster.hosts:
        is_here = host.name in plan.local_hosts
        sysctl = (shutil.which("sysctl", path=folders) if is_here else None) or "/sbin/sysctl"
        sudo = () if plan.is_root else ("sudo", "-n")
        for argv in (("sync",), (*sudo, sysctl, "-q", "vm.drop_caches=3")):
            if is_here:
                commands.append((host.name, argv))
            elif "SLURM_JOB_ID" in environ:
                srun = ("srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--")
                commands.append((host.name, (*srun, *argv)))
            else:
                commands.append((host.name, plan.ssh.reach(host.name, argv)))
    return commands


def clear_caches(plan: LaunchPlan, environ: Mapping[str, str]) -> str | None:
    """Clear the caches of all hosts of a launch; return None, or the line of the first error."""
    for host, argv in list_clearing(plan, environ):
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CLEAR_SECONDS,
                env=dict(environ),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{host}: {error}"
        if done.returncode:
            said = done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}"
            return f"{host}: {argv[-2] if len(argv) > 1 else argv[0]}: {said.splitlines()[-1]}"
    return None


def describe_result(name: str, started: datetime, ended: datetime, environ: Mapping[str, str]) -> str:
    """Return the line of results: what was run, seconds, who ran it, and when it began."""
    user = environ.get("USER") or environ.get("LOGNAME") or str(os.getuid())
    return f"RESULT,{name},,{round((ended - started).total_seconds())},{user},{started:%Y-%m-%d %I:%M:%S %p}"


def run_experiment(experiment: Experiment, environ: Mapping[str, str]) -> None:
    """Run a launch, or with `--dry_run` show it.

    A launch that is no experiment of a submission has no log, and clears no caches.

    Raises:
        RunEndedError: it did not end well.
    """
    launched = plan_launch(experiment.options, environ)
    if experiment.options.dry_run:
        text = launched.describe()
        if experiment.log is not None:
            clearing = list_clearing(launched.plan, environ) if experiment.clears_caches else []
            first = "".join(f"first {shlex.join(argv)}\n" for _, argv in clearing)
            text = f"trial {experiment.number} of {experiment.count}\nlog {experiment.log}\n{first}{text}"
        say(*text.splitlines())
        return
    if experiment.log is None:
        _run(experiment, launched, environ, None)
        return
    experiment.log.parent.mkdir(parents=True, exist_ok=True)
    with open_log(experiment.log) as file:
        log = OutputLog(file)
        try:
            _run(experiment, launched, environ, log)
        except RunEndedError as error:
            log.write(f"{PROGRAM}: error: {error}\n".encode())
            raise


def _run(experiment: Experiment, launched: Launch, environ: Mapping[str, str], log: OutputLog | None) -> None:
    if log is not None:
        tell(f"beginning trial {experiment.number} of {experiment.count}; its output is in {experiment.log}, too", log)
    if experiment.clears_caches:
        fault = clear_caches(launched.plan, environ)
        if fault is not None:
            tell(f"caches are not cleared, and the log of MLPerf will say so: {fault}; or set CLEAR_CACHES=0", log)
        environ = {**environ, CACHES_CLEARED: "1" if fault is None else "0"}
        launched = plan_launch(experiment.options, environ)
    started = datetime.now()
    _start_again(launched, environ, log)
    preset, _ = choose_preset(experiment.options)
    # A launcher inside a container writes its own.
    if preset is not None and preset.result is not None and launched.watches_ranks:
        line = describe_result(preset.result, started, datetime.now(), environ)
        say(line)
        if log is not None:
            log.write(f"{line}\n".encode())


# Time before the first restart; twice as long before each further one.
RESTART_SECONDS, _MOST_RESTART_SECONDS = 5.0, 300.0
_TICK = 0.05


def _start_again(launch: Launch, environ: Mapping[str, str], log: OutputLog | None) -> None:
    """Run a launch, and where it ends with 75, start all ranks again, as often as it was planned.

    Raises:
        RunEndedError: it did not end well.
        StoppedError: somebody asked for the end.
    """
    for note in launch.notes:
        tell(note, log)
    # Inside a container, the gaudi-run outside has counted, too.
    before = count_restarts({RESTART: environ.get(RESTART, "")})
    for restart in itertools.count(1):
        try:
            start(launch, {**environ, RESTART: f"{before + restart - 1}"}, log)
            return
        except StoppedError:
            raise
        except RunEndedError as error:
            # A host that was lost may be reached again later, and one that was never reached, hardly.
            may_succeed = error.exit_status == LOST or (restart > 1 and isinstance(error, HostNotReachedError))
            if not may_succeed or restart > launch.plan.max_restarts:
                raise
            seconds = min(RESTART_SECONDS * 2 ** (restart - 1), _MOST_RESTART_SECONDS)
            with catch_signals() as asked:
                tell(f"{error}", log)
                tell(f"restart {restart} of {launch.plan.max_restarts} in {seconds:g} s", log)
                _wait(seconds, asked)


def _wait(seconds: float, asked: Sequence[int]) -> None:
    """Wait for so long, or until a signal asks for the end."""
    limit = time.monotonic() + seconds
    while not asked and time.monotonic() < limit:
        time.sleep(_TICK)
