"""A script for sbatch that runs gaudi-run inside the job it asks for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.presets import Accelerator

_OPTION = re.compile(r"--[a-z][a-z-]*(?:=[A-Za-z0-9_.,:;/%@+=\[\]&|*-]+)?", re.ASCII)
_TAKEN = ("--export", "--job-name", "--nodes", "--ntasks", "--ntasks-per-node", "--wrap")


@dataclass(frozen=True)
class SlurmJob:
    """What is asked of SLURM.

    Attributes:
        name: of the job.
        hosts: how many.
        slots: ranks on each.
        options: further options of sbatch, like "--time=02:00:00".
        forwarded: names of variables that the job gets from where it is submitted.

    Raises:
        FlagError: an option that does not look like one, or that is set from the launch already.
    """

    name: str
    hosts: int
    slots: int
    options: tuple[str, ...] = ()
    forwarded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in self.options:
            if _OPTION.fullmatch(option) is None:
                raise FlagError(f"--sbatch {option!r}: write it like --sbatch=--time=02:00:00, without blanks")
            if option.partition("=")[0] in _TAKEN:
                raise FlagError(f"--sbatch {option!r}: follows from the launch already; leave it out")


def write_slurm_script(job: SlurmJob, accelerator: Accelerator, inner: Sequence[str]) -> str:
    """Return the script; `inner` are gaudi-run's own arguments inside the job, which the shell gets quoted."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.hosts}",
        f"--ntasks-per-node={job.slots}",
        # Without it, all variables of whoever submits would be in the job.
        f"--export={','.join(job.forwarded) or 'NONE'}",
        *((f"--gpus-per-node={job.slots}",) if accelerator == "gpu" else ()),
        *job.options,
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "# gaudi-run takes hosts and slots from the variables of the job.",
        " \\\n    ".join(["exec", *map(shlex.quote, inner)]),
    ]
    return "\n".join(lines) + "\n"
