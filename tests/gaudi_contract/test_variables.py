"""The environment that we set for SynapseAI 1.14; each name and value has its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gaudi_distributed import choose_precision

Child = Callable[..., Any]

USER_GUIDE = "https://docs.habana.ai/en/latest/TensorFlow/Tensorflow_User_Guide/Runtime_Variables.html"
SSD = "https://github.com/HabanaAI/Model-References, TensorFlow/computer_vision/SSD_ResNet34/ssd.py"
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


def test_the_variable_of_a_ranks_module_has_the_wheels_name(child: Child) -> None:
    from gaudi_distributed.devices import habana as hccl

    done = child(
        "from habana_frameworks.tensorflow import multinode_helpers as helpers\n"
        "print(helpers.HLS_MODULE_ID_VAR, *helpers.SUPPORTED_HLS_TYPE)"
    )
    name, *kinds = done.stdout.split()
    assert name in hccl.module_environment(0, {})
    assert "HLS1" in kinds
