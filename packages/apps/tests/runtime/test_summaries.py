from __future__ import annotations

import resource
from pathlib import Path

import pytest

from gaudi_apps.runtime.tensorflow import SummaryWriter


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
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


def test_a_folder_that_cannot_be_written_to_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file/run") as caught:
        SummaryWriter(tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)


def test_a_disk_that_is_full_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """Files of this process may have no more than 4096 bytes for a moment."""
    summaries = SummaryWriter(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            summaries.write(1, {f"scalar {number}": 1.0 for number in range(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path)
    assert "\n" not in str(caught.value)


def test_hyperparameters_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorflow.python.summary.summary_iterator import summary_iterator

    values = {"batch_size": 8, "base_lr": 3e-3, "deterministic": True, "data_dir": None, "lr_drop_epochs": (40.0, 50.0)}
    with SummaryWriter(tmp_path) as summaries:
        summaries.write_hparams(values)
        summaries.write(1, {"loss": 1.0})
    (path,) = tmp_path.iterdir()
    found = {}
    for event in summary_iterator(str(path)):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME:
                data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                for name, entry in data.session_start_info.hparams.items():
                    found[name] = getattr(entry, entry.WhichOneof("kind"))
    assert found == {**values, "data_dir": "None", "lr_drop_epochs": "(40.0, 50.0)"}
