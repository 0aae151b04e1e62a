from __future__ import annotations

import sys
from types import ModuleType

import pytest
import tensorflow as tf

from gaudi_ops.tf import keras_api


@pytest.mark.parametrize("version", ["2.9.3", "2.15.1"])
def test_up_to_2_15_it_is_tf_keras(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "__version__", version)
    assert keras_api._choose_keras() is tf.keras


@pytest.mark.parametrize("version", ["2.16.0-rc1", "2.21.0", "3.0.0"])
def test_later_it_is_the_distribution_tf_keras(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keras_2 = ModuleType("tf_keras")
    monkeypatch.setattr(tf, "__version__", version)
    monkeypatch.setitem(sys.modules, "tf_keras", keras_2)
    assert keras_api._choose_keras() is keras_2


def test_later_without_it_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "__version__", "2.16.1")
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    with pytest.raises(ImportError, match=r"'gaudi-ops\[tensorflow\]'"):
        keras_api._choose_keras()


def test_what_is_chosen_is_keras_2() -> None:
    assert not hasattr(keras_api.keras, "ops")  # which Keras 3 brought
    assert hasattr(keras_api.keras.optimizers, "legacy")
