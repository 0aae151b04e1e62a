"""Fixtures of the tests against the vendor's wheel, which only `nox -s gaudi_contract` runs.

Only the wheel's public Python API and TensorFlow's registries are used. Whatever loads its library runs in a process of
its own, because the library ends a process that asks it for a device that is not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

# Registers what the library brings, and goes on where loading ends for want of a driver.
LOAD = """
import json, sys
import tensorflow as tf
from habana_frameworks.tensorflow import load_habana_module
try:
    load_habana_module()
except AttributeError:
    pass
"""
REGISTRY = """
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import kernels
kinds = {}


def names(one):
    return [tf.dtypes.as_dtype(number).name for number in one.allowed_values.list.type]


for kernel in kernels.get_all_registered_kernels().kernel:
    if kernel.device_type == "HPU":
        types = {one.name: names(one) for one in kernel.constraint}
        kinds.setdefault(kernel.op, []).append(types)
listed = op_def_pb2.OpList()
listed.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
operations = {}
for one in listed.op:
    if one.name.startswith(("Habana", "Hpu")):
        operations[one.name] = {a.name: a.type for a in one.attr}
        operations[one.name]["types"] = [name for a in one.attr if a.name == "T" for name in names(a)]
print(json.dumps({"kernels": kinds, "operations": operations}))
"""


@pytest.fixture(scope="session")
def child() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python code in a new process; `loaded`: after the vendor's library."""

    def run(code: str, *, loaded: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", LOAD * loaded + code],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **environ},
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def registry(child: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    """List what the library registers without a driver: kernels for HPU with their types, and its operations."""
    done = child(REGISTRY, loaded=True)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content
