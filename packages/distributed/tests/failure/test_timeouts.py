from __future__ import annotations

import pytest

from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.failure import Timeouts, read_timeouts
from gaudi_distributed.launch.running import END_SECONDS, LEAVE_SECONDS


def test_defaults_end_a_run_within_a_minute() -> None:
    timeouts = read_timeouts({"GAUDI_RUN_STALL_SECONDS": ""})
    assert timeouts == Timeouts(join_seconds=301, start_seconds=7201, first_seconds=901)
    assert timeouts.stall_seconds + LEAVE_SECONDS + END_SECONDS < 60


def test_many_ranks_send_as_many_heartbeats_as_some_hundred() -> None:
    assert [read_timeouts({}, size).heartbeat_seconds for size in (1, 512, 1024)] == [1, 1, 2]
    assert read_timeouts({}, 8192).stall_seconds == 48
    with pytest.raises(ConfigurationError, match=r"at least 6"):
        read_timeouts({"GAUDI_RUN_STALL_SECONDS": "5"}, 1024)


def test_bounds_of_the_environment() -> None:
    timeouts = read_timeouts({"GAUDI_RUN_STALL_SECONDS": "300", "GAUDI_RUN_LEAVE_SECONDS": "1.5"})
    assert (timeouts.stall_seconds, timeouts.leave_seconds) == (300, 1.5)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e18", "x", "1 s"])
@pytest.mark.parametrize("name", ["GAUDI_RUN_STALL_SECONDS", "GAUDI_RUN_LEAVE_SECONDS"])
def test_no_number_of_seconds(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {text!r}, which is no"):
        read_timeouts({name: text})


def test_bound_that_no_sign_of_life_could_keep() -> None:
    with pytest.raises(ConfigurationError, match=r"STALL_SECONDS is 1; .* at least 3"):
        read_timeouts({"GAUDI_RUN_STALL_SECONDS": "1"})
