"""Whether images are kept: every process of a machine keeps them, so each may take its part of the memory only."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gaudi_apps.inference.media import keep_if_it_fits
from gaudi_datasets.memory import SHARE_OF_FREE_MEMORY, measure_free_memory
from gaudi_datasets.sampling import InputOptions


@dataclass
class Sized:
    num_bytes: int


def test_processes_of_one_machine_share_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    quarter = Sized(int(SHARE_OF_FREE_MEMORY * measure_free_memory()) // 4)
    assert keep_if_it_fits(quarter, InputOptions(2), 1).cache_encoded
    assert not keep_if_it_fits(quarter, InputOptions(2), 16).cache_encoded
    assert len(capsys.readouterr().out.splitlines()) == 2
