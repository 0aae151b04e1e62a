"""resnet_train with a small network, whose steps take a while, and of which one worker may be lost.

Arguments: a fault as JSON, then those of the program. A fault has `step`, a `marker`, which is a file that is made
when a worker begins that step, and the number of a `worker` that kills itself then; 0: none does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from failing_program import open_session  # type: ignore[import-not-found]

from gaudi_apps import resnet_train
from gaudi_apps.session import Session
from gaudi_apps.supervised import Supervised

STEP_SECONDS = 0.2


def main(fault: dict[str, Any], arguments: list[str]) -> None:
    Session.__init__ = open_session  # type: ignore[method-assign]
    Supervised.at = lambda self, step, phase: begin(fault, step, phase)  # type: ignore[method-assign]
    resnet_train.main(arguments)


def begin(fault: dict[str, Any], step: int, phase: str) -> None:
    """What a step begins with."""
    if phase != "step":
        return
    time.sleep(STEP_SECONDS)
    if step == fault["step"]:
        Path(fault["marker"]).touch()
        if int(os.environ["GAUDI_RUN_WORKER"]) == fault["worker"]:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
