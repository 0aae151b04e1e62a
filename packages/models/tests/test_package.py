from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import gaudi_models

WITHOUT_TENSORFLOW = "import sys; sys.modules['tensorflow'] = None\n"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_is_there() -> None:
    assert {name for name in gaudi_models.__all__ if getattr(gaudi_models, name, None) is None} == set()
    assert {*gaudi_models.__all__, "__version__"} <= set(dir(gaudi_models))
    assert gaudi_models.__version__ == importlib.metadata.version("gaudi-models")
    with pytest.raises(AttributeError) as caught:
        gaudi_models.nothing  # noqa: B018
    assert caught.value.name == "nothing"


def test_importing_loads_nothing_else() -> None:
    code = "import sys, gaudi_models; dir(gaudi_models)\n"
    code += "print({'numpy', 'tensorflow', 'importlib.metadata'} & set(sys.modules))"
    assert run(code) == "set()\n"


def test_help_works_without_tensorflow() -> None:
    shown = run(f"{WITHOUT_TENSORFLOW}import gaudi_models; print('build_ssd' in dir(gaudi_models)); help(gaudi_models)")
    assert shown.startswith("False\n")
    assert {name for name in ("read_weights", "CLASSIFIERS", "count_parameters") if name not in shown} == set()


def test_builders_without_tensorflow_name_the_extra() -> None:
    code = f"{WITHOUT_TENSORFLOW}import gaudi_models\ntry:\n    gaudi_models.build_ssd\n"
    assert "[tensorflow]" in run(f"{code}except ImportError as error:\n    print(error)")
