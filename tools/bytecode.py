"""Give an environment of nox what Python has compiled in those of `make test`, where a file is the same one.

`python tools/bytecode.py .nox/slow`; `install` of the noxfile runs it. uv links the files of all environments to its
cache, and Python would compile them anew in each of them: for five seconds of a processor, mostly for TensorFlow.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Of the sessions of `make test` that import most.
COMPILED = ("tests-apps", "integration")


def main(environment: Path) -> None:
    """Link what the environments have compiled that stand beside one, of the same version of Python."""
    for own in environment.glob("lib/python*/site-packages"):
        for name in COMPILED:
            other = environment.with_name(name) / own.relative_to(environment)
            if other != own:
                link_compiled(other, own)


def link_compiled(other: Path, own: Path) -> None:
    """Link what is compiled in another folder of packages of files that are the same ones, where nothing is yet."""
    for compiled in other.rglob("*.pyc"):
        link = own / compiled.relative_to(other)
        source = compiled.parent.with_name(f"{compiled.name.partition('.')[0]}.py")
        twin = own / source.relative_to(other)
        if not link.exists() and twin.exists() and source.exists() and twin.samefile(source):
            link.parent.mkdir(exist_ok=True)
            os.link(compiled, link)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
