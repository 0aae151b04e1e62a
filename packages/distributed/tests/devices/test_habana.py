"""The vendor's module is loaded in one place, and its absence is one clear line."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from gaudi_distributed import DeviceError
from gaudi_distributed.devices.habana import load_habana, make_strategy


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "habana_frameworks", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(DeviceError, match="habana_frameworks is missing"):
        load_habana()
    with pytest.raises(DeviceError, match=r"or choose multi_worker"):
        make_strategy()


def test_the_module_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    package, module = ModuleType("habana_frameworks"), ModuleType("habana_frameworks.tensorflow")
    module.load_habana_module = lambda: calls.append("loaded")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    monkeypatch.setitem(sys.modules, "habana_frameworks.tensorflow", module)
    load_habana()
    assert calls == ["loaded"]


def test_what_does_not_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AttributeError("'split'\nis missing")

    package, module = ModuleType("habana_frameworks"), ModuleType("habana_frameworks.tensorflow")
    module.load_habana_module = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    monkeypatch.setitem(sys.modules, "habana_frameworks.tensorflow", module)
    with pytest.raises(DeviceError, match="does not load") as caught:
        load_habana()
    assert caught.value.flag == "--device"
    assert "(AttributeError: 'split' is missing)" in str(caught.value)
    assert "\n" not in str(caught.value)
