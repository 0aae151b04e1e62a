"""A plugin of pytest that skips what needs TensorFlow or MXNet, which are not there, and nothing else."""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module

import pytest

FRAMEWORKS = import_module("sitecustomize").FRAMEWORKS
REASON = "it needs a framework"


def _skip_where_missing() -> Generator[None, object, object]:
    try:
        return (yield)
    except ImportError as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or cause.name not in FRAMEWORKS:
            raise
        return pytest.skip(REASON)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test whose fixtures need a framework."""
    return (yield from _skip_where_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test that needs a framework."""
    return (yield from _skip_where_missing())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file whose imports need a framework."""
    report = yield
    lines = str(report.longrepr).splitlines()
    missing = {f"E   ModuleNotFoundError: No module named {name!r}" for name in FRAMEWORKS}
    if report.outcome == "failed" and any(line in missing for line in lines):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, REASON)
    return report
