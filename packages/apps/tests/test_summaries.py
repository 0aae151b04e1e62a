from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_apps.summaries import SummaryWriter


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    from tensorflow.core.util import event_pb2
    from tensorflow.python.summary.summary_iterator import summary_iterator

    with SummaryWriter(tmp_path / "run") as summaries:
        summaries.write(3, {"loss": 1.5, "learning_rate": 0.25})
    (path,) = (tmp_path / "run").iterdir()
    events: list[event_pb2.Event] = list(summary_iterator(str(path)))
    found = {
        (event.step, value.tag): value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
        for event in events
        for value in event.summary.value
    }
    assert set(found) == {(3, "loss"), (3, "learning_rate")}
