"""Pickles put together by hand, so that tests can say what no honest program would write."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Name:
    """A dotted name, as it stands in a pickle."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A call of a name; `state` is set on what it returns."""

    name: Name
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class Persistent:
    """A persistent id, which PyTorch's reader looks up."""

    identity: Any


# The pickler that is written in Python, so that what it writes can be changed; its methods have no types.
PythonPickler: Any = pickle._Pickler


class Assembler(PythonPickler):
    """Writes the three above as the opcodes they stand for, and all else as ever."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Name):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Call):
            self.save(obj.name)
            self.save(obj.arguments)
            self.write(pickle.REDUCE)
            if obj.state is not None:
                self.save(obj.state)
                self.write(pickle.BUILD)
        elif isinstance(obj, Persistent):
            self.save(obj.identity)
            self.write(pickle.BINPERSID)
        else:
            super().save(obj, save_persistent_id)


class Assembly:
    """Parts that a test puts pickles together with."""

    Name, Call, Persistent = Name, Call, Persistent

    def __call__(self, value: Any) -> bytes:
        file = io.BytesIO()
        Assembler(file, protocol=2).dump(value)
        return file.getvalue()


@pytest.fixture(scope="session")
def assembly() -> Callable[[Any], bytes]:
    return Assembly()


@pytest.fixture(scope="session")
def classifier() -> Callable[[str], Any]:
    """Return the function that builds a classifier as it is published once for all; no test changes one.

    The last ones are kept, which are those of the next file, too: all of them would take gigabytes.
    """
    from gaudi_models.classifiers import build_classifier

    return functools.lru_cache(maxsize=4)(build_classifier)


@pytest.fixture(scope="session")
def detector() -> Callable[[int], Any]:
    """Return the function that builds a detector of COCO's classes, of a depth, once for all; no test changes one."""
    from gaudi_models.ssd import build_ssd

    return functools.cache(lambda depth: build_ssd(81, depth=depth))


@pytest.fixture(scope="session")
def has_avx512() -> bool:
    """Return whether the processor has AVX-512; False where the system is not Linux."""
    about = Path("/proc/cpuinfo")
    return about.exists() and "avx512bw" in about.read_text().split()


@pytest.fixture(scope="session")
def bf16_kernels(has_avx512: bool) -> None:
    """Skip a test where MXNet has no kernels in bfloat16: on processors without AVX-512."""
    if not has_avx512:
        pytest.skip("MXNet's kernels in bfloat16 need AVX-512, which this processor lacks")
