"""Errors have a kind, an exit status and fields; their text is message and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_distributed import errors
from gaudi_distributed.errors import ConfigurationError, RunEndedError


def test_fields_are_none_unless_given() -> None:
    error = ConfigurationError("is wrong")
    assert [error.flag, error.path, error.record, error.field, error.remedy] == [None] * 5
    assert str(error) == error.message == "is wrong"


def test_the_remedy_stands_behind_the_message() -> None:
    error = ConfigurationError("wrong", flag="--np", path=Path("a/b"), record="line 7", field="slots", remedy="fix it")
    assert str(error) == "wrong; fix it"
    assert (error.flag, error.path, error.record, error.field) == ("--np", "a/b", "line 7", "slots")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("ConfigurationError", 78),
        ("DeviceError", 78),
        ("FlagError", 64),
        ("MissingProgramError", 66),
        ("PeerLostError", 75),
        ("UnsafeError", 77),
    ],
)
def test_each_kind_has_an_exit_status(name: str, status: int) -> None:
    assert getattr(errors, name)("text").exit_status == status


def test_a_run_ends_with_the_status_of_its_rank() -> None:
    error = RunEndedError("rank 1 failed", 65)
    assert isinstance(error, ConfigurationError)
    assert (str(error), error.exit_status) == ("rank 1 failed", 65)
