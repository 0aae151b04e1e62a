"""One of the programs with an eighth of the channels: each layer of its network, and little to compute and to write.

Arguments: the name of the program, then its own.
"""

from __future__ import annotations

import importlib
import sys

from gaudi_models import architectures

SHARE = 8


def narrow() -> None:
    """Make all networks of this process narrow; to be called before one of their modules is imported."""
    names = vars(architectures)
    names["STEM_FILTERS"] //= SHARE
    names["STAGE_FILTERS"] = tuple(filters // SHARE for filters in names["STAGE_FILTERS"])
    names["SSD_EXTRA_LEVELS"] = tuple(
        (inner // SHARE, outer // SHARE, *rest) for inner, outer, *rest in names["SSD_EXTRA_LEVELS"]
    )


def main(name: str, arguments: list[str]) -> None:
    from gaudi_apps.cli.program import Program

    # What the program starts several ranks by.
    Program.module = property(lambda _: (__file__, name))  # type: ignore[method-assign,assignment]
    importlib.import_module(f"gaudi_apps.{name}").main(arguments)


if __name__ in ("__main__", "__mp_main__"):  # the latter where it validates in the background
    narrow()

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
