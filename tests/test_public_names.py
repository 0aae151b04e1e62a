"""Each package shows its public names and its version at the top, and costs little to import."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

PACKAGES = ("apps", "datasets", "distributed", "models", "ops")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_the_version_is_that_of_the_distribution(name: str) -> None:
    package = importlib.import_module(f"gaudi_{name}")
    assert package.__version__ == importlib.metadata.version(f"gaudi-{name}")
    assert {*getattr(package, "__all__", ()), "__version__"} <= set(dir(package))


@pytest.mark.parametrize("name", PACKAGES)
def test_importing_a_package_is_cheap(name: str) -> None:
    code = f"import sys, gaudi_{name}; print({{'tensorflow', 'mxnet', 'importlib.metadata'}} & set(sys.modules))"
    assert run(code) == "set()\n"


@pytest.mark.parametrize("name", PACKAGES)
def test_help_needs_no_tensorflow(name: str) -> None:
    shown = run(f"import sys; sys.modules['tensorflow'] = None; import gaudi_{name}; help(gaudi_{name})")
    assert importlib.metadata.version(f"gaudi-{name}") in shown
