"""The environment that we set for SynapseAI 1.14; each name and value has its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.classification.media_loading import DISTRIBUTION, MODULES, PCI_DEVICE, choose_media_loading
from gaudi_distributed import choose_precision

Child = Callable[..., Any]

USER_GUIDE = "https://docs.habana.ai/en/latest/TensorFlow/Tensorflow_User_Guide/Runtime_Variables.html"
SSD = "https://github.com/HabanaAI/Model-References, TensorFlow/computer_vision/SSD_ResNet34/ssd.py"
MEDIA = (
    "https://github.com/HabanaAI/Model-References, TensorFlow/computer_vision/common/imagenet_dataset.py at 2fcbbb39"
)
# A name, the value that we give it, and who says so.
VARIABLES = {
    "TF_BF16_CONVERSION": ("0", USER_GUIDE),  # 0: the conversion is off; its older name had ENABLE in it
    "TF_DONT_CLUSTER": ("add_1", SSD),
    "TF_RECIPE_CACHE_PATH": ("recipes", SSD),
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_we_set_what_is_documented_and_nothing_else(precision: str) -> None:
    chosen = choose_precision(precision, "hpu", recipe_cache="recipes", environ={})
    assert chosen.environment == {name: value for name, (value, _) in VARIABLES.items()}


def test_what_the_user_says_of_clusters_stays() -> None:
    environ = {"TF_DONT_CLUSTER": "mul_1"}
    assert "TF_DONT_CLUSTER" not in choose_precision("bf16", "hpu", environ=environ).environment


def test_the_media_loader_is_the_wheels_extra(child: Child) -> None:
    from importlib import metadata

    assert f"{DISTRIBUTION} ; extra == 'media'" in (metadata.requires("habana-tensorflow") or [])
    done = child("from habana_frameworks.tensorflow import media\nprint(hasattr(media, 'habana_imagenet_dataset'))")
    assert done.stdout.splitlines()[-1] == "True", done.stderr


def test_media_loading_is_off_beside_the_wheel_alone(tmp_path: Path) -> None:
    (tmp_path / PCI_DEVICE).parent.mkdir(parents=True)
    (tmp_path / PCI_DEVICE).write_text("0x1020\n")
    # The names are those that the vendor's program asks for: see MEDIA.
    assert MODULES == ("habana_frameworks.medialoaders", "habana_frameworks.mediapipe"), MEDIA
    assert not choose_media_loading("jpegs", {}, root=tmp_path).on_hardware


def test_the_variable_of_a_ranks_module_has_the_wheels_name(child: Child) -> None:
    from gaudi_distributed.devices import habana as hccl

    done = child(
        "from habana_frameworks.tensorflow import multinode_helpers as helpers\n"
        "print(helpers.HLS_MODULE_ID_VAR, *helpers.SUPPORTED_HLS_TYPE)"
    )
    name, *kinds = done.stdout.split()
    assert name in hccl.module_environment(0, {})
    assert set(hccl.SERVER_KINDS) <= set(kinds)
