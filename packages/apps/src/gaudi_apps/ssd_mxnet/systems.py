"""The systems of the submission: what `--system` sets, as flags under all others.

Source: the DellEMC submission to MLPerf training v0.7, its configuration of each system.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from gaudi_datasets.errors import FlagError

# Images of a process and step, processes, processes of a machine, epochs of warm-up, rate (of 32 images), weight decay,
# threads that decode.
_NAMES = ("batch_size", "hvd_workers", "num_workers_per_hls", "lr_warmup_epochs", "lr", "weight_decay", "dali_workers")
SYSTEMS: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(_NAMES, values, strict=True))
    for name, values in {
        "DSS8440": (128, 8, 8, 5, 5.84e-3, 1.6e-4, 6),
        "C4140": (128, 4, 4, 5.25, 2.92e-3, 1.6e-4, 6),
        "2xC4140": (128, 8, 4, 5.25, 5.84e-3, 1.6e-4, 6),
        "4xC4140": (56, 16, 4, 5, 3.2e-3, 1.3e-4, 3),
    }.items()
}


def list_preset(argv: Sequence[str]) -> list[str]:
    """The flags that the last `--system` among some arguments stands for; none without it.

    Raises:
        FlagError: there is no such system.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--system", nargs="?")
    name = finder.parse_known_args(argv)[0].system
    if name is None:
        return []
    if name not in SYSTEMS:
        raise FlagError(f"--system {name}: must be one of {', '.join(SYSTEMS)}")
    return ["--use_horovod", *(word for flag, value in SYSTEMS[name].items() for word in (f"--{flag}", f"{value:g}"))]
