from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gaudi_apps.detection.config import DataFlags, RunFlags, SSDConfig
from gaudi_apps.mxnet.config import SSDMXNetConfig
from gaudi_apps.resnet_train import ResNetConfig
from gaudi_apps.resnext_train import ResNeXtConfig
from gaudi_apps.runtime.session import hash_code, list_start_metadata
from gaudi_apps.runtime.tensorflow import TensorFlow
from gaudi_distributed.comm.opening import find_difference

CONFIGS = (SSDConfig(), ResNetConfig(), ResNeXtConfig(), SSDMXNetConfig())


def make_app(config: SSDConfig) -> Any:
    return SimpleNamespace(config=config, framework=TensorFlow())


def test_the_code_has_a_hash() -> None:
    assert len(hash_code()) == 64
    assert hash_code() == hash_code()


@pytest.mark.parametrize(
    ("other", "data", "named"),
    [
        (SSDConfig(data=DataFlags(data_dir="elsewhere")), "a", None),
        (SSDConfig(run=RunFlags(seed=1)), "a", "configuration.seed: rank 0: 0; rank 1: 1"),
        (SSDConfig(), "b", "data: "),
    ],
)
def test_what_ranks_must_have_in_common(other: SSDConfig, data: str, named: str | None) -> None:
    ranks = [list_start_metadata(make_app(SSDConfig()), "a"), list_start_metadata(make_app(other), data)]
    assert ranks[0]["device"] == ["CPU"]
    assert ranks[0]["precision"] == "fp32"
    assert {"tensorflow", "numpy"} <= ranks[0]["versions"].keys()
    error = find_difference(ranks)
    assert (error is None) if named is None else named in str(error)
