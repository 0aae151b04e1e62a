"""Hostile and broken archives, made byte by byte where the libraries refuse to make them: each named and refused."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gaudi_datasets.errors import DataError, UnsafeError
from gaudi_datasets.fetching.archives import extract, list_members
from gaudi_ops.program import describe_error, exit_status_of


@dataclass(frozen=True)
class Hostile:
    """Name and bytes of an archive, a part of the message, and the exit status."""

    id: str
    make: Callable[[], bytes]
    named: str
    status: int


def tar_bytes(*members: tuple[tarfile.TarInfo, bytes], end: bool = True) -> bytes:
    buffer = io.BytesIO()
    for info, content in members:
        buffer.write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        buffer.write(content + bytes(-len(content) % 512))
    return buffer.getvalue() + (bytes(1024) if end else b"")


def tar_member(
    name: str, content: bytes = b"x", *, kind: bytes = tarfile.REGTYPE, link: str = "", size: int | None = None
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(content) if size is None else size
    return info, content


def special(name: str, kind: bytes, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    return tar_member(name, b"", kind=kind, link=link)


GOOD = tar_member("good", b"good")


def tar_of(name: str) -> Callable[[], bytes]:
    return lambda: tar_bytes(GOOD, tar_member(name))


def zip_bytes(*members: tuple[str, bytes], mode: int = 0, packed: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        archive.writestr("good", b"good")
        for name, content in members:
            info = zipfile.ZipInfo("")
            info.filename = name  # past what the constructor makes of it
            info.external_attr = mode << 16
            info.compress_type = archive.compression
            archive.writestr(info, content)
    return buffer.getvalue()


def zip_of(name: str, mode: int = 0) -> Callable[[], bytes]:
    return lambda: zip_bytes((name, b"x"), mode=mode)


def patched(content: bytes, old: bytes, new: bytes) -> bytes:
    """Change bytes wherever they stand, in headers and directory."""
    if len(old) != len(new) or old not in content:
        raise AssertionError(f"{old!r} must be there, as long as {new!r}")
    return content.replace(old, new)


def pax_member(fields: dict[str, str], name: str = "x", content: bytes = b"x") -> bytes:
    """Make a tar whose second member has a pax header."""
    records = b""
    for key, value in fields.items():
        line = f" {key}={value}\n".encode()
        length = len(line) + 1
        while len(f"{length}".encode()) + len(line) != length:
            length += 1
        records += f"{length}".encode() + line
    header = tarfile.TarInfo("PaxHeaders/x")
    header.type, header.size = tarfile.XHDTYPE, len(records)
    return tar_bytes(GOOD, (header, records), tar_member(name, content))


def negative_size() -> bytes:
    info, content = tar_member("backwards")
    header = bytearray(info.tobuf())
    header[124:136] = struct.pack(">iq", -1, -1024)  # base 256, below 0
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return tar_bytes(GOOD, end=False) + bytes(header) + content + bytes(511) + bytes(1024)


def sparse_bomb() -> bytes:
    fields = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": "holes",
        "GNU.sparse.size": str(2**40),
        "GNU.sparse.map": "0,1",
    }
    return pax_member(fields)


def long_name_bomb() -> bytes:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**40
    return tar_bytes(GOOD, end=False) + info.tobuf() + bytes(2048)


def header_chain() -> bytes:
    return tar_bytes(GOOD, *[special("L", tarfile.XHDTYPE) for _ in range(5000)])


def overlapping_zip() -> bytes:
    """Two names for the bytes of one member."""
    content = zip_bytes(("one", b"x" * 100), ("two", b"x" * 100))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        places = {info.filename: info.header_offset for info in archive.infolist()}
        start = archive.start_dir
    directory = patched(
        content[start:], struct.pack("<L", places["two"]) + b"two", struct.pack("<L", places["one"]) + b"two"
    )
    return content[:start] + directory


def broken_content() -> bytes:
    content = zip_bytes(("broken.jpg", b"0123456789"))
    return patched(content, b"0123456789", b"0123456780")


def damaged_zip(method: int) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        archive.writestr("broken.jpg", bytes(range(256)) * 40)
    content = bytearray(packed.getvalue())
    content[60:80] = bytes(20)
    return bytes(content)


def encrypted_zip() -> bytes:
    content = bytearray(zip_bytes(("secret", b"x")))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.rindex(signature) + offset] |= 1
    return bytes(content)


HOSTILE = [
    Hostile("tar-parent", tar_of("../evil"), '"../evil"', 77),
    Hostile("tar-parent-inside", tar_of("a/../../evil"), '"a/../../evil"', 77),
    Hostile("tar-absolute", tar_of("/tmp/evil"), '"/tmp/evil"', 77),
    Hostile("tar-double-slash", tar_of("//evil"), '"//evil"', 77),
    Hostile("tar-backslash", tar_of("..\\evil"), '"..\\\\evil"', 77),
    Hostile("tar-drive", tar_of("C:evil"), '"C:evil"', 77),
    Hostile("tar-control-character", tar_of("evil\x1b[2J"), '"evil\\u001b[2J"', 77),
    Hostile("tar-newline", tar_of("evil\nok"), '"evil\\nok"', 77),
    Hostile("tar-direction-override", tar_of("gpj.\u202eexe"), '"gpj.\\u202eexe"', 77),
    Hostile("tar-not-utf-8", tar_of("evil\udcff"), '"evil\\udcff"', 77),
    Hostile("tar-long-name", tar_of("e" * 300), '"eeee', 77),
    Hostile("tar-deep-name", tar_of("/".join("d" * 1000)), '"d/d/', 77),
    Hostile("tar-empty-name", tar_of("./"), '"./"', 77),
    Hostile("tar-symbolic-link", lambda: tar_bytes(GOOD, special("link", tarfile.SYMTYPE, "/etc")), '"link"', 77),
    Hostile(
        "tar-through-link",
        lambda: tar_bytes(special("link", tarfile.SYMTYPE, ".."), tar_member("link/evil")),
        '"link"',
        77,
    ),
    Hostile("tar-hard-link", lambda: tar_bytes(GOOD, special("h", tarfile.LNKTYPE, "/etc/passwd")), '"h"', 77),
    Hostile("tar-hard-link-inside", lambda: tar_bytes(GOOD, special("h", tarfile.LNKTYPE, "good")), '"h"', 77),
    Hostile("tar-character-device", lambda: tar_bytes(GOOD, special("null", tarfile.CHRTYPE)), '"null"', 77),
    Hostile("tar-block-device", lambda: tar_bytes(GOOD, special("sda", tarfile.BLKTYPE)), '"sda"', 77),
    Hostile("tar-named-pipe", lambda: tar_bytes(GOOD, special("pipe", tarfile.FIFOTYPE)), '"pipe"', 77),
    Hostile("tar-unknown-kind", lambda: tar_bytes(GOOD, special("what", b"Z")), '"what"', 77),
    Hostile("tar-sparse-bomb", sparse_bomb, '"holes"', 77),
    Hostile("tar-pax-path", lambda: pax_member({"path": "../../evil"}), '"../../evil"', 77),
    Hostile("tar-twice", lambda: tar_bytes(GOOD, tar_member("a/b"), tar_member("a//b")), '"a//b"', 77),
    Hostile("tar-case", lambda: tar_bytes(tar_member("a/Readme"), tar_member("A/README")), '"A/README"', 77),
    Hostile("tar-accents", lambda: tar_bytes(tar_member("\u00e9"), tar_member("e\u0301")), '"e\\u0301"', 77),
    Hostile("tar-file-then-folder", lambda: tar_bytes(tar_member("a"), tar_member("a/b")), '"a/b"', 77),
    Hostile("tar-folder-then-file", lambda: tar_bytes(tar_member("a/b"), tar_member("A")), '"A"', 77),
    Hostile("tar-huge-member", lambda: tar_bytes(GOOD, tar_member("huge", size=2**41)), '"huge"', 77),
    Hostile("tar-gz-bomb", lambda: gzip.compress(tar_bytes(tar_member("zeros", bytes(2**22)))), '"zeros"', 77),
    Hostile("tar-negative-size", negative_size, '"backwards"', 65),
    Hostile("tar-long-name-bomb", long_name_bomb, "archive.bin", 65),
    Hostile("tar-negative-pax", lambda: pax_member({"size": "-1024"}), '"x"', 65),
    Hostile("tar-chain-of-headers", header_chain, "archive.bin", 65),
    Hostile("tar-cut-in-content", lambda: tar_bytes(tar_member("a", bytes(5000)))[:2000], "archive.bin", 65),
    Hostile("tar-cut-between-members", lambda: tar_bytes(GOOD, end=False), "archive.bin", 65),
    Hostile("tar-cut-in-header", lambda: tar_bytes(GOOD, GOOD)[:1300], "archive.bin", 65),
    Hostile("tar-broken-header", lambda: tar_bytes(GOOD, end=False) + b"\xff" * 512 + bytes(1024), "archive.bin", 65),
    Hostile("tar-gz-cut", lambda: gzip.compress(tar_bytes(GOOD))[:-20], "archive.bin", 65),
    Hostile("zip-parent", zip_of("../evil"), '"../evil"', 77),
    Hostile("zip-absolute", zip_of("/tmp/evil"), '"/tmp/evil"', 77),
    Hostile("zip-backslash", zip_of("..\\..\\evil"), '"..\\\\..\\\\evil"', 77),
    Hostile("zip-drive", zip_of("c:/evil"), '"c:/evil"', 77),
    Hostile("zip-nul", lambda: patched(zip_bytes(("ok.txt@", b"x")), b"ok.txt@", b"ok.txt\0"), '"ok.txt\\u0000"', 77),
    Hostile("zip-symbolic-link", zip_of("link", stat.S_IFLNK | 0o777), '"link"', 77),
    Hostile("zip-device", zip_of("null", stat.S_IFCHR | 0o666), '"null"', 77),
    Hostile("zip-named-pipe", zip_of("pipe", stat.S_IFIFO | 0o666), '"pipe"', 77),
    Hostile("zip-folder-as-file", zip_of("folder", stat.S_IFDIR | 0o755), '"folder"', 77),
    Hostile("zip-bomb", lambda: zip_bytes(("zeros", bytes(2**22)), packed=True), '"zeros"', 77),
    Hostile("zip-overlap", overlapping_zip, '"one"', 77),
    Hostile("zip-encrypted", encrypted_zip, '"secret"', 77),
    Hostile("zip-twice", lambda: patched(zip_bytes(("a", b"1"), ("b", b"2")), b"b", b"a"), '"a"', 77),
    Hostile("zip-broken-lzma", lambda: damaged_zip(zipfile.ZIP_LZMA), '"broken.jpg"', 65),
    Hostile("zip-broken-bzip2", lambda: damaged_zip(zipfile.ZIP_BZIP2), '"broken.jpg"', 65),
    Hostile("zip-broken-content", broken_content, '"broken.jpg"', 65),
    Hostile("zip-cut", lambda: zip_bytes(("a", b"1"))[:-30], "archive.bin", 65),
    Hostile("empty-file", lambda: b"", "archive.bin", 65),
    Hostile("zeros", lambda: bytes(512) + b"x", "archive.bin", 65),
    Hostile("no-archive", lambda: b"<html>not found</html>" * 99, "archive.bin", 65),
]


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.id)
def test_it_is_named_and_leaves_nothing(case: Hostile, tmp_path: Path) -> None:
    path, target = tmp_path / "given" / "archive.bin", tmp_path / "below" / "target"
    path.parent.mkdir()
    path.write_bytes(case.make())
    with pytest.raises((DataError, UnsafeError)) as caught:
        extract(path, target)
    message = describe_error(caught.value)
    assert exit_status_of(caught.value) == case.status, message
    assert str(path) in message
    assert case.named in message
    assert message.isprintable()
    assert [one for one in tmp_path.rglob("*") if not one.is_dir()] == [path]
    assert not target.exists()
    if not case.id.startswith("zip-broken-"):  # which shows only when it is read
        with pytest.raises(type(caught.value)):
            list_members(path)


def test_there_are_forty_of_them() -> None:
    assert len({case.id for case in HOSTILE}) == len(HOSTILE) >= 40
