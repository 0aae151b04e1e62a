"""The wheel is there, the driver is not: that is one clear error, and the process lives."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

Child = Callable[..., Any]

pytestmark = pytest.mark.skipif(Path("/sys/class/accel/accel0").exists(), reason="this machine has an accelerator")


def test_the_versions_are_those_of_the_last_stack() -> None:
    assert metadata.version("habana-tensorflow") == "1.14.0.493"
    import tensorflow as tf

    assert tf.__version__ == "2.15.0"


@pytest.mark.parametrize("call", ["choose_device('hpu')", "open_device('hpu')"])
def test_no_driver_is_one_line_before_the_vendors_module_is_imported(child: Child, call: str) -> None:
    done = child(
        f"import sys\nfrom gaudi_distributed import DeviceError, choose_device, open_device\n"
        f"try:\n    {call}\nexcept DeviceError as error:\n    print(error.flag, error.path)\n"
        "assert 'habana_frameworks' not in sys.modules\n"
        "import tensorflow as tf\nprint(len(tf.config.list_physical_devices()))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["--device /sys/class/accel/accel0", "1"]


def test_a_driver_that_is_found_but_does_not_answer_is_one_line(child: Child) -> None:
    done = child(
        "from gaudi_distributed import DeviceError\nfrom gaudi_distributed.devices.habana import load_habana\n"
        "try:\n    load_habana()\nexcept DeviceError as error:\n    print(error.flag, type(error.__cause__).__name__)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "--device AttributeError"


def test_a_program_ends_with_78_and_one_line(child: Child, tmp_path: Path) -> None:
    done = child(
        "from gaudi_apps.ssd_train import main\n"
        "main('--device hpu --use_fake_data --steps 1 --batch_size 1 --model_dir'.split()"
        f" + [{str(tmp_path)!r}])"
    )
    assert done.returncode == 78, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "/sys/class/accel/accel0" in done.stderr


def test_why_we_look_first(child: Child) -> None:
    """Where this no longer aborts, looking before loading may go."""
    done = child("tf.config.list_physical_devices()\nprint('lives')", loaded=True)
    assert done.returncode < 0
    assert "lives" not in done.stdout


def test_our_environment_comes_before_tensorflow(child: Child) -> None:
    done = child(
        "import os\nfrom gaudi_distributed import apply_environment, choose_precision\n"
        "apply_environment(choose_precision('bf16', 'hpu', recipe_cache='recipes').environment)\n"
        "import json, tensorflow\nfrom habana_frameworks.tensorflow import load_habana_module\n"
        "try:\n    load_habana_module()\nexcept AttributeError:\n    pass\n"
        "print(json.dumps({name: os.environ[name] for name in ('TF_BF16_CONVERSION', 'TF_RECIPE_CACHE_PATH')}))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == '{"TF_BF16_CONVERSION": "0", "TF_RECIPE_CACHE_PATH": "recipes"}'
