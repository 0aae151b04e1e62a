"""Processes of a machine keep encoded images only if all of them together fit into the memory."""

from __future__ import annotations

import pytest

from gaudi_apps.training.application import keep_if_it_fits
from gaudi_datasets.memory import SHARE_OF_FREE_MEMORY, measure_free_memory
from gaudi_datasets.sampling import InputOptions


def test_processes_of_one_machine_share_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    quarter = int(SHARE_OF_FREE_MEMORY * measure_free_memory()) // 4
    assert keep_if_it_fits(quarter, InputOptions(2), 1).cache_encoded
    assert not keep_if_it_fits(quarter, InputOptions(2), 16).cache_encoded
    assert len(capsys.readouterr().out.splitlines()) == 2
