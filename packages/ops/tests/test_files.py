from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_ops import files
from gaudi_ops.errors import DataError, UnsafeError
from gaudi_ops.files import (
    FileError,
    UnsafeFileError,
    hash_file,
    hold_lock,
    open_regular_file,
    publish_file,
    read_file,
    read_owner,
    read_text,
    remove_leftovers,
    staging_folder,
    write_atomically,
    write_file,
)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def link_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD: list[Callable[[Path], None]] = [make_pipe, make_socket, link_device]


@pytest.mark.parametrize("make", ODD)
@pytest.mark.posix
def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make(Path("x"))
    for read in (read_file, open_regular_file):
        with pytest.raises(FileError) as caught:
            read("x")
        assert isinstance(caught.value, DataError | OSError)
        assert (caught.value.exit_status, caught.value.path) == (65, "x")


def test_files_above_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(FileError, match=str(2**40)):
        read_file(path)
    with open_regular_file(path) as file:
        assert file.read(2) == b"\0\0"


@pytest.mark.parametrize("count", [0, 1, 2**16, 2**16 + 1, 300_000])
def test_files_are_read_to_their_end_however_few_bytes_the_system_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    content = os.urandom(count)
    (tmp_path / "x").write_bytes(content)
    assert read_file(tmp_path / "x") == content
    parts = [(0, 0), (0, count), (1, 70_001), (count, 5), (count + 5, 5), (70_000, 2 * count)]
    assert [read_file(tmp_path / "x", start=start, count=most) for start, most in parts] == [
        content[start : start + most] for start, most in parts
    ]
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: read(descriptor, min(size, 70_000)))
    assert read_file(tmp_path / "x") == content
    assert read_file(tmp_path / "x", start=1, count=200_000) == content[1:200_001]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_files_whose_size_is_not_told_are_read() -> None:
    assert read_file("/proc/self/status").startswith(b"Name:")


def test_an_error_of_reading_a_whole_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").touch()

    def fail(descriptor: int, size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(OSError, match="x") as caught:
        read_file(tmp_path / "x")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "x"))


