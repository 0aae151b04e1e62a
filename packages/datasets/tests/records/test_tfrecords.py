from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gaudi_datasets.errors import DataError
from gaudi_datasets.records.tfrecords import (
    ExampleFeatures,
    Kind,
    encode_features,
    frame_record,
    index_records,
    join_checksums,
    read_record,
    scan_records,
)

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.binary(max_size=400), max_size=9), min_size=1, max_size=4))
def test_checksums_of_files_follow_from_those_of_their_records(tmp_path: Path, files: list[list[bytes]]) -> None:
    scanned, expected = [], []
    for contents in files:
        framed = b"".join(map(frame_record, contents))
        (tmp_path / "x").write_bytes(framed)
        scanned.append((np.array(list(scan_records(tmp_path / "x")), np.int64).reshape(-1, 4), len(framed)))
        expected.append(google_crc32c.value(framed))
    assert join_checksums(scanned) == expected


def test_damage_in_the_content_is_named(path: Path) -> None:
    place = index_records(path)[2]
    damaged = bytearray(path.read_bytes())
    damaged[place.offset + 5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="record 2: its checksum is") as caught:
        read_record(index_records(path)[2])
    assert str(caught.value.path).endswith("x.tfrecord")


def test_what_is_no_record_file_is_named(path: Path) -> None:
    path.write_bytes(b"something else altogether")
    with pytest.raises(DataError, match="record 0: its header is"):
        index_records(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.integers(1, 1300))
def test_a_file_cut_anywhere_is_refused_or_has_fewer_records(path: Path, cut: int) -> None:
    whole = b"".join(map(frame_record, CONTENTS))
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    with contextlib.suppress(DataError):  # cut within a record; else between two
        assert len(index_records(path)) < len(CONTENTS)


LISTS: dict[Kind, Any] = {
    "bytes": st.lists(st.binary(max_size=50), max_size=3)
    | st.lists(st.binary(min_size=5000, max_size=9000), max_size=2),
    "int64": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    "float": st.lists(st.floats(width=32, allow_nan=False), max_size=4),
}
FEATURES = st.dictionaries(
    st.text(max_size=8), st.sampled_from(list(LISTS)).flatmap(lambda kind: st.tuples(st.just(kind), LISTS[kind]))
)


@given(FEATURES)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tensorflow_reads_what_is_encoded(features: dict[str, tuple[Kind, list[Any]]]) -> None:
    found = tf.train.Example.FromString(encode_features(features)).features.feature
    assert set(found) == set(features)
    for name, (kind, values) in features.items():
        assert found[name].WhichOneof("kind") == f"{kind}_list"
        assert list(getattr(found[name], f"{kind}_list").value) == values


@given(FEATURES)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_encoded_is_decoded(features: dict[str, tuple[Kind, list[Any]]]) -> None:
    content = encode_features(features)
    decoded = ExampleFeatures(content, "x")
    assert all(decoded.many(kind, name) == values for name, (kind, values) in features.items())
    assert content == encode_features(dict(reversed(features.items())))


@pytest.mark.parametrize("size", [4096, 4097, 16_300, 2_100_000])
def test_large_values_are_parsed_within_tensorflow(size: int) -> None:
    value = np.arange(size, dtype=np.uint8).tobytes()
    content = encode_features({"a": ("int64", [3]), "image": ("bytes", [value]), "z": ("bytes", [value])})
    kinds = {"a": tf.io.FixedLenFeature([], tf.int64)} | {
        name: tf.io.FixedLenFeature([], tf.string) for name in ("image", "z")
    }
    found = tf.io.parse_single_example(content, kinds)
    assert (found["a"].numpy(), found["image"].numpy(), found["z"].numpy()) == (3, value, value)


def test_what_tensorflow_writes_is_decoded() -> None:
    feature = {
        "a": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x" * 5000])),
        "b": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, -1])),
        "c": tf.train.Feature(),
    }
    content = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
    features = ExampleFeatures(content, "x")
    assert features.one("bytes", "a") == b"x" * 5000
    assert features.many("float", "b", 2) == [0.5, -1]
    assert features.many("int64", "c") == []
    assert features.many("int64", "d", 2, default=[1, 2]) == [1, 2]
    assert "a" in features
    assert "d" not in features


def test_faults_name_the_record_its_image_and_the_feature() -> None:
    content = encode_features({"image/filename": ("bytes", [b"a.jpg"]), "n": ("int64", [1, 2])})
    features = ExampleFeatures(content, "x.tfrecord: record 3")
    for kind, name, message in (
        ("int64", "m", "feature m: is missing"),
        ("int64", "n", "feature n: has 2 values"),
        ("float", "n", "feature n: is a int64_list"),
    ):
        with pytest.raises(DataError) as error:
            features.one(kind, name)  # type: ignore[arg-type]
        assert (error.value.record, error.value.field) == ("x.tfrecord: record 3 (image a.jpg)", name)
        assert f": {message}" in str(error.value)


@pytest.mark.parametrize("content", [b"no message", b"\x0a\x05\x0a\x03\x0a\x01\xff", b"\x0a\xff\xff\xff\xff\x0f"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(DataError, match=r"is no tf\.train\.Example") as caught:
        ExampleFeatures(content, "x")
    assert caught.value.record == "x"
