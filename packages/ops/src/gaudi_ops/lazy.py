"""Load the public names of a package when they are first used, so that importing it costs little."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any


def make_lazy(
    package: str, modules: Mapping[str, Sequence[str]], *, of_tensorflow: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the functions `__getattr__` and `__dir__` of a package; `__version__` is that of its distribution.

    Args:
        package: its name.
        modules: the public names of each module of the package; those under ``""`` are modules themselves.
        of_tensorflow: names that need TensorFlow. `dir` lists them only where it is installed, because `help` reads
            every name that `dir` lists.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get_attribute(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value: Any = version(package.replace("_", "-"))
        elif name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        elif module_of[name]:
            value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        else:
            value = importlib.import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        hidden = frozenset() if not of_tensorflow or _has_tensorflow() else frozenset(of_tensorflow)
        return sorted({*vars(sys.modules[package]), *module_of, "__version__"} - hidden)

    return get_attribute, list_names


def _has_tensorflow() -> bool:
    """Find out if TensorFlow is installed, without importing it."""
    try:
        return find_spec("tensorflow") is not None
    except ImportError:
        return False
