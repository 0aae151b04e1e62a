"""Files in a store are those that were sent, or an error says so; a lock there has one holder that lives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.remote.conftest import BUCKET, LISTS, SECRET, Bucket

from gaudi_datasets.errors import AccessError, DataError, GaudiError, MissingInputError, TransferError
from gaudi_datasets.fetching.downloads import Patience
from gaudi_datasets.fetching.uploads import StoreLock, WritableStore, parse_holder
from gaudi_ops.files import hash_file

URL = f"s3://{BUCKET}/folder"
SOON = Patience(attempts=3, silent_seconds=3, first_wait_seconds=0.01)


@pytest.fixture
def store(bucket: Bucket) -> WritableStore:
    return WritableStore(URL, SOON)


@pytest.fixture(params=[0, 1000, 2**24 + 1000], ids=["empty", "small", "large"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * (request.param // 250))
    return path


@pytest.mark.parametrize("faults", [(), ("stall",), ("503", "503", "spoil")])
def test_what_is_sent_arrives(
    bucket: Bucket, store: WritableStore, file: Path, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    bucket.aim("PUT", "a/b", *faults)
    store.upload("a/b", file)
    assert bucket.get("folder/a/b") == file.read_bytes()
    assert not bucket.aimed or not file.stat().st_size
    found = store.list_files()["a/b"]
    store.download("a/b", found.size, tmp_path / "new" / "copy", sha256=hash_file(file))
    assert (tmp_path / "new" / "copy").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("503", TransferError), ("spoil", TransferError), ("403", AccessError), ("expired", AccessError)],
)
def test_what_cannot_be_sent_is_named(
    bucket: Bucket, store: WritableStore, file: Path, fault: str, kind: type[GaudiError]
) -> None:
    file.write_bytes(file.read_bytes() or b"text")
    bucket.aim("PUT", "a/b", *[fault] * 9)  # more than tries: one whose answer comes late is sent again by itself
    with pytest.raises(kind) as caught:
        store.upload("a/b", file)
    assert (caught.value.path, caught.value.exit_status) == (f"{URL}/a/b", kind.exit_status)
    assert SECRET not in str(caught.value)


def test_a_file_that_is_gone_and_a_bucket_that_is(bucket: Bucket, store: WritableStore, file: Path) -> None:
    with pytest.raises(MissingInputError):
        WritableStore("s3://no-such-bucket/a", SOON).upload("b", file)
    with pytest.raises(MissingInputError):
        WritableStore("s3://no-such-bucket/a", SOON).list_files()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        store.upload("b", file)


def test_files_are_listed_and_removed(bucket: Bucket, store: WritableStore) -> None:
    assert store.list_files() == {}
    for key in ("folder/a", "folder/b/c", "folder/b/../../d", "folder/e/", "folder2/f"):
        bucket.put(key, b"text")
    assert set(store.list_files()) == {"a", "b/c"}
    before = store.list_files()
    store.write("a", b"other")
    after = store.list_files()
    assert [after[name].stamp == before[name].stamp for name in ("a", "b/c")] == [False, True]
    store.remove("a")
    store.remove("a")
    assert set(store.list_files()) == {"b/c"}


def test_a_list_that_lags_behind_is_asked_for_again(bucket: Bucket, store: WritableStore) -> None:
    bucket.remember()
    store.write("a", b"text")
    bucket.aim("GET", LISTS, "late")
    assert store.list_files() == {}
    bucket.aim("GET", LISTS, "late", "late")
    assert set(store.list_files("a")) == {"a"}
    bucket.aim("GET", LISTS, *["late"] * 99)
    with pytest.raises(TransferError):
        store.list_files("a")
    found = [store.find_file(name) for name in ("a", "b", "")]
    bucket.aimed.clear()
    assert found == [store.list_files()["a"], None, None]


@pytest.mark.parametrize("file", [1000, 2**24 + 1000], indirect=True)  # an empty one has no byte
def test_a_changed_byte_is_named(bucket: Bucket, store: WritableStore, file: Path, tmp_path: Path) -> None:
    store.upload("a", file)
    bucket.flip("folder/a")
    with pytest.raises(DataError) as caught:
        store.download("a", file.stat().st_size, tmp_path / "copy", sha256=hash_file(file))
    assert (caught.value.field, caught.value.path) == ("sha256", f"{URL}/a")
    assert not (tmp_path / "copy").exists()


def make_lock(store: WritableStore, holder: str) -> StoreLock:
    return StoreLock(store, "run.lock", holder, seconds=0.04)


def test_a_lock_has_one_holder(store: WritableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_lock(store, "one"), make_lock(store, "two")
    assert first.acquire(lambda _: None) is None
    assert first.renew()
    monkeypatch.setattr("gaudi_datasets.fetching.uploads.time.sleep", lambda _: first.renew())
    told: list[Mapping[str, Any]] = []
    holder = second.acquire(told.append)
    assert holder is not None
    assert holder["holder"] == told[0]["holder"] == "one"
    assert not second.renew()
    first.release()
    assert second.acquire(lambda _: None) is None
    first.release()
    assert second.renew()


def test_a_lock_that_is_not_renewed_is_taken_over(store: WritableStore, bucket: Bucket) -> None:
    first, second = make_lock(store, "one"), make_lock(store, "two")
    assert first.acquire(lambda _: None) is None
    assert second.acquire(lambda _: None) is None
    assert not first.renew()
    assert parse_holder(bucket.get("folder/run.lock"))["holder"] == "two"


def test_a_lock_of_a_former_process_here_is_taken_at_once(store: WritableStore) -> None:
    told: list[object] = []
    assert make_lock(store, "one").acquire(told.append) is None
    assert make_lock(store, "one").acquire(told.append) is None
    assert not told


@pytest.mark.parametrize("answer", ["cut", "503"])
def test_a_lock_whose_answer_was_lost_is_held(bucket: Bucket, store: WritableStore, answer: str) -> None:
    bucket.aim("PUT", "run.lock", answer)
    assert make_lock(store, "one").acquire(lambda _: None) is None
