"""Read zip and tar files as rows of members: what their headers announce, in the same words for both.

zipfile and tarfile read the formats. Here is what they let pass: a broken tar header taken for the end, headers that
ask for a read without bound, zip members that lie over each other.
"""

from __future__ import annotations

import contextlib
import gzip
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_ops.files import open_regular_file

try:
    from lzma import LZMAError
except ImportError:  # Python can be built without it
    LZMAError = zlib.error  # type: ignore[assignment,misc]

FILE, FOLDER = "a file", "a folder"
Handle: TypeAlias = tarfile.TarInfo | zipfile.ZipInfo

_LONGEST_READ = 2**20  # bytes
_ZIP_HEADER = 30  # bytes before the name of a member
_DAMAGE = (  # what zipfile, tarfile and gzip raise about bytes that are not what they should be
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    LZMAError,
    struct.error,
    EOFError,
    IndexError,
    NotImplementedError,
    OverflowError,
    RecursionError,
    ValueError,
)
_TAR_KINDS = {
    tarfile.REGTYPE: FILE,
    tarfile.AREGTYPE: FILE,
    tarfile.DIRTYPE: FOLDER,
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
_UNIX_KINDS = {
    0: FILE,
    stat.S_IFREG: FILE,
    stat.S_IFDIR: FOLDER,
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True)
class Member:
    """A member of an archive.

    Attributes:
        name: as the archive gives it; relative, with slashes, once it is checked.
        size: in bytes, unpacked.
        offset: where the content begins in the archive's file; None in a zip or tar.gz, which do not hold it as it is.
        kind: FILE, FOLDER, or in words what else it is.
        handle: what the library opens it by.
    """

    name: str
    size: int
    offset: int | None = None
    kind: str = FILE
    handle: Handle | None = field(default=None, compare=False)


@contextlib.contextmanager
def open_archive(path: Path, part: tuple[int, int] | None = None, *, called: str = "") -> Iterator[Archive]:
    """Open a zip, tar or tar.gz file, told apart by its first bytes, or the tar in a part (offset, size) of a file.

    `called` is what messages about damage begin with; the path when it is empty.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is no archive, cut off or damaged, also when that shows only while it is open.
    """
    if path.is_dir():
        raise DataError("is a folder", path=path, remedy="give a zip or tar file")
    if not path.exists():
        raise MissingInputError("there is no such archive", path=path, remedy="give the path of a zip or tar file")
    with contextlib.ExitStack() as stack, naming_damage(called or str(path)):
        file: IO[bytes] = stack.enter_context(open_regular_file(path))
        first_bytes = file.read(2)
        if part is not None:
            yield _Tar(_TarContent(file, *part), offset=part[0])
        elif first_bytes == b"PK":
            yield _Zip(stack.enter_context(zipfile.ZipFile(file)))
        elif first_bytes == b"\x1f\x8b":
            file.seek(0)
            yield _Tar(_TarContent(stack.enter_context(gzip.GzipFile(fileobj=file))), offset=None)
        else:
            yield _Tar(_TarContent(file), offset=0)


@contextlib.contextmanager
def naming_damage(called: str) -> Iterator[None]:
    """Turn what the libraries raise about damage into a DataError that begins with what is damaged."""
    try:
        yield
    except (DataError, UnsafeError):  # named already; the first is a ValueError too
        raise
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, _DAMAGE) and error.errno is not None:
            raise  # of the system; bz2's own have no number
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"is cut off, damaged or no zip or tar archive ({reason})",
            path=called,
            remedy="get it from its source again",
        ) from None


class _Zip:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def members(self) -> Iterator[Member]:
        """Yield its members in its order; nothing about them is checked."""
        infos = self._archive.infolist()
        # Those whose bytes reach into the next one's, or into the directory at the end.
        ordered = sorted(infos, key=lambda info: info.header_offset)
        limits = [info.header_offset for info in ordered[1:]] + [self._archive.start_dir]
        overlapping = {
            id(info)
            for info, limit in zip(ordered, limits, strict=True)
            if info.header_offset + _ZIP_HEADER + info.compress_size > limit
        }
        for info in infos:
            name = info.orig_filename  # `filename` is cut at a NUL
            kind = _UNIX_KINDS.get(stat.S_IFMT(info.external_attr >> 16), "of an unknown kind")
            if id(info) in overlapping:
                kind = "over the bytes of another member"
            elif info.flag_bits & 0x1:
                kind = "encrypted"
            elif kind == FILE and name.endswith("/"):
                kind = FOLDER
            elif kind == FOLDER and not name.endswith("/"):
                kind = "a folder without a slash at the end"
            yield Member(name, info.file_size, None, kind, info)

    def open(self, handle: Handle | None) -> IO[bytes]:
        """Open the content of the member of this handle."""
        if not isinstance(handle, zipfile.ZipInfo):
            raise TypeError(f"{handle} is of no zip file")
        if handle.header_offset < 0:  # which Python 3.13 seeks to, and gets an error as of a bad disk
            raise zipfile.BadZipFile(f"{handle.orig_filename!r} begins before the file does")
        return self._archive.open(handle)


class _Tar:
    def __init__(self, content: _TarContent, *, offset: int | None) -> None:
        self._content, self._offset = content, offset
        self._archive = tarfile.TarFile(fileobj=content, encoding="utf-8")  # type: ignore[arg-type]  # enough of a file
        self._is_empty = self._archive.offset == 0

    def members(self) -> Iterator[Member]:
        """Yield its members in its order; nothing about them is checked."""
        # Of an archive without members, Python 3.10 would look for the next one before its beginning.
        while not self._is_empty and (info := self._archive.next()) is not None:
            if info.size < 0:  # reading on would go backwards
                raise tarfile.ReadError(f"member {shorten(info.name)} has a size below 0")
            kind = _TAR_KINDS.get(info.type, "of an unknown kind")
            if info.sparse is not None:  # as a pax header says, whatever the type
                kind = "a sparse file"
            offset = None if self._offset is None else self._offset + info.offset_data
            yield Member(info.name, info.size, offset, kind, info)
        if self._content.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a broken header for the end
            raise tarfile.ReadError("it does not end with an empty block")

    def open(self, handle: Handle | None) -> IO[bytes]:
        """Open the content of the member of this handle."""
        content = self._archive.extractfile(handle) if isinstance(handle, tarfile.TarInfo) else None
        if content is None:
            raise TypeError(f"{handle} is no file of a tar")
        return content


Archive: TypeAlias = _Zip | _Tar


class _TarContent:
    """A part of a file for tarfile, which reads no more at once than a sound header can ask for."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, start: int = 0, size: int | None = None) -> None:
        self._file, self._start, self._size = file, start, size
        self._file.seek(start)
        self.last = b""  # what was read last

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LONGEST_READ:
            raise tarfile.ReadError(f"a header asks for {size} bytes at once")
        if self._size is not None:
            size = min(size, max(0, self._size - self.tell()))
        self.last = self._file.read(size)
        return self.last

    def seek(self, position: int) -> None:
        if position < 0:
            raise tarfile.ReadError("it has no first header")
        self._file.seek(self._start + position)

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seekable(self) -> bool:
        return True
