from __future__ import annotations

import gzip
import io
import random
import tarfile
import threading
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.archive_formats import Member
from gaudi_datasets.fetching.archives import Limits, check_inner_name, extract, fold_name, list_members
from gaudi_ops.program import describe_error, exit_status_of


def tar_member(name: str, content: bytes = b"", *, size: int | None = None) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content) if size is None else size
    return info, content


def tar_bytes(*members: tuple[tarfile.TarInfo, bytes], end: bool = True) -> bytes:
    blocks = [info.tobuf() + content + bytes(-len(content) % 512) for info, content in members]
    return b"".join(blocks) + (bytes(1024) if end else b"")


def zip_bytes(*members: tuple[str, bytes], packed: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in (("good", b"good"), *members):
            archive.writestr(name, content)
    return buffer.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_a_good_archive_is_unpacked(kind: str, tmp_path: Path) -> None:
    files = {"a/b.txt": b"1", "a/c/d.bin": random.Random(0).randbytes(2_500_000), "e": b"", "Ünï 1.jpg": b"2"}
    path = tmp_path / f"archive.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/", b"")
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        folder = tarfile.TarInfo("./a")
        folder.type = tarfile.DIRTYPE
        members = [tar_member(f"./{name}", content) for name, content in files.items()]
        content = tar_bytes((folder, b""), *members)
        path.write_bytes(gzip.compress(content) if kind == "tar.gz" else content)
    heard: list[tuple[int, int]] = []
    assert extract(path, tmp_path / "new" / "out", progress=lambda *numbers: heard.append(numbers)) == 4
    assert tree(tmp_path / "new") == {f"out/{name}": content for name, content in files.items()}
    total = sum(map(len, files.values()))
    assert heard[-1] == (total, total)
    assert [(one.name, one.size) for one in list_members(path)] == [(name, len(files[name])) for name in files]
    with pytest.raises(UnsafeError, match="is there already"):
        extract(path, tmp_path / "new" / "out")


def test_members_of_a_tar_in_a_tar_have_offsets_in_the_file(tmp_path: Path) -> None:
    inner = tar_bytes(tar_member("n01_1.JPEG", b"first"), tar_member("n01_2.JPEG", b"second" * 300))
    path = tmp_path / "outer.tar"
    path.write_bytes(tar_bytes(tar_member("x", b"1"), tar_member("n01.tar", inner), tar_member("y", b"2")))
    outer = list_members(path)
    assert [one.name for one in outer] == ["x", "n01.tar", "y"]
    found = list_members(path, within=outer[1])
    content = path.read_bytes()
    cut = [content[one.offset : (one.offset or 0) + one.size] for one in found]
    assert cut == [b"first", b"second" * 300]
    with pytest.raises(DataError, match="is cut off") as caught:
        list_members(path, within=outer[2])
    assert str(caught.value.path).endswith("outer.tar: y")
    with pytest.raises(DataError, match=r"outer.tar: z: is packed"):
        list_members(path, within=Member("z", 3))


def test_an_inner_tar_ends_where_its_member_ends(tmp_path: Path) -> None:
    inner = tar_bytes(tar_member("a", b"1"), end=False)
    path = tmp_path / "outer.tar"
    path.write_bytes(tar_bytes(tar_member("cut.tar", inner), tar_member("b", b"2")))
    with pytest.raises(DataError, match=r"cut\.tar: is cut off"):
        list_members(path, within=list_members(path)[0])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(members=2), '"c" is one more'),
        (Limits(member_bytes=9), '"b" has 10 bytes'),
        (Limits(total_bytes=20), '"c" makes it 21 bytes'),
    ],
)
def test_limits_name_the_member_that_passes_them(limits: Limits, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(tar_member("a", b"1"), tar_member("b", b"1" * 10), tar_member("c", b"1" * 10)))
    with pytest.raises(UnsafeError, match=message):
        list_members(path, limits)
    assert len(list_members(path, Limits(members=3, member_bytes=10, total_bytes=21))) == 3


