from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gaudi_apps.mxnet.framework import EventsWriter
from gaudi_datasets.record_files import index_records, read_record


def read_events(folder: Path) -> list[Event]:
    (path,) = folder.iterdir()
    return [Event.FromString(read_record(place)) for place in index_records(path)]


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    with EventsWriter(tmp_path / "run") as writer:
        writer.write_hparams({"lr": 0.5, "mode": "train", "epochs": (1, 2)})
        writer.write(3, {"loss": 1.5, "AP": 0.25})
        writer.write(4, {"loss": 1.25})
    version, hparams, *points = read_events(tmp_path / "run")
    assert version.file_version == "brain.Event:2"
    found = [(one.step, {value.tag: value.simple_value for value in one.summary.value}) for one in points]
    assert found == [(3, {"loss": 1.5, "AP": 0.25}), (4, {"loss": 1.25})]
    content = hparams.summary.value[0].metadata.plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (start["lr"].number_value, start["epochs"].string_value) == (0.5, "(1, 2)")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    writer = EventsWriter(tmp_path)
    (path,) = tmp_path.iterdir()
    writer._file.close()
    writer._file = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left") as caught:
        writer.write(1, {"loss": 1.0})
    assert (caught.value.errno, os.fspath(path.parent)) == (errno.ENOSPC, str(tmp_path))
