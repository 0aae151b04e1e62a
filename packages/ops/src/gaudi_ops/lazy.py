"""Load the public names of a package when they are first used, so that importing it costs little."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # is read when TensorFlow first logs


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
        else:
            with _start_tensorflow() if name in of_tensorflow else contextlib.nullcontext():
                module = importlib.import_module(f"{package}.{module_of[name] or name}")
            value = getattr(module, name) if module_of[name] else module
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        hidden = frozenset() if not of_tensorflow or _has_tensorflow() else frozenset(of_tensorflow)
        return sorted({*vars(sys.modules[package]), *module_of, "__version__"} - hidden)

    return get_attribute, list_names


def use_onednn() -> None:
    """Let TensorFlow use oneDNN, unless the user says otherwise or it is imported already.

    It leaves oneDNN off on processors without AVX512_VNNI and the like, where a step then takes about twice as long.
    """
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


@contextlib.contextmanager
def _start_tensorflow() -> Iterator[None]:
    """Let TensorFlow, where it is imported here, use oneDNN, and not tell of the processor; the user's level stays."""
    use_onednn()
    if "tensorflow" in sys.modules or _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "2"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


def _has_tensorflow() -> bool:
    """Find out if TensorFlow is installed, without importing it."""
    try:
        return find_spec("tensorflow") is not None
    except ImportError:
        return False
