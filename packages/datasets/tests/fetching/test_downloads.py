from __future__ import annotations

import email.utils
import hashlib
import random
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from gaudi_datasets.errors import DataError, MissingInputError, TransferError, UnsafeError
from gaudi_datasets.fetching.downloads import Download, Fetcher, PartialFile, Patience, is_web_address
from gaudi_ops.program import exit_status_of

# On a busy machine the server is silent for a while now and then: only what silence ends has a short bound for it.
QUICK = Patience(attempts=4, connect_seconds=600, silent_seconds=600, first_wait_seconds=0.005, longest_wait_seconds=5)


def download_of(server: Any, content: bytes, folder: Path, **options: Any) -> Download:
    options = {"sha256": hashlib.sha256(content).hexdigest(), **options}
    return Download(f"{server.url}/file", folder / "file", **options)


def fetch(download: Download, **options: Any) -> bool:
    return Fetcher(options.pop("patience", QUICK), **options).fetch(download)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_file_is_fetched_once(server: Any, report: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content)
    download = download_of(server, content, tmp_path / "new" / "folder", size=len(content))
    assert fetch(download, progress=report.transferred)
    assert download.path.read_bytes() == content
    assert names(download.path.parent) == ["file"]
    assert report.bytes[-1] == ("file", len(content), len(content))
    assert not fetch(download)
    assert len(server.requests) == 1


