"""The notebooks run from their first cell to their last, and hold no output in the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["ops_in_your_model", "own_detector"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 4
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened by the variables that the notebooks read; files go into a folder of the test."""
    import nbclient
    import nbformat

    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("IMAGES", "16")
    monkeypatch.setenv("BACKBONE", "resnet18_quarter")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources)
    client.startup_timeout = 600  # a busy machine takes longer than its minute to start Python
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    if path.stem == "own_detector":
        pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
        (shown,) = (page for page in pages if "data:image/jpeg;base64," in page)  # the others are tables of the program
        assert len(shown) < 300_000
