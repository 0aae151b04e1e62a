"""TensorFlow is an extra: without it the tests of its half are left out, and pytest's header says so."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("tensorflow") else ["tf"]


def pytest_report_header() -> str | None:
    return "gaudi-ops: no TensorFlow here, so tests/tf is left out" if collect_ignore else None
