from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_datasets.fetching.partial_files import PartialFile


def part_of(folder: Path, url: str = "http://x/y") -> PartialFile:
    return PartialFile(folder / "y.part", url)


def test_it_asks_for_the_rest_of_the_version_it_has(tmp_path: Path) -> None:
    part = part_of(tmp_path)
    assert part.range_headers(without_validator=True) == {}
    part.begin(etag='"a"', modified="Mon")
    with part.open() as file:
        file.write(b"12345")
    for each in (part, part_of(tmp_path)):
        assert each.size == 5
        assert each.range_headers(without_validator=False) == {"Range": "bytes=5-", "If-Range": '"a"'}
        assert each.is_of('"a"')
        assert each.is_of("")
        assert not each.is_of('"b"')
    assert part_of(tmp_path, "http://x/other").size == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("etag", "modified", "validator"), [('W/"a"', "Mon", "Mon"), ("", "Mon", "Mon"), ("", "", "")])
def test_without_a_strong_tag(etag: str, modified: str, validator: str, tmp_path: Path) -> None:
    part = part_of(tmp_path)
    part.begin(etag=etag, modified=modified)
    (tmp_path / "y.part").write_bytes(b"1")
    rest = {"Range": "bytes=1-"}
    assert part.range_headers(without_validator=False) == (rest | {"If-Range": validator} if validator else {})
    assert part.range_headers(without_validator=True) == (rest | {"If-Range": validator} if validator else rest)


def test_what_is_published_leaves_nothing_behind(tmp_path: Path) -> None:
    part = part_of(tmp_path)
    part.begin(etag="", modified="")
    (tmp_path / "y.part").write_bytes(b"1")
    part.publish(tmp_path / "y")
    assert [path.name for path in tmp_path.iterdir()] == ["y"]
