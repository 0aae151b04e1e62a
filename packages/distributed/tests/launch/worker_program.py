"""Be a worker of the tests: `python worker_program.py FOLDER`, as it reads from its channel in the folder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from gaudi_distributed.cluster.rendezvous import WORKER, RendezvousClient


def main() -> int:
    """Take part in rounds, whose ranks it tells, until it is told to end.

    Orders are ``done``, ``again N`` to end round N, ``end S`` with the status S or, below zero, a signal, ``look`` to
    see whether others wait to take part, ``leave`` as one that is asked to end, and ``save`` once all are to stop.
    """
    folder, worker = Path(sys.argv[1]), os.environ[WORKER]
    if os.environ["HOROVOD_HOSTNAME"] == os.environ.get("TF_TEST_BAD"):
        with (folder / "told").open("w") as told:
            told.write("bad host\n")
        return int(os.environ.get("TF_TEST_BAD_STATUS", "78"))
    if os.environ["HOROVOD_HOSTNAME"] == os.environ.get("TF_TEST_SILENT"):
        signal.pause()
    if "TF_TEST_MUTE" in os.environ:
        RendezvousClient._give_signs_of_life = lambda self: None  # type: ignore[method-assign]
    client, number = RendezvousClient(os.environ), 0
    with (folder / f"orders_{worker}").open() as orders, (folder / "told").open("w", buffering=1) as told:
        if "TF_TEST_PATIENT" in os.environ:
            asked = f"worker {worker} is asked\n".encode()
            # Not by `told`, which may be within a write of its own: that would be a reentrant call.
            signal.signal(signal.SIGTERM, lambda *_: os.write(told.fileno(), asked))
        while (variables := client.next_assignment()) is not None:
            number += 1
            rank, size = variables["HOROVOD_RANK"], variables["HOROVOD_SIZE"]
            told.write(f"worker {worker} in round {number}: rank {rank} of {size}\n")
            is_over = False
            while not is_over:
                order, _, argument = orders.readline().strip().partition(" ")
                if order == "done":
                    told.write(f"worker {worker} is done\n")
                    return 0
                if order == "end":
                    end(int(argument))
                if order in ("leave", "save"):
                    leave(client, told, saves=order == "save")
                if order == "again" and int(argument) == number and "TF_TEST_PATIENT" in os.environ:
                    told.write(f"worker {worker} waits\n")
                is_over = (order == "look" and client.hosts_updated()) or (order == "again" and int(argument) == number)
        told.write(f"worker {worker} leaves\n")
    return 0


def leave(client: RendezvousClient, told: TextIO, *, saves: bool) -> None:
    """Ask to leave, or ask until all are to stop, and end as one that has saved."""
    while client.leave() and saves:
        pass
    if saves:
        told.write(f"worker {os.environ[WORKER]} saves\n")
        sys.exit(75)


def end(status: int) -> None:
    """End with a status, or by a signal."""
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    # As our programs do, it ends by SIGTERM with what it has saved.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    sys.exit(main())