def test_a_folder_of_the_archive_becomes_the_target(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("val2017/1.jpg", b"1")
    assert extract(path, tmp_path / "val2017", folder="val2017") == 1
    assert (tmp_path / "val2017" / "1.jpg").read_bytes() == b"1"
    path.write_bytes(zip_bytes(("val2017/1.jpg", b"1")))
    with pytest.raises(DataError, match='member "good" is not in val2017/'):
        extract(path, tmp_path / "other", folder="val2017")


def test_what_a_killed_run_left_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(zip_bytes())
    (tmp_path / ".unfinished-out").mkdir()
    (tmp_path / ".unfinished-out" / "half").write_bytes(b"half")
    extract(path, tmp_path / "out")
    assert tree(tmp_path) == {"a.zip": path.read_bytes(), "out/good": b"good"}


def test_of_two_at_once_one_unpacks(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(zip_bytes(("big", bytes(10_000))))
    ends: list[object] = []

    def work() -> None:
        try:
            ends.append(extract(path, tmp_path / "out"))
        except UnsafeError:
            ends.append("there already")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends, key=str) == [2, "there already", "there already", "there already"]
    assert set(tree(tmp_path)) == {"a.zip", "out/good", "out/big"}


def test_a_disk_that_is_too_small_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(zip_bytes(("big", bytes(1000))))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1003})())
    with pytest.raises(OSError, match="needs 1004 bytes") as caught:
        extract(path, tmp_path / "out")
    assert describe_error(caught.value).startswith(str(path))
    assert exit_status_of(caught.value) == 74


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="there is no"):
        list_members(tmp_path / "none.tar")
    with pytest.raises(DataError, match="is a folder"):
        extract(tmp_path, tmp_path / "out")


@pytest.mark.costly
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), packed=st.booleans(), as_zip=st.booleans())
def test_damage_anywhere_is_a_named_error_or_harmless(
    data: st.DataObject, packed: bool, as_zip: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    members = [tar_member("a/1.jpg", b"1" * 600), tar_member("b", b"2" * 10)]
    whole = zip_bytes(("a/1.jpg", b"1" * 600), packed=packed) if as_zip else tar_bytes(*members)
    if packed and not as_zip:
        whole = gzip.compress(whole)
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    path = folder / "archive"
    path.write_bytes(bytes(broken[: data.draw(st.integers(0, len(broken)))]))
    message = str(path)
    try:
        extract(path, folder / "out")
    except (DataError, UnsafeError) as error:
        message = str(error)
    assert str(path) in message
    assert (folder / "out").exists() == (message == str(path))
    assert {name.split("/")[0] for name in tree(folder)} <= {"archive", "out"}


def test_headers_are_read_without_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        info, _ = tar_member("zeros", size=2**30)
        file.write(info.tobuf())
        file.seek(2**30, io.SEEK_CUR)
        file.write(bytes(1024))
    assert list_members(path) == [Member("zeros", 2**30, 512)]


@pytest.mark.parametrize(
    ("name", "inner"), [("a", "a"), ("./a//b/", "a/b"), ("a b/ü.jpg", "a b/ü.jpg"), ("..a/b..", "..a/b..")]
)
def test_good_names(name: str, inner: str) -> None:
    assert check_inner_name(name) == inner


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "is empty"),
        ("./", "is empty"),
        ("..", "leaves the folder"),
        ("a/..", "leaves the folder"),
        ("/a", "is absolute"),
        ("\\\\host\\share\\a", "is absolute"),
        ("a\\b", "has a backslash"),
        ("z:a", "is absolute"),
        ("./C:", "is absolute"),
        ("././z:a", "is absolute"),
        ("a\0b", "is not printable"),
        ("a\udcffb", "is not printable"),
        ("ü" * 128, "is longer than 1024"),
    ],
)
def test_bad_names(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        check_inner_name(name)


@given(st.text(st.sampled_from("./\\:aC\0 \u202e"), max_size=12))
def test_what_passes_stays_below_the_folder(name: str) -> None:
    try:
        inner = check_inner_name(name)
    except ValueError:
        return
    assert Path("/folder", inner).resolve().is_relative_to("/folder/")
    assert str(PurePosixPath(inner)) == inner == check_inner_name(inner)


def test_names_that_are_one_file_on_some_systems() -> None:
    assert fold_name("A/É") == fold_name("a/e\u0301")
    assert fold_name("a") != fold_name("b")
