from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

import gaudi_ops

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_without(blocked: set[str], code: str) -> str:
    """Run code in a Python of its own in which some packages seem not to be installed; return what it prints."""
    program = BLOCKER.format(blocked=blocked) + code
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_numpy_half_works_without_tensorflow() -> None:
    code = "import gaudi_ops; print(gaudi_ops.decode_boxes(gaudi_ops.default_boxes() * 0).shape)"
    assert run_without({"tensorflow"}, code) == "(8732, 4)"


def test_star_import_works_without_tensorflow() -> None:
    assert (
        run_without({"tensorflow"}, "from gaudi_ops import *; print(iou([[0, 0, 1, 1]], [[0, 0, 1, 1]])[0, 0])")
        == "1.0"
    )


def test_schedules_work_without_numpy() -> None:
    code = "from gaudi_ops import schedules; print(schedules.cosine(2.0, 10)(5))"
    assert run_without({"tensorflow", "numpy"}, code) == "1.0"


def test_help_works_without_tensorflow() -> None:
    code = "import gaudi_ops; print('tf' in dir(gaudi_ops)); help(gaudi_ops)"
    shown = run_without({"tensorflow"}, code)
    assert shown.startswith("False\n")
    assert {name for name in gaudi_ops.__all__ if name not in shown} == set()


def test_version_is_that_of_the_distribution() -> None:
    assert gaudi_ops.__version__ == importlib.metadata.version("gaudi-ops")


@pytest.mark.parametrize("use", ["gaudi_ops.tf.topk_mask", "gaudi_ops.tf", "import gaudi_ops.tf.losses"])
def test_tensorflow_half_names_the_extra(use: str) -> None:
    code = f"import gaudi_ops\ntry:\n    {use}\nexcept ImportError as error:\n    print(error)"
    message = run_without({"tensorflow"}, code)
    assert "pip install 'gaudi-ops[tensorflow]'" in message
    assert "\n" not in message


def test_importing_loads_neither_numpy_nor_tensorflow() -> None:
    code = (
        "import sys, gaudi_ops; dir(gaudi_ops); print({'numpy', 'tensorflow', 'importlib.metadata'} & set(sys.modules))"
    )
    assert run_without(set(), code) == "set()"


USE = """
import os
import gaudi_ops

{use}
from tensorflow.python.util import _pywrap_util_port

print(os.environ["TF_ENABLE_ONEDNN_OPTS"], _pywrap_util_port.IsMklEnabled())
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("use", "given", "expected"),
    [
        ("gaudi_ops.tf", None, "1 True"),
        ("from gaudi_ops.tf import topk_mask", None, "1 True"),
        ("from gaudi_ops.tf import topk_mask", "0", "0 False"),
    ],
)
def test_tensorflow_uses_onednn_unless_the_user_says_no(use: str, given: str | None, expected: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    environ |= {} if given is None else {"TF_ENABLE_ONEDNN_OPTS": given}
    done = subprocess.run(
        [sys.executable, "-c", USE.format(use=use)], capture_output=True, text=True, env=environ, timeout=600
    )
    assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr


def test_every_public_name_is_there() -> None:
    assert {name for name in gaudi_ops.__all__ if getattr(gaudi_ops, name, None) is None} == set()
    assert {*gaudi_ops.__all__, "tf"} <= set(dir(gaudi_ops))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nothing'") as caught:
        gaudi_ops.nothing  # noqa: B018
    assert caught.value.name == "nothing"
