"""Run `gaudi-datasets` within the process of the tests."""

from __future__ import annotations

import sys

import pytest

from gaudi_datasets import cli


def run_command(*argv: object) -> int:
    """Run the program with some arguments, and return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gaudi-datasets", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code
