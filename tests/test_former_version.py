"""Records, runs and exported models of a former version load, go on and evaluate to the figures that it found."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tools.former_fixtures import (
    FIGURES,
    FOLDER,
    KEPT_STEPS,
    PROGRAMS,
    find_export_figures,
    find_figures,
)

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src"))
KEPT: dict[str, Any] = json.loads((FOLDER / FIGURES).read_text(encoding="utf-8"))
# Another processor adds in another order.
RELATIVE, ABSOLUTE = 1e-4, 1e-6


def assert_close(found: Any, kept: Any) -> None:
    """Check that names are the same, and numbers but for rounding."""
    if isinstance(kept, dict):
        assert found.keys() == kept.keys()
        for name, value in kept.items():
            assert_close(found[name], value)
    else:
        assert found == pytest.approx(kept, rel=RELATIVE, abs=ABSOLUTE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a copy that a test may change."""
    shutil.copytree(FOLDER, tmp_path / "former")
    return tmp_path / "former"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_configuration_is_planned_as_it_was(
    program: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its file alone, which names data and steps."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"gaudi_apps.{program}").main(
            ["--config", f"{program}/config.yaml", "--mode", "plan", "--json"]
        )
    out, err = capsys.readouterr()
    assert not end.value.code, err
    assert json.loads(out)["total_steps"] == KEPT_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_evaluates_and_goes_on_as_it_did(program: str, folder: Path) -> None:
    assert_close(find_figures(program, folder, SOURCES), KEPT[program])


@pytest.mark.slow
def test_exported_models_answer_as_they_did(folder: Path) -> None:
    assert_close(find_export_figures(folder / "exports", folder / "data/coco/val/1.png"), KEPT["exports"])