def test_folders_and_missing_files_are_told_as_by_open(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        read_file(tmp_path / "x")
    assert caught.value.filename == str(tmp_path / "x")


def test_links_and_ends_of_lines_are_read_through(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes("é\r\nb\rc\n".encode())
    (tmp_path / "y").symlink_to("x")
    assert read_text(tmp_path / "y") == "é\nb\nc\n"


def link_to_a_file(path: Path) -> None:
    path.with_name("kept").write_text("kept")
    path.symlink_to("kept")


@pytest.mark.parametrize("make", [*ODD, link_to_a_file])
@pytest.mark.posix
def test_only_regular_files_are_written_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("x")
    make(path)
    Path("draft").write_text("new")
    before = path.lstat()
    writes: list[Callable[[], Any]] = [
        lambda: write_file(path, "new"),
        lambda: publish_file("draft", path),
        lambda: open_regular_file(path, "ab"),
        lambda: open_regular_file(path, "xb"),
    ]
    for write in writes:
        with pytest.raises(UnsafeFileError) as caught:
            write()
        assert isinstance(caught.value, UnsafeError | OSError)
        assert (caught.value.exit_status, caught.value.path) == (77, "x")
    assert os.path.samestat(path.lstat(), before)
    assert not Path("kept").exists() or Path("kept").read_text() == "kept"
    assert {each.name for each in Path().iterdir()} <= {"x", "draft", "kept"}


def test_no_file_is_opened_to_be_half_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="half written"):
        open_regular_file(tmp_path / "x", "wb")


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "x.txt"
    for content in ("one", "two"):
        with write_atomically(path, durable=durable) as file:
            file.write(content.encode())
            names = [each.name for each in tmp_path.iterdir()]
            assert len(names) == 1 + (content == "two")
    assert [each.name for each in tmp_path.iterdir()] == ["x.txt"]
    assert path.read_text() == "two"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_drafts_have_names_that_nobody_knows(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with write_atomically(tmp_path / "x", durable=False):
            names |= {each.name for each in tmp_path.iterdir()} - {"x"}
    assert len(names) == 3


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), FileError("gone")])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def fail() -> None:
        with write_atomically(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert path.read_text() == "old"


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_file(path, "a")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_file(path, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "a"


def test_an_error_names_the_file_and_not_its_draft(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_file(tmp_path / "no" / "x", "a")
    assert caught.value.filename == str(tmp_path / "no" / "x")
    with pytest.raises(FileNotFoundError) as caught, write_atomically(tmp_path / "x"):
        (tmp_path / "other").read_bytes()
    assert caught.value.filename == str(tmp_path / "other")


def test_what_is_renamed_out_stays(tmp_path: Path) -> None:
    output_dir = tmp_path / "a" / "b"
    with staging_folder(output_dir) as staging:
        assert (staging.parent, staging.stat().st_mode & 0o777) == (output_dir, 0o700)
        (staging / "x").write_text("x")
        (staging / "left").write_text("y")
        publish_file(staging / "x", output_dir / "x")
    assert [path.name for path in output_dir.iterdir()] == ["x"]


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with staging_folder(tmp_path / "a" / "b") as staging:
            (staging / "x").write_text("x")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    with staging_folder(tmp_path):
        pass
    assert tmp_path.is_dir()


def hold_drafts(folder: Path, held: Any) -> None:
    with write_atomically(folder / "x") as file, staging_folder(folder) as staging:
        file.write(b"x")
        file.flush()
        (staging / "x").write_text("x")
        held.set()
        signal.pause()


def test_drafts_are_removed_once_their_writer_is_dead(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    worker = context.Process(target=hold_drafts, args=(tmp_path, held))
    worker.start()
    assert held.wait(600)
    remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    worker.kill()
    worker.join()
    (tmp_path / ".unfinished-train").mkdir()  # shards, with which a conversion goes on
    write_file(tmp_path / "y", "y")  # the first one of this process here
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-train", "y"]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_draft_that_others_lock_first_is_given_up(
    is_removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who removes leftovers may meet a draft before its writer has locked it, and remove it at any moment after."""
    others = list[int]()

    def lock(descriptor: int) -> bool | None:
        if not others:
            (draft,) = tmp_path.iterdir()
            others.append(os.open(draft, os.O_RDWR))
            assert lock_file(others[0])
            if is_removed:
                draft.unlink()
        return lock_file(descriptor)

    lock_file = files._lock
    monkeypatch.setattr(files, "_cleaned", {tmp_path})
    monkeypatch.setattr(files, "_lock", lock)
    with write_atomically(tmp_path / "x") as file:
        for left in () if is_removed else sorted(tmp_path.iterdir()):
            if os.path.samestat(os.fstat(others[0]), left.lstat()):
                left.unlink()
        file.write(b"x")
    os.close(others[0])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"x"}


def test_a_folder_that_others_remove_before_it_is_open_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Path]()

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        make_folder(path, *arguments, **options)
        made.append(path)
        if len(made) == 1:
            path.rmdir()

    make_folder = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", mkdir)
    with files._make_draft(tmp_path, is_folder=True) as (draft, _):
        assert draft.is_dir()
        assert draft == made[1]
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_is_open_is_removed_or_renamed_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def require_closed(path: Any) -> None:
        opened = [os.fstat(int(each.name)) for each in Path("/proc/self/fd").iterdir() if each.exists()]
        if Path(path).exists() and any(os.path.samestat(Path(path).stat(), one) for one in opened):
            raise PermissionError(errno.EACCES, "it is open in a process", str(path))

    replace, unlink = os.replace, os.unlink

    def replace_closed(old: Any, new: Any) -> None:
        require_closed(old)
        require_closed(new)
        replace(old, new)

    def unlink_closed(path: Any, **where: Any) -> None:
        if not where:
            require_closed(path)
        unlink(path, **where)

    def unlink_path(path: Path, missing_ok: bool = False) -> None:
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            unlink_closed(path)

    monkeypatch.setattr(os, "replace", replace_closed)
    monkeypatch.setattr(os, "unlink", unlink_closed)
    # In Python 3.10 paths keep the function that os had when they were imported.
    monkeypatch.setattr(Path, "unlink", unlink_path)
    path = tmp_path / "x"
    with pytest.raises(PermissionError):
        write_file(path, "as elsewhere")
    for draft in list(tmp_path.iterdir()):
        unlink(draft)
    monkeypatch.setattr(files, "_WINDOWS", True)
    for content in ("new", "newer"):
        write_file(path, content)
    with staging_folder(tmp_path) as folder:
        (folder / "y").touch()
    with hold_lock(tmp_path / ".lock"):
        assert read_owner(tmp_path / ".lock")["process"] == os.getpid()
    assert ([each.name for each in tmp_path.iterdir()], path.read_text()) == (["x"], "newer")
    with (tmp_path / "kept").open("wb") as other, hold_lock(tmp_path / "kept"):
        assert other.fileno()  # another process has it open, and waits
    assert (tmp_path / "kept").exists()


def test_links_are_not_written_through_where_the_system_does_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_NO_LINK", 0)
    (tmp_path / "there").write_text("kept")
    (tmp_path / "link").symlink_to("there")
    for mode in ("ab", "xb"):
        with pytest.raises((UnsafeFileError, FileExistsError)):
            open_regular_file(tmp_path / "link", mode)
    assert (tmp_path / "there").read_text() == "kept"


def test_a_file_that_cannot_be_wrapped_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(LookupError):
        open_regular_file(tmp_path / "a", "r", encoding="none of Python's")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_is_read_and_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with open_regular_file(path, "rb+") as file:
        assert file.read(1) == b"a"
        file.write(b"B")
    assert path.read_bytes() == b"aBc"


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [  # RFC 1321, A.5, and FIPS 180-2, B.1
        ("md5", "900150983cd24fb0d6963f7d28e17f72"),
        ("sha256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    ],
)
def test_a_file_has_the_digest_of_its_content(tmp_path: Path, algorithm: str, digest: str) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert hash_file(tmp_path / "a", algorithm) == digest


def test_an_error_of_the_disk_names_what_is_not_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with (tmp_path / "a").open("wb") as file, pytest.raises(OSError) as raised:
        files.sync_file(file)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(tmp_path / "a"))
    with pytest.raises(OSError) as raised:
        files.sync_folder(tmp_path)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(tmp_path))


@pytest.mark.parametrize(
    ("mode", "options", "size"),
    [("rb", {}, 2), ("rb", {}, -1), ("r", {}, 2), ("rb", {"buffering": 0}, 2), ("rb", {"buffering": 0}, -1)],
)
def test_an_error_of_reading_names_the_file(tmp_path: Path, mode: str, options: dict[str, Any], size: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with open_regular_file(path, mode, **options) as file:
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, file.fileno())  # a folder cannot be read
        os.close(folder)
        with pytest.raises(IsADirectoryError) as raised:
            file.read(size)
    assert raised.value.filename == str(path)


def test_half_a_character_of_a_name_is_written_out(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "é \udcfe")
    assert (tmp_path / "a").read_bytes() == "é \\udcfe".encode()


def test_an_error_of_cutting_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with open_regular_file(path, "ab+", buffering=0) as file:
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, file.fileno())  # a folder cannot be cut
        os.close(folder)
        with pytest.raises(OSError) as raised:
            file.truncate(0)
    assert raised.value.filename == str(path)