def test_cut_connections_are_resumed(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    cuts = [0, 100_000, 0, 0, 100_000, 50_000]
    server.add("/file", content, *map(faults.cut, cuts))
    assert fetch(download_of(server, content, tmp_path))
    assert (tmp_path / "file").read_bytes() == content
    starts = [asked for _, asked, _ in server.requests]
    assert starts == ["", "", *["bytes=100000-"] * 3, "bytes=200000-", "bytes=250000-"]
    assert {version for _, asked, version in server.requests if asked} == {'"1"'}
    assert names(tmp_path) == ["file"]


def test_another_run_resumes(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content, *[faults.cut(70_000)] + [faults.cut(0)] * 4)
    download = download_of(server, content, tmp_path)
    with pytest.raises(TransferError, match=r"\(4 times .*byte 70000") as caught:
        fetch(download)
    assert exit_status_of(caught.value) == 74
    assert names(tmp_path) == ["file.part", "file.part.json"]
    server.pages["/file"].faults.clear()
    server.requests.clear()
    assert fetch(download)
    assert server.requests == [("/file", "bytes=70000-", '"1"')]
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == content


def test_a_part_of_another_address_is_not_used(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"from elsewhere")
    (tmp_path / "file.part.json").write_text('{"url": "http://elsewhere/", "validator": ""}')
    server.add("/file", content)
    fetch(download_of(server, content, tmp_path))
    assert server.requests == [("/file", "", "")]


@pytest.mark.parametrize("state", ["", "[]", "nonsense", '{"url": 1}', '{"validator": 1}'])
def test_a_part_without_its_state_is_not_used(state: str, server: Any, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(content[:10])
    (tmp_path / "file.part.json").write_text(state)
    server.add("/file", content)
    fetch(download_of(server, content, tmp_path))
    assert server.requests == [("/file", "", "")]


def test_a_server_without_ranges_sends_all_again(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content, faults.cut(200_000), faults.cut(150_000), takes_ranges=False)
    assert fetch(download_of(server, content, tmp_path))
    assert (tmp_path / "file").read_bytes() == content


def test_a_server_without_ranges_that_always_cuts_is_given_up(
    server: Any, faults: Any, content: bytes, tmp_path: Path
) -> None:
    lengths = [200_000, 100_000, 199_000, 120_000, 150_000, 199_999]
    server.add("/file", content, *map(faults.cut, lengths), takes_ranges=False)
    with pytest.raises(TransferError, match="in a row"):
        fetch(download_of(server, content, tmp_path))
    assert len(server.requests) == 4


def test_a_file_that_changes_in_between_starts_anew(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    changed = content[::-1]
    server.add("/file", content, faults.cut(100_000), faults.becomes(changed, '"2"'))
    assert fetch(download_of(server, changed, tmp_path))
    assert (tmp_path / "file").read_bytes() == changed
    assert len(server.requests) == 2


def test_versions_are_not_mixed_where_only_the_content_is_checked(
    server: Any, faults: Any, content: bytes, tmp_path: Path
) -> None:
    seen: list[bytes] = []
    download = download_of(server, content, tmp_path, sha256="", check=lambda path: seen.append(path.read_bytes()))
    changed = content[::-1]

    def ignores_if_range(handler: Any, page: Any) -> None:
        page.content, page.etag = changed, '"2"'
        handler.headers.replace_header("If-Range", '"2"')
        handler.answer(page)

    server.add("/file", content, faults.cut(100_000), ignores_if_range)
    assert fetch(download)
    assert seen == [changed]


def test_without_a_version_and_a_checksum_nothing_is_resumed(
    server: Any, faults: Any, content: bytes, tmp_path: Path
) -> None:
    server.add("/file", content, faults.cut(100_000), etag="")
    assert fetch(download_of(server, content, tmp_path, sha256="", check=lambda path: None))
    assert [asked for _, asked, _ in server.requests] == ["", ""]


def test_with_a_checksum_it_is_resumed_without_a_version(
    server: Any, faults: Any, content: bytes, tmp_path: Path
) -> None:
    server.add("/file", content, faults.cut(100_000), etag='W/"weak"')
    assert fetch(download_of(server, content, tmp_path))
    assert server.requests[1] == ("/file", "bytes=100000-", "")


def test_wrong_bytes_are_fetched_again(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content, faults.wrong)
    assert fetch(download_of(server, content, tmp_path))
    assert (tmp_path / "file").read_bytes() == content


def test_wrong_bytes_again_are_an_error(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content, *[faults.wrong] * 9)
    with pytest.raises(DataError, match=r"/file: has SHA-256 [0-9a-f]{64}; [0-9a-f]{64} is expected \(2 times\)"):
        fetch(download_of(server, content, tmp_path))
    assert names(tmp_path) == []
    with pytest.raises(DataError, match="has 300000 bytes; 5 are"):
        fetch(download_of(server, content, tmp_path, size=5))
    with pytest.raises(DataError, match=r"300000 bytes; .* 1000"):
        fetch(download_of(server, content, tmp_path, most_bytes=1000))
    assert names(tmp_path) == []


def test_wrong_bytes_at_the_begin_are_found_after_resuming(
    server: Any, faults: Any, content: bytes, tmp_path: Path
) -> None:
    def wrong_and_cut(handler: Any, page: Any) -> None:
        handler.answer(type(page)(bytes(len(content))), sent=100_000)

    server.add("/file", content, wrong_and_cut)
    assert fetch(download_of(server, content, tmp_path))
    assert (tmp_path / "file").read_bytes() == content
    assert [asked for _, asked, _ in server.requests] == ["", "bytes=100000-", ""]


def test_a_slow_server_is_waited_for(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    arrived = threading.Semaphore(0)
    server.add("/file", content, faults.slow(2**15, arrived.acquire))
    assert fetch(download_of(server, content, tmp_path), progress=lambda *_: arrived.release())
    assert len(server.requests) == 1


def test_a_silent_server_is_asked_again(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    """Though the first request is never answered to its end; on a busy machine others may take too long, too."""
    page = server.add("/file", content, faults.silent(200_000))
    assert fetch(download_of(server, content, tmp_path), patience=replace(QUICK, attempts=1000, silent_seconds=0.5))
    assert page.faults == []
    assert len(server.requests) >= 2


class Waits(threading.Event):
    """Does not wait, but knows for how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


def test_a_busy_server_says_when(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content, faults.status(503, Retry_After="1"), faults.status(429))
    stop = Waits()
    assert fetch(download_of(server, content, tmp_path), stop=stop)
    asked, chosen = stop.seconds
    assert asked == 1
    assert chosen is not None
    assert 0.005 <= chosen <= 0.01
    date = email.utils.format_datetime(datetime.now(timezone.utc) + timedelta(hours=1), usegmt=True)
    server.add("/other", content, faults.status(503, Retry_After=date))
    with pytest.raises(TransferError, match=r"asks to wait 3[56]\d\d seconds"):
        fetch(Download(f"{server.url}/other", tmp_path / "other", "0" * 64))


def test_a_complete_part_is_published_without_fetching(server: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content)
    (tmp_path / "file.part").write_bytes(content)
    (tmp_path / "file.part.json").write_text(f'{{"url": "{server.url}/file", "validator": "\\"1\\""}}')
    assert fetch(download_of(server, content, tmp_path))
    assert server.requests == [("/file", f"bytes={len(content)}-", '"1"')]
    assert names(tmp_path) == ["file"]


def test_a_part_longer_than_the_file_is_thrown_away(server: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content)
    (tmp_path / "file.part").write_bytes(content + b"more")
    (tmp_path / "file.part.json").write_text(f'{{"url": "{server.url}/file", "validator": "\\"1\\""}}')
    assert fetch(download_of(server, content, tmp_path))
    assert (tmp_path / "file").read_bytes() == content


def test_an_empty_file_is_a_file(server: Any, tmp_path: Path) -> None:
    server.add("/file", b"")
    assert fetch(download_of(server, b"", tmp_path))
    assert (tmp_path / "file").read_bytes() == b""


def test_what_is_not_there_is_not_asked_for_again(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="the server answers 404") as caught:
        fetch(download_of(server, content, tmp_path))
    assert str(caught.value.path).endswith("/file")
    server.add("/file", content, faults.status(403))
    with pytest.raises(TransferError, match="answers 403 Forbidden"):
        fetch(download_of(server, content, tmp_path))
    assert len(server.requests) == 2


def test_redirects_lead_to_web_servers_only(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/there", content)
    server.add("/file", content, faults.status(302, Location="/there"), *[faults.status(302, Location="/file")] * 9)
    download = download_of(server, content, tmp_path)
    assert fetch(download)
    download.path.unlink()
    with pytest.raises(TransferError, match="Exceeded 5 redirects"):
        fetch(download)
    secret = tmp_path / "secret"
    secret.write_bytes(content)
    for address in (f"file://{secret}", "ftp://127.0.0.1/file", "gopher://x"):
        server.add("/file", content, faults.status(302, Location=address))
        with pytest.raises(TransferError, match="No connection adapters"):
            fetch(download)
    assert not download.path.exists()


def test_packed_content_is_refused(server: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content, headers={"Content-Encoding": "gzip"})
    with pytest.raises(TransferError, match="packs the content"):
        fetch(download_of(server, content, tmp_path))


def test_an_endless_answer_ends(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    chunk = b"2710\r\n" + bytes(10_000) + b"\r\n"
    endless = faults.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 100)
    server.add("/file", content, endless, endless)
    with pytest.raises(DataError, match="the 50000 bytes"):
        fetch(download_of(server, content, tmp_path, most_bytes=50_000))
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xfe nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nhello",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 7-11/12\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */0\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nRetry-After: soon\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nRetry-After: Mon, 01 Jan 2024 00:00:00 +99999999999999\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nhello",
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-4/"
        + b"9" * 5000
        + b"\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
def test_nonsense_answers_end_in_the_file_or_an_error(
    answer: bytes, server: Any, faults: Any, content: bytes, tmp_path: Path
) -> None:
    server.add("/file", content, faults.raw(answer))
    try:
        fetch(download_of(server, content, tmp_path))
    except TransferError:
        pass
    else:
        assert (tmp_path / "file").read_bytes() == content
    assert "file" not in names(tmp_path) or (tmp_path / "file").read_bytes() == content


@pytest.mark.costly
def test_any_order_of_faults_ends_in_the_verified_file(server: Any, faults: Any, tmp_path: Path) -> None:
    random_faults = random.Random(1)
    for number in range(60):
        content = random_faults.randbytes(random_faults.randint(0, 100_000))
        kinds = [
            faults.cut(random_faults.randint(0, 100_000)),
            faults.cut(random_faults.randint(0, 100_000)),
            faults.status(random_faults.choice([429, 500, 502, 503, 504])),
            faults.becomes(content, random_faults.choice(['"2"', ""])),
            random_faults.choice([faults.wrong, faults.slow(50_000), faults.cut(0)]),
        ]
        random_faults.shuffle(kinds)
        first = random_faults.choice([content, content[::-1]])
        server.add("/file", first, *kinds, takes_ranges=random_faults.random() < 0.7)
        download = download_of(server, content, tmp_path / str(number))
        patience = replace(QUICK, attempts=9, first_wait_seconds=0.0001, longest_wait_seconds=0.001)
        for _ in range(4):
            try:
                fetch(download, patience=patience)
                break
            except DataError:
                assert names(tmp_path / str(number)) == []
        assert download.path.read_bytes() == content
        assert names(tmp_path / str(number)) == ["file"]


def test_what_is_there_and_is_another_file_stays(server: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content)
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(UnsafeError, match="is there already") as caught:
        fetch(download_of(server, content, tmp_path))
    assert exit_status_of(caught.value) == 77
    assert (tmp_path / "file").read_bytes() == b"mine"
    (tmp_path / "file").unlink()
    (tmp_path / "file").symlink_to("/nowhere")
    with pytest.raises(UnsafeError):
        fetch(download_of(server, content, tmp_path))
    assert server.requests == []


def test_what_an_error_of_the_disk_left_beside_the_part_is_removed(server: Any, content: bytes, tmp_path: Path) -> None:
    server.add("/file", content)
    assert fetch(download_of(server, content, tmp_path))
    (tmp_path / "file.part.json").write_text("{}")
    assert not fetch(download_of(server, content, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_stop_keeps_the_part(server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    stop = threading.Event()

    def count(name: str, done: int, total: int | None) -> None:
        if done > 100_000:
            stop.set()

    server.add("/file", content)
    with pytest.raises(TransferError, match="stopped after 1"):
        fetch(download_of(server, content, tmp_path), stop=stop, progress=count)
    assert (tmp_path / "file.part").stat().st_size > 100_000


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(TransferError, match=r"127.0.0.1:1/x: the transfer failed \(.*refused\) \(4 times "):
        fetch(Download("http://127.0.0.1:1/x", tmp_path / "x", "0" * 64))


def test_a_full_disk_is_told_before(
    server: Any, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("/file", content)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(TransferError, match=r"300000 bytes .* 1000"):
        fetch(download_of(server, content, tmp_path))


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "ftp://x/y", "http://", "https:x", "http://[/", "http://a\nb"]
)
def test_only_web_addresses_are_asked(url: str, tmp_path: Path) -> None:
    assert not is_web_address(url)
    with pytest.raises(DataError, match="must begin with"):
        Download(url, tmp_path / "x", "0" * 64)
    with pytest.raises(ValueError, match="neither a SHA-256"):
        Download("https://x/y", tmp_path / "x")


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
