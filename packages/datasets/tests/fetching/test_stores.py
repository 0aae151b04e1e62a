"""URLs are told from paths, refused where files of this machine are named, and never repeated with credentials."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gaudi_datasets.cli import parse_arguments
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import FlagError, MissingExtraError
from gaudi_datasets.fetching.stores import is_url, require_plain_url

SECRET = "a-secret-that-nothing-prints"


@pytest.mark.parametrize("url", ["s3://bucket/records", "gs://bucket", "memory://a", "simplecache::s3://bucket/a"])
def test_urls(url: str) -> None:
    assert is_url(url)
    require_plain_url(url)


@pytest.mark.parametrize(
    "path", ["records", "/data/records", "C:/records", "C:\\records", "a:b", "", None, Path("s3://b/r")]
)
def test_paths(path: str | Path | None) -> None:
    assert not is_url(path)


@pytest.mark.parametrize(
    "url",
    [f"s3://user:{SECRET}@bucket/a", f"s3://{SECRET}@bucket", f"https://host/a?token={SECRET}", f"s3://b/a#{SECRET}"],
)
def test_credentials_in_a_url(url: str) -> None:
    with pytest.raises(FlagError) as caught:
        require_plain_url(url, "--data_dir")
    assert caught.value.flag == "--data_dir"
    assert SECRET not in f"{caught.value} {caught.value.path}"


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError) as caught:
        RecordSource("s3://bucket/without-the-library", "train")
    assert caught.value.exit_status == 78


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (
            "convert coco --annotations a.json --images a --split train --output_dir s3://name:word@bucket/records",
            "--output_dir",
        ),
        (
            "convert coco --annotations s3://name:word@bucket/a.json --images a --split train --output_dir b",
            "--annotations",
        ),
        ("lint auto --data gs://bucket/data", "--data"),
        ("bench --data_dir s3://bucket/records", "--data_dir"),
        ("fetch weights resnet34 --output_dir s3://bucket/weights", "--output_dir"),
        ("lint records --data_dir records --records train --cache_gb 5", "--cache_gb"),
        ("show records --data_dir records --records train --output_dir a --cache_dir b", "--cache_dir"),
        ("lint records --data_dir s3://bucket/records --records train --cache_gb 0", "--cache_gb"),
    ],
)
def test_flags_that_take_no_url_or_need_one(command: str, flag: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse_arguments(command.split())
    assert flag in f"{caught.value.flag} {caught.value}"


def test_records_take_a_url() -> None:
    flags = "--data_dir s3://bucket/records --records train --cache_dir b --cache_gb 5"
    parse_arguments(["lint", "records", *flags.split()])
