from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.costly
def test_no_tensorflow_is_imported() -> None:
    code = """
import importlib, pkgutil, sys
import gaudi_models.mxnet
for module in pkgutil.iter_modules(gaudi_models.mxnet.__path__):
    importlib.import_module(f"gaudi_models.mxnet.{module.name}")
print(sorted({"tensorflow", "keras", "gaudi_ops.tf", "gaudi_models.ssd"} & set(sys.modules)))
"""
    assert run(code) == "[]\n"


def test_without_mxnet_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["mxnet"] = None
import gaudi_models.weights
try:
    import gaudi_models.mxnet.ssd
except ImportError as error:
    print(error)
"""
    message = run(code)
    assert "not installed" in message
    assert "'gaudi-models[mxnet]'" in message


@pytest.mark.costly
def test_with_a_numpy_that_is_too_new_the_error_says_so() -> None:
    code = """
import numpy
def refuse(name):
    raise AttributeError(f"module 'numpy' has no attribute {name!r}")
numpy.__getattr__ = refuse  # NumPy 1.24 has nothing there of what was dropped
try:
    import gaudi_models.mxnet
except ImportError as error:
    print(error)
"""
    message = run(code)
    assert "'bool'" in message
    assert "'gaudi-models[mxnet]'" in message
