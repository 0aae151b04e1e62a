from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gaudi_datasets.documents import seal
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.records import record_sets
from gaudi_datasets.records.conversion import write_shards
from gaudi_datasets.records.record_sets import RecordKind, RecordSet, find_kind, read_manifest
from gaudi_datasets.records.tfrecords import encode_features, frame_record


def encode_number(index: int) -> tuple[bytes, str]:
    return str(index).encode(), ""


def write(folder: Path, count: int, shards: int, kind: str = "detection") -> None:
    manifest = {"kind": kind}
    write_shards(encode_number, count, folder, "val", manifest=manifest, fingerprint="", shards=shards, overwrite=True)


def write_bare(folder: Path, shards: Sequence[Sequence[bytes]]) -> None:
    """Shards without a manifest."""
    folder.mkdir(exist_ok=True)
    for number, contents in enumerate(shards):
        path = folder / f"val-{number:05d}-of-{len(shards):05d}"
        path.write_bytes(b"".join(map(frame_record, contents)))


def read_all(records: RecordSet) -> list[bytes]:
    return [records.read_record(index)[1] for index in range(len(records))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(count=st.integers(1, 40), shards=st.integers(1, 9))
def test_the_order_is_that_of_the_source_for_any_number_of_shards(tmp_path: Path, count: int, shards: int) -> None:
    write(tmp_path, count, shards)
    records = RecordSet(tmp_path, "val", kind="detection")
    assert read_all(records) == [str(number).encode() for number in range(count)]
    assert records.manifest is not None
    place, _ = records.read_record(count - 1)
    assert (place.path.name, place.number) == (
        f"val-{(count - 1) % shards:05d}-of-{shards:05d}.tfrecord",
        (count - 1) // shards,
    )


def test_shards_of_any_length_come_in_rounds(tmp_path: Path) -> None:
    write_bare(tmp_path, [[b"a0"], [], [b"c0", b"c1", b"c2"], [b"d0", b"d1"]])
    records = RecordSet(tmp_path, "val", kind="classification")
    assert records.manifest is None
    assert read_all(records) == [b"a0", b"c0", b"d0", b"c1", b"d1", b"c2"]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    write(tmp_path, 5, 2)
    path = tmp_path / "val-00001-of-00002.tfrecord"
    content = bytearray(path.read_bytes())
    content[12] ^= 1
    path.write_bytes(content)
    records = RecordSet(tmp_path, "val", kind="detection")
    assert records.read_record(0)[1] == b"0"
    with pytest.raises(DataError, match="record 0: its checksum is") as caught:
        records.read_record(1)
    assert str(caught.value.path).endswith("val-00001-of-00002.tfrecord")


def test_the_kind_must_be_the_one_needed(tmp_path: Path) -> None:
    write(tmp_path, 5, 2, "classification")
    with pytest.raises(DataError, match="classification records; detection") as caught:
        RecordSet(tmp_path, "val", kind="detection")
    assert str(caught.value.path).endswith("val.json")
    assert len(RecordSet(tmp_path, "val", kind="classification")) == 5


@pytest.mark.parametrize("kind", ["detection", "classification"])
def test_the_kind_is_found_by_the_manifest_or_the_first_record(tmp_path: Path, kind: RecordKind) -> None:
    write(tmp_path / "with", 2, 1, kind)
    assert find_kind(tmp_path / "with", "val") == kind
    name = "image/object/bbox/ymin" if kind == "detection" else "image/class/label"
    write_bare(tmp_path / "without", [[encode_features({name: ("float", [])})]])
    assert find_kind(tmp_path / "without", "val") == kind
    write_bare(tmp_path / "empty", [[]])
    with pytest.raises(DataError, match="are empty"):
        find_kind(tmp_path / "empty", "val")


def test_a_conversion_that_was_stopped_is_no_record_set(tmp_path: Path) -> None:
    write(tmp_path, 5, 2)
    (tmp_path / "val.json").unlink()
    assert len(RecordSet(tmp_path, "val", kind="detection")) == 5
    (tmp_path / ".unfinished-val").mkdir()
    with pytest.raises(DataError, match="split 'val' was stopped"):
        RecordSet(tmp_path, "val", kind="detection")


def test_the_fingerprint_is_of_the_records(tmp_path: Path) -> None:
    prints = []
    for name, count in (("a", 5), ("b", 5), ("c", 6)):
        write(tmp_path / name, count, 2)
        path = tmp_path / name / "val.json"
        path.write_text(
            json.dumps(seal({**json.loads(path.read_text()), "job": f"of files changed at another time {name}"}))
        )
        prints.append(RecordSet(tmp_path / name, "val", kind="detection").fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("contents", [(b"5", b"7", b"9"), (b"0", b"2", b"9"), (b"0", b"7", b"4")])
def test_a_replaced_shard_is_named(tmp_path: Path, contents: Sequence[bytes], has_index: bool) -> None:
    """Of the same size, and each of its records has the right checksum."""
    write(tmp_path, 5, 2)
    if not has_index:
        (tmp_path / "val.index").unlink()
    path = tmp_path / "val-00000-of-00002.tfrecord"
    size = path.stat().st_size
    path.write_bytes(b"".join(map(frame_record, contents)))
    assert path.stat().st_size == size
    if has_index and (contents[0], contents[-1]) == (b"0", b"4"):
        records = RecordSet(tmp_path, "val", kind="detection")  # a record between them is named when it is read
        with pytest.raises(DataError) as caught:
            read_all(records)
        assert (caught.value.path, caught.value.record) == (str(path), "record 1")
        return
    with pytest.raises(DataError) as caught:
        RecordSet(tmp_path, "val", kind="detection")
    assert (caught.value.path, caught.value.field) == (str(path), "crc32c")


@pytest.mark.parametrize(("count", "shards"), [(1, 1), (7, 3), (2, 5)])
def test_the_index_tells_what_the_shards_do(
    tmp_path: Path, count: int, shards: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, count, shards)
    with monkeypatch.context() as patch:
        patch.setattr(record_sets, "scan_records", None)  # it would be called for each shard
        indexed = RecordSet(tmp_path, "val", kind="detection")
    assert capsys.readouterr().err == ""
    (tmp_path / "val.index").unlink()
    scanned = RecordSet(tmp_path, "val", kind="detection")
    assert "val.index" in capsys.readouterr().err
    assert indexed._places.tolist() == scanned._places.tolist()
    assert (indexed.fingerprint, indexed.former_fingerprint) == (scanned.fingerprint, scanned.former_fingerprint)
    assert (read_all(indexed), indexed.list_files()) == (read_all(scanned), scanned.list_files())


@pytest.mark.costly
def test_an_index_that_is_not_of_these_shards_is_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits are flipped, it is cut, or it and the manifest tell of other lengths, which a reader might allocate."""
    write(tmp_path, 7, 3)
    index, manifest = tmp_path / "val.index", tmp_path / "val.json"
    good, told = index.read_bytes(), json.loads(manifest.read_text())
    expected = read_all(RecordSet(tmp_path, "val", kind="detection"))
    rows = np.frombuffer(good, "<i8").reshape(-1, 2)
    damaged = [good[: 16 * 6], good + bytes(16), b"", *(flip(good, bit) for bit in range(0, 8 * len(good), 7))]
    wrong = [(0, 0, 3), (0, 0, -1), (0, 0, 2**62), (1, 1, -1), (1, 1, 2**40)]
    damaged += [set_value(rows, *each).tobytes() for each in wrong]
    damaged.append(rows[::-1].tobytes())
    for content in damaged:
        for digest in (told["index"], hashlib.sha256(content).hexdigest()):
            index.write_bytes(content)
            manifest.write_text(json.dumps(seal({**told, "index": digest})))
            found, is_told = read_or_fault(tmp_path), "val.index" in capsys.readouterr().err
            if isinstance(found, DataError):
                # Somebody wrote a checksum of a record that only its reading shows to be wrong, and their own seal.
                assert (digest != told["index"], bool(found.record)) == (True, True)
            else:
                assert (found, is_told) == (expected, True)


@pytest.mark.parametrize("count", [-1, 2**62, 0, "7", None, True])
def test_a_number_of_records_is_not_believed(tmp_path: Path, count: object) -> None:
    write(tmp_path, 7, 3)
    manifest = tmp_path / "val.json"
    told = json.loads(manifest.read_text())
    told["shards"][1]["records"] = count
    manifest.write_text(json.dumps(seal(told)))
    assert len(RecordSet(tmp_path, "val", kind="detection")) == 7


def read_or_fault(folder: Path) -> list[bytes] | DataError:
    try:
        return read_all(RecordSet(folder, "val", kind="detection"))
    except DataError as error:
        return error


def flip(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def set_value(rows: npt.NDArray[np.int64], row: int, column: int, value: int) -> npt.NDArray[np.int64]:
    changed = rows.copy()
    changed[row, column] = value
    return changed


def test_a_record_that_is_replaced_later_is_named(tmp_path: Path) -> None:
    write(tmp_path, 5, 2)
    records = RecordSet(tmp_path, "val", kind="detection")
    path = tmp_path / "val-00000-of-00002.tfrecord"
    path.write_bytes(b"".join(frame_record(content) for content in (b"0", b"7", b"4")))
    assert records.read_record(0)[1] == b"0"
    with pytest.raises(DataError) as caught:
        records.read_record(2)
    assert (caught.value.path, caught.value.record) == (str(path), "record 1")


def test_a_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, 3, 2)
    path = tmp_path / "val.json"
    good = path.read_bytes()
    for position in range(0, len(good) * 8, 11):
        damaged = bytearray(good)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError):
            read_manifest(path, sorted(tmp_path.glob("val-*")))


def test_a_manifest_of_an_earlier_release_is_read_and_said_to_be_unchecked(tmp_path: Path) -> None:
    """Its records are those of today, so a run on them goes on after a new conversion."""
    write(tmp_path, 5, 2)
    path = tmp_path / "val.json"
    today = RecordSet(tmp_path, "val", kind="detection")
    manifest = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    path.write_text(json.dumps({**manifest, "version": 2}))
    earlier = RecordSet(tmp_path, "val", kind="detection")
    assert (today.unchecked, bool(earlier.unchecked)) == ("", True)
    assert earlier.fingerprint == today.fingerprint
    path.write_text(json.dumps({**manifest, "version": 3}))
    with pytest.raises(DataError) as caught:
        RecordSet(tmp_path, "val", kind="detection")
    assert caught.value.field == "sha256"


def test_records_without_a_manifest_are_told_apart_by_content(tmp_path: Path) -> None:
    found = []
    for content in (b"a", b"b"):
        write_bare(tmp_path, [[content], [b"same"]])
        found.append(RecordSet(tmp_path, "val", kind="detection"))
    assert found[0].former_fingerprint == found[1].former_fingerprint
    assert found[0].fingerprint != found[1].fingerprint
    names = sorted(found[0].list_files())
    assert [found[0].list_files()[name] == found[1].list_files()[name] for name in names] == [False, True]


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="has no records"):
        RecordSet(tmp_path, "val", kind="detection")
    write(tmp_path, 5, 2)
    path = tmp_path / "val.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(seal({**manifest, "kind": "another"})))
    with pytest.raises(DataError, match="does not tell"):
        RecordSet(tmp_path, "val", kind="detection")
    path.write_text("[]")
    with pytest.raises(DataError, match="is no manifest"):
        RecordSet(tmp_path, "val", kind="detection")
    (tmp_path / "val-00001-of-00002.tfrecord").unlink()
    with pytest.raises(MissingInputError, match="has 1 of 2 files"):
        RecordSet(tmp_path, "val", kind="detection")


def test_many_records_take_little_memory(tmp_path: Path) -> None:
    length = struct.pack("<Q", 0)

    def mask(content: bytes) -> bytes:
        crc = google_crc32c.value(content)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    (tmp_path / "val-00000-of-00001").write_bytes((length + mask(length) + mask(b"")) * 100_000)
    records = RecordSet(tmp_path, "val", kind="detection")
    assert len(records) == 100_000
    assert records.read_record(99_999)[1] == b""
    assert records._places.nbytes == 40 * 100_000


def test_a_manifest_without_a_checksum_of_a_shard_is_refused_with_an_index_too(tmp_path: Path) -> None:
    write(tmp_path, 7, 3)
    manifest = tmp_path / "val.json"
    told = json.loads(manifest.read_text())
    del told["shards"][1]["crc32c"]
    manifest.write_text(json.dumps(seal(told)))
    with pytest.raises(DataError) as caught:
        RecordSet(tmp_path, "val", kind="detection")
    assert caught.value.field == "crc32c"
