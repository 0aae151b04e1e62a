"""Without Horovod, one line says why and what to do; tests with it are in tests/scaleout."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from gaudi_distributed import ConfigurationError
from gaudi_distributed.comm import horovod_mxnet_engine
from gaudi_distributed.comm.horovod_engine import is_rank_lost, load_horovod


def pretend_tensorflow(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Stand for a TensorFlow of that version: the package is tested without the real one."""
    module = ModuleType("tensorflow")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    monkeypatch.setitem(sys.modules, "horovod", None)


@pytest.mark.parametrize("version", ["2.20.0", "2.21.0-rc1", "3.0.0"])
def test_tensorflow_that_horovod_cannot_be_built_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_tensorflow(monkeypatch, version)
    with pytest.raises(ConfigurationError) as caught:
        load_horovod()
    assert f"built for TensorFlow {version}" in str(caught.value)
    assert "--distribution_strategy multi_worker" in str(caught.value.remedy)


@pytest.mark.parametrize("version", ["2.15.1", "2.18.0"])
def test_horovod_that_is_not_there(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_tensorflow(monkeypatch, version)
    with pytest.raises(ConfigurationError, match="gaudi-run install-horovod") as caught:
        load_horovod()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 78


def test_horovod_for_mxnet_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ConfigurationError, match="gaudi-run install-horovod --with_mxnet"):
        horovod_mxnet_engine.load_horovod()


def test_loss_of_a_rank_is_told_by_the_kind_of_error() -> None:
    """Without the libraries, whose errors these are by name."""
    internal, operation = (type(name, (RuntimeError,), {}) for name in ("HorovodInternalError", "OpError"))
    unknown = type("UnknownError", (operation,), {})
    assert is_rank_lost(internal("peer is gone"))
    assert is_rank_lost(unknown("node HorovodAllreduce: connection reset"))
    assert not is_rank_lost(unknown("out of memory"))
    assert not is_rank_lost(ConfigurationError("does not work"))
