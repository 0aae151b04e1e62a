"""Stores of other kinds than S3, for which fsspec has a library: a folder, as of a mounted disk, and memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.remote.conftest import open_scenes

from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.fetching.copies import fetch_copy, fetch_folder, upload_copy
from gaudi_datasets.fetching.stores import find_copy
from gaudi_datasets.records import remote_records


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"{request.param}://{tmp_path}/store"


def test_records(url: str, scenes: Path, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    annotations, images = open_scenes(scenes, "train").read()
    for shards in (2, 3, 3):
        write_records(annotations, images, url, "train", shards=shards, keep_empty=False, overwrite=shards == 3)
    assert fetch_folder(url, tmp_path / "fetched", lambda done, of: None) == 5
    for path in (tmp_path / "fetched").iterdir():
        assert path.read_bytes() == (records / path.name).read_bytes()
    local = RecordSource(records, "train")
    for room in (100.0, 1e-9):
        monkeypatch.setattr(remote_records, "_most_gb", room)
        remote_records._held.clear()  # as by processes that have ended
        stored = RecordSource(url, "train")
        stored.expect(np.arange(5))
        assert [stored.read(index).encoded for index in range(8)] == [local.read(index).encoded for index in range(8)]


def test_copies(url: str) -> None:
    written = find_copy(url, "outputs") / "folder"
    written.mkdir(parents=True)
    (written / "a.txt").write_text("text")
    upload_copy(url)
    assert fetch_copy(f"{url}/folder/a.txt").read_text() == "text"
    assert (fetch_copy(url) / "folder" / "a.txt").read_text() == "text"
    with pytest.raises(MissingInputError) as caught:
        fetch_copy(f"{url}/folder/b.txt")
    assert caught.value.path == f"{url}/folder/b.txt"
