from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gaudi_datasets.errors import DataError
from gaudi_datasets.record_files import frame_record, index_records, read_record

CONTENTS = [b"first", b"", b"third record" * 100]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"".join(map(frame_record, CONTENTS)))
    return path


def test_a_record_is_framed_as_tensorflow_does() -> None:
    # what tf.io.TFRecordWriter writes
    assert frame_record(b"abc").hex() == "0300000000000000b099490e6162636e57f121"


def test_records_are_found_and_read(path: Path) -> None:
    places = index_records(path)
    assert [place.number for place in places] == [0, 1, 2]
    assert [read_record(place) for place in places] == CONTENTS


def test_tensorflow_reads_what_is_written(path: Path) -> None:
    import tensorflow as tf

    assert [content.numpy() for content in tf.data.TFRecordDataset(str(path))] == CONTENTS


def test_what_tensorflow_writes_is_read(tmp_path: Path) -> None:
    import tensorflow as tf

    path = tmp_path / "y.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for content in CONTENTS:
            writer.write(content)
    assert path.read_bytes() == b"".join(map(frame_record, CONTENTS))


def test_damage_in_the_content_is_named(path: Path) -> None:
    place = index_records(path)[2]
    damaged = bytearray(path.read_bytes())
    damaged[place.offset + 5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"x\.tfrecord: record 2: its checksum is wrong"):
        read_record(index_records(path)[2])


def test_what_is_no_record_file_is_named(path: Path) -> None:
    path.write_bytes(b"something else altogether")
    with pytest.raises(DataError, match=r"record 0: its header is wrong"):
        index_records(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.integers(1, 1300))
def test_a_file_cut_anywhere_is_refused_or_has_fewer_records(path: Path, cut: int) -> None:
    whole = b"".join(map(frame_record, CONTENTS))
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    with contextlib.suppress(DataError):  # cut within a record; else between two
        assert len(index_records(path)) < len(CONTENTS)
