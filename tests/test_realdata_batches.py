"""Evaluation on real photographs: every image once and the same figures, whatever the batch size."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get("REAL_DATA"), reason="REAL_DATA is unset; it must name the folder of real data"
    ),
]


EVALUATED = 8


@pytest.mark.parametrize(
    ("trained", "width", "images", "batch_sizes"),
    [("trained_on_blood_cells", 0.25, 72, (1, 4, 7)), ("trained_on_photographs", 1.0, 57, (1, 5, 8))],
    ids=["blood_cells", "photographs"],
)
def test_figures_do_not_depend_on_the_batch_size(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    trained: str,
    width: float,
    images: int,
    batch_sizes: tuple[int, ...],
) -> None:
    """They are those of one image at a time; other sizes divide the number of images, or leave some over.

    Eight images show it as well as all; the programs of the fixtures have evaluated all.
    """
    from gaudi_apps.detection.evaluator import DetectionEvaluator
    from gaudi_apps.training.checkpoint import CheckpointFolder
    from gaudi_apps.training.run_dir import RunFolder
    from gaudi_datasets.detection.sources import RecordSource
    from gaudi_datasets.sampling import InputOptions
    from gaudi_distributed import SingleProcess
    from gaudi_models.ssd import build_ssd

    run = request.getfixturevalue(trained)
    source = RecordSource(run.records, "val")
    model = build_ssd(len(source.categories) + 1, depth=18, width=width)
    tensors = CheckpointFolder(run.model_dir / "checkpoints").load_newest().tensors
    for variable in model.variables:
        variable.assign(tensors[variable.name.removesuffix(":0")])
    task = SimpleNamespace(model=model)
    figures = {}
    for batch_size in batch_sizes:
        evaluator = DetectionEvaluator(
            source,
            InputOptions(batch_size),
            RunFolder(tmp_path),
            source.categories,
            SingleProcess(),
            num_images=EVALUATED,
        )
        scores, _ = evaluator.join([evaluator.evaluate(task)])
        assert (scores.images, scores.images_total) == (EVALUATED, images)
        figures[batch_size] = {name: value for name, value in scores.figures.items() if value is not None}
    for batch_size in batch_sizes:
        assert figures[batch_size] == pytest.approx(figures[1], abs=1e-6), batch_size
