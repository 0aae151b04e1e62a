"""Policies and environment variables are pure values; applying them is guarded."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from gaudi_distributed import ConfigurationError, Precision, apply_environment, choose_precision


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(("name", "policy"), [("fp32", "float32"), ("bf16", "mixed_bfloat16")])
def test_cpu_and_gpu_need_no_variables(device: str, name: str, policy: str) -> None:
    assert choose_precision(name, device, recipe_cache="unused", environ={}) == Precision(name, policy, {})  # type: ignore[arg-type]


def test_hpu_variables() -> None:
    precision = choose_precision("bf16", "hpu", recipe_cache="runs/recipes", environ={})
    assert precision.keras_policy == "mixed_bfloat16"
    assert precision.environment == {
        "TF_BF16_CONVERSION": "0",
        "TF_DONT_CLUSTER": "add_1",
        "TF_RECIPE_CACHE_PATH": "runs/recipes",
    }


def test_hpu_keeps_what_the_user_does_not_cluster() -> None:
    precision = choose_precision("fp32", "hpu", environ={"TF_DONT_CLUSTER": "mine"})
    assert precision.environment == {"TF_BF16_CONVERSION": "0"}


@pytest.mark.parametrize("variable", ["of/the/user", ""])
def test_the_environment_wins_over_the_recipe_cache_of_the_flag(variable: str) -> None:
    precision = choose_precision("fp32", "hpu", recipe_cache="a", environ={"TF_RECIPE_CACHE_PATH": variable})
    assert "TF_RECIPE_CACHE_PATH" not in precision.environment


@pytest.mark.parametrize("flag", [None, ""])
def test_there_may_be_no_recipe_cache(flag: str | None) -> None:
    assert "TF_RECIPE_CACHE_PATH" not in choose_precision("fp32", "hpu", recipe_cache=flag, environ={}).environment


def test_unknown_name() -> None:
    with pytest.raises(ConfigurationError, match="precision is 'fp8'") as caught:
        choose_precision("fp8", "cpu")
    assert caught.value.exit_status == 78


def test_applying_sets_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    environ = {"KEPT": "1", "CHANGED": "old"}
    apply_environment({"CHANGED": "new", "ADDED": "2"}, environ=environ)
    assert environ == {"KEPT": "1", "CHANGED": "new", "ADDED": "2"}


def test_applying_after_tensorflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    environ = {"SAME": "1"}
    apply_environment({"SAME": "1"}, environ=environ)
    with pytest.raises(ConfigurationError, match="TF_BF16_CONVERSION cannot"):
        apply_environment({"SAME": "1", "TF_BF16_CONVERSION": "0"}, environ=environ)
    assert environ == {"SAME": "1"}
