"""From the command line to a mode: parse flags, print the plan, start processes, or compute."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gaudi_apps.cli.config_file import parse_config
from gaudi_apps.cli.flags import ParityFlags
from gaudi_apps.cli.launch import LaunchReport, report_launch, start_processes
from gaudi_apps.runtime.elastic import Commits, check_elastic, is_elastic, train_in_rounds
from gaudi_apps.runtime.failure_reporting import Supervised, interrupt_on_sigterm
from gaudi_apps.runtime.process_group import (
    Distribution,
    complete_flags,
    count_workers,
    find_distribution,
)
from gaudi_apps.training.parity.mode import other_arguments, recorded_side
from gaudi_datasets.arguments import FormerFlag, is_switch_on, read_switch, split_word
from gaudi_datasets.errors import FlagError
from gaudi_datasets.program import run_program
from gaudi_distributed import DeviceKind, choose_device
from gaudi_distributed.cluster.rank_info import detect_rank, is_launched

if TYPE_CHECKING:
    from gaudi_apps.training.application import Application

TOGETHER = ("train", "eval", "rehearse")  # modes that several processes share


@dataclass(frozen=True)
class Launch:
    """A program on the command line.

    Attributes:
        prog: its name.
        program: what a Python is given to run it.
        description: what stands at the top of its help text.
        config: the dataclass of its flags; its group `run` has the mode, `device` the device, and `distribution` what
            several processes train together by.
        validate: raises FlagError for a value that breaks a rule.
        print_plan: prints what training would do on so many processes, and how they would be started.
        open: makes the program of validated flags for this process.
        mode_of: what is done by its flags; besides their modes, "rehearse".
        former_flags: of the program that it replaces.
    """

    prog: str
    program: tuple[str, ...]
    description: str
    config: type[Any]
    validate: Callable[[Any], None]
    print_plan: Callable[[Any, int, LaunchReport | None], None]
    open: Callable[[Any, Distribution], Application]
    mode_of: Callable[[Any], str] = lambda config: str(config.run.mode)
    former_flags: Sequence[FormerFlag] = ()

    def main(self, argv: Sequence[str] | None = None) -> NoReturn:
        """Run it with the given arguments (those of the command line when None) and leave the process."""
        interrupt_on_sigterm()
        arguments = list(sys.argv[1:] if argv is None else argv)
        debug = is_switch_on(arguments, "debug")
        supervised = Supervised(self.prog, debug=debug)
        run_program(lambda: supervised.run(lambda: self._run(arguments, supervised)), prog=self.prog, debug=debug)

    def _run(self, arguments: Sequence[str], supervised: Supervised) -> int:
        config = self._parse(arguments)
        mode = self.mode_of(config)
        if mode == "plan":
            self._plan(config, arguments)
            return 0
        if is_elastic(os.environ):
            flags = config.distribution.to_distribution()
            check_elastic(mode, flags)
            train_in_rounds(lambda commits: self._train_round(config, supervised, commits), flags.commit_steps)
            return 0
        app = self.open(config, self._find_distribution(mode, config, arguments))
        if mode == "parity":
            return self._compare_sides(config, arguments, app, supervised)
        if mode == "verify-resume":
            from gaudi_apps.training.verify_resume import verify_resume

            return verify_resume(app)
        return _compute(mode, app, supervised)

    def _plan(self, config: Any, arguments: Sequence[str]) -> None:
        """Print the plan of training by these flags, and the command lines that it would start."""
        flags, find_device = config.distribution.to_distribution(), _device_finder(config)
        command = (sys.executable, *self.program, *drop_plan_flags(arguments))
        report = report_launch(flags, os.environ, find_device, command)
        self.print_plan(config, count_workers(flags, os.environ, find_device), report)

    def _parse(self, arguments: Sequence[str]) -> Any:
        """The flags, complete and validated."""
        config = parse_config(
            self.config,
            arguments,
            prog=self.prog,
            description=self.description,
            former_flags=self.former_flags,
        )
        completed = complete_flags(config.distribution, os.environ, _device_finder(config))
        config = replace(config, distribution=completed)
        self.validate(config)
        return config

    def _compare_sides(self, config: Any, arguments: Sequence[str], app: Application, supervised: Supervised) -> int:
        """The mode parity, whose other side is found good before either is computed."""
        flags: ParityFlags = config.parity
        self._parse([*arguments, *other_arguments(flags, Path("other"))])
        with recorded_side(flags, (sys.executable, *app.program, *arguments)) as recording:
            from gaudi_apps.runtime.session import Session
            from gaudi_apps.training.parity.mode import run_parity

            with Session(app, supervised, Commits()) as session:
                run_parity(session, flags, recording, as_json=config.run.json)
        return 0

    def start_ranks(self, config: Any, arguments: Sequence[str]) -> None:
        """Become the launcher of several processes, if the flags ask for them; else return.

        Args:
            config: validated flags.
            arguments: the command line that they are of.
        """
        command = (sys.executable, *self.program, *arguments)
        start_processes(config.distribution.to_distribution(), os.environ, _device_finder(config), command)

    def _train_round(self, config: Any, supervised: Supervised, commits: Commits) -> None:
        if commits.newest is not None:  # the run was cleaned before it
            config = replace(config, run=replace(config.run, clean=False))
        flags = config.distribution.to_distribution()
        app = self.open(config, find_distribution(flags, os.environ, _device_finder(config)))
        _compute("train", app, supervised, commits)

    def _find_distribution(self, mode: str, config: Any, arguments: Sequence[str]) -> Distribution:
        """Where this process stands among others; does not return where it becomes the launcher of several."""
        flags, find_device = config.distribution.to_distribution(), _device_finder(config)
        if mode in TOGETHER:
            if not is_launched(os.environ):
                self.start_ranks(config, arguments)
            return find_distribution(flags, os.environ, find_device)
        # The flags of a run serve for its other modes too, as from the configuration that it left.
        size = detect_rank(os.environ).size
        if size > 1 or (mode == "verify-resume" and flags.has_engine):
            raise FlagError(f"--mode {mode}: is for one process, and not for several that train together")
        return Distribution()


def drop_plan_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of the training that a plan is of."""
    kept: list[str] = []
    place = 0
    while place < len(arguments):
        argument, following = arguments[place], arguments[place + 1 : place + 2]
        word, place = split_word(argument), place + 1
        if word is not None and word.name == "mode":
            place += word.value is None
        elif word is not None and word.name == "json":
            place += read_switch(argument, word.value, following)[1]
        else:
            kept.append(argument)
    return kept


def _device_finder(config: Any) -> Callable[[], DeviceKind]:
    return lambda: choose_device(config.device.device, use_hpu=not config.device.no_hpu)


def _compute(mode: str, app: Application, supervised: Supervised, commits: Commits | None = None) -> int:
    # Imported here: help and plans need none of it.
    from gaudi_apps.runtime.session import Session
    from gaudi_apps.training.run import dry_run, open_training, run_evaluation

    with Session(app, supervised, commits or Commits()) as session:
        if mode == "train":
            with open_training(session) as trainer:
                trainer.fit()
        elif mode == "rehearse":
            dry_run(session)
        elif mode == "eval":
            run_evaluation(session)
        elif mode == "predict":
            app.predict(session.restore_selected)
        elif mode == "export":
            app.export(session.restore_selected)
    return 0
