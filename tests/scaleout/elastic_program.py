"""resnet_train with a small network, of which one worker may be lost at a step, or at which workers wait for a change.

Arguments: a fault as JSON, {} for none, then those of the program. A fault has `step` and the number of a `worker` that
kills itself then; with `is_asked`, it gets SIGTERM instead, and begins the step after it when the launcher wants a
change. With worker 0, all say on the channel `told` that they begin the step, and go on when the launcher wants a
change. On the channel `looks` there is a line for each of its looks at the hosts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from failing_program import open_session  # type: ignore[import-not-found]

from gaudi_apps import resnet_train
from gaudi_apps.runtime.errors import FailureReporter
from gaudi_apps.runtime.session import Session
from gaudi_distributed.cluster.rendezvous import RendezvousClient


def main(fault: dict[str, Any], arguments: list[str]) -> None:
    Session.__init__ = open_session  # type: ignore[method-assign]
    FailureReporter.at = lambda self, step, phase, images=0: begin(fault, step, phase)  # type: ignore[method-assign]
    resnet_train.main(arguments)


def begin(fault: dict[str, Any], step: int, phase: str) -> None:
    """Return the state that a step begins with."""
    if phase != "step" or step != fault.get("step"):
        return
    is_chosen = int(os.environ["GAUDI_RUN_WORKER"]) == fault["worker"]
    if fault.pop("is_asked", False):
        fault.update({"step": step + 1, "waits": True})
        if is_chosen:
            os.kill(os.getpid(), signal.SIGTERM)
        return
    del fault["step"]
    if fault["worker"] == 0:
        Path(fault["told"]).write_text("begun\n")
        wait_for_change(fault)
    elif is_chosen and "waits" in fault:
        wait_for_change(fault)
    elif is_chosen:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_change(fault: dict[str, Any]) -> None:
    """Wait until the launcher wants other ranks."""
    client = RendezvousClient(os.environ)
    with Path(fault["looks"]).open() as looks:
        while not client.hosts_updated():
            looks.readline()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
