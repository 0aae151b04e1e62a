"""From the command line to what a program does: flags, then the plan without TensorFlow, or a mode that computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from gaudi_apps.config_file import parse_config
from gaudi_apps.signals import interrupt_on_sigterm
from gaudi_datasets.program import run_program

if TYPE_CHECKING:
    from gaudi_apps.application import Application


@dataclass(frozen=True)
class Launch:
    """A program on the command line.

    Attributes:
        prog: its name.
        description: what stands at the top of its help text.
        config: the dataclass of its flags; its group `run` has the mode.
        validate: raises FlagError for a value that breaks a rule.
        print_plan: prints what training would do.
        open: makes the program of validated flags.
        mode_of: what is done by its flags.
    """

    prog: str
    description: str
    config: type[Any]
    validate: Callable[[Any], None]
    print_plan: Callable[[Any], None]
    open: Callable[[Any], Application]
    mode_of: Callable[[Any], str] = lambda config: str(config.run.mode)

    def main(self, argv: Sequence[str] | None = None) -> NoReturn:
        """Run it with the given arguments (those of the command line when None) and leave the process."""
        interrupt_on_sigterm()
        arguments = list(sys.argv[1:] if argv is None else argv)
        run_program(lambda: self._run(arguments), prog=self.prog, debug="--debug" in arguments)

    def _run(self, arguments: Sequence[str]) -> int:
        config = parse_config(self.config, arguments, prog=self.prog, description=self.description)
        self.validate(config)
        mode = self.mode_of(config)
        if mode == "plan":
            self.print_plan(config)
            return 0
        if mode == "verify-resume":
            from gaudi_apps.verify_resume import verify_resume

            return verify_resume(self.open(config))
        return _compute(mode, self.open(config))


def _compute(mode: str, app: Application) -> int:
    # Imported here: help and plans need none of it.
    from gaudi_apps.scoring import run_evaluation
    from gaudi_apps.session import Session
    from gaudi_apps.training import run_training

    session = Session(app)
    modes: dict[str, Callable[[], None]] = {
        "train": lambda: run_training(session),
        "eval": lambda: run_evaluation(session),
        "predict": lambda: app.predict(session.restore_selected),
        "export": lambda: app.export(session.restore_selected),
    }
    modes[mode]()
    return 0
