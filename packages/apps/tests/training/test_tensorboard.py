from __future__ import annotations

import errno
import resource
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import api, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util import tensor_util

from gaudi_apps.training.reports import FILE_VERSION, SummaryWriter
from gaudi_datasets.records.tfrecords import index_records, read_record


def read_values(folder: Path) -> list[tuple[int, Any]]:
    """Read the steps and values of all files of a folder by TensorBoard's reader, in the order of their names."""
    events = [event for path in sorted(folder.iterdir()) for event in EventFileLoader(str(path)).Load()]
    return [(event.step, value) for event in events for value in event.summary.value]


def read_points(folder: Path) -> list[tuple[int, str, Any, np.dtype[Any], float]]:
    """Read step, name, metadata, dtype and value of each point."""
    points = []
    for step, value in read_values(folder):
        array = tensor_util.make_ndarray(value.tensor)
        points.append((step, value.tag, value.metadata, array.dtype, array.item()))
    return points


def test_points_are_those_of_tensorflows_writer(tmp_path: Path) -> None:
    points = [(3, {"loss": 1.5, "AP": 0.1}), (4, {"loss": float("inf"), "images_per_second": 12})]
    theirs = tf.summary.create_file_writer(str(tmp_path / "theirs"))
    with closing(SummaryWriter(tmp_path / "ours")) as ours, theirs.as_default():
        for step, scalars in points:
            ours.write(step, scalars)
            for name, scalar in scalars.items():
                tf.summary.scalar(name, scalar, step=step)
    theirs.close()
    assert read_points(tmp_path / "ours") == read_points(tmp_path / "theirs")
    assert [(step, name) for step, name, *_ in read_points(tmp_path / "ours")] == [
        (3, "loss"),
        (3, "AP"),
        (4, "loss"),
        (4, "images_per_second"),
    ]


def test_every_call_completes_the_file(tmp_path: Path) -> None:
    with closing(SummaryWriter(tmp_path)) as writer:
        (path,) = tmp_path.iterdir()
        for count in range(1, 4):
            events = [Event.FromString(read_record(place)) for place in index_records(path)]
            assert len(events) == count
            assert events[0].file_version == FILE_VERSION
            writer.write(count, {"loss": 1.0})


def test_a_process_that_opens_a_folder_twice_begins_another_file(tmp_path: Path) -> None:
    for step in (1, 2):
        with closing(SummaryWriter(tmp_path)) as writer:
            writer.write(step, {"loss": 1.0})
    assert [step for step, *_ in read_points(tmp_path)] == [1, 2]


def test_hyperparameters_are_those_of_tensorboards_writer(tmp_path: Path) -> None:
    values = {"batch_size": 8, "base_lr": 3e-3, "deterministic": True, "data_dir": None, "lr_drop_epochs": (40.0, 50.0)}
    shown = {**values, "data_dir": "None", "lr_drop_epochs": "(40.0, 50.0)"}
    theirs = tf.summary.create_file_writer(str(tmp_path / "theirs"))
    with closing(SummaryWriter(tmp_path / "ours")) as ours, theirs.as_default():
        ours.write_hparams(values)
        api.hparams(shown)
    theirs.close()
    found = []
    for name in ("ours", "theirs"):
        ((step, value),) = read_values(tmp_path / name)
        assert (step, value.metadata.plugin_data.plugin_name) == (0, metadata.PLUGIN_NAME)
        start = HParamsPluginData.FromString(value.metadata.plugin_data.content).session_start_info
        found.append(
            (start.group_name, {name: getattr(one, one.WhichOneof("kind")) for name, one in start.hparams.items()})
        )
    assert found[0] == found[1]
    assert found[0][1] == shown


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
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path))
    assert "\n" not in str(caught.value)
