"""A release is checked by its tag, its version and its changelog, in real repositories of git."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools.release import (
    NAMES,
    ReleaseError,
    check_changelogs,
    check_contents,
    check_release,
    find_last_tag,
    main,
    read_changelog,
    read_version,
)

ROOT = Path(__file__).resolve().parents[1]
TODAY = date(2024, 2, 29)


def run(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def write_package(root: Path, name: str, version: str, heading: str, text: str = "- It can more.") -> None:
    package = root / "packages" / name
    (package / "src").mkdir(parents=True, exist_ok=True)
    (package / "pyproject.toml").write_text(f'[project]\nname = "gaudi-{name}"\nversion = "{version}"\n')
    (package / "CHANGELOG.md").write_text(f"# Changelog of gaudi-{name}\n\n## {heading}\n\n{text}\n")
    (package / "src" / "a.py").touch()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a repository with the five packages at 0.1.0, released."""
    run(tmp_path, "init", "-q", "-b", "main")
    for name in NAMES:
        write_package(tmp_path, name, "0.1.0", "0.1.0 (2024-01-31)")
    run(tmp_path, "add", ".")
    run(tmp_path, "commit", "-qm", "Begin")
    for name in NAMES:
        run(tmp_path, "tag", f"gaudi-{name}-v0.1.0")
    return tmp_path


def test_a_release_has_one_version(checkout: Path) -> None:
    assert check_release(checkout, "gaudi-ops", "gaudi-ops-v0.1.0") == "0.1.0"
    assert main(checkout, ["check", "gaudi-ops", "--tag", "gaudi-ops-v0.1.0"]) == 0


@pytest.mark.parametrize(
    ("version", "heading", "text", "tag", "rule"),
    [
        ("0.2.0", "0.2.0 (2024-02-28)", "- It can more.", "gaudi-ops-v0.1.0", "tag"),
        ("0.2.0", "0.2.0 (2024-02-28)", "- It can more.", "gaudi-models-v0.2.0", "tag"),
        ("0.2.0", "0.2.0 (2024-02-28)", "- It can more.", "v0.2.0", "tag"),
        ("0.2.0", "0.1.0 (2024-02-28)", "- It can more.", "gaudi-ops-v0.2.0", "version"),
        ("0.2.0", "0.2.0 (unreleased)", "- It can more.", "gaudi-ops-v0.2.0", "date"),
        ("0.2.0", "0.2.0", "- It can more.", "gaudi-ops-v0.2.0", "heading"),
        ("0.2.0", "0.2.0 (2024-02-28)", "", "gaudi-ops-v0.2.0", "empty"),
        ("0.2.0-final", "0.2.0-final (2024-02-28)", "- It can more.", "gaudi-ops-v0.2.0-final", "version"),
    ],
)
def test_a_release_that_disagrees_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str], version: str, heading: str, text: str, tag: str, rule: str
) -> None:
    write_package(checkout, "ops", version, heading, text)
    run(checkout, "commit", "-qam", "Release it")
    with pytest.raises(ReleaseError) as caught:
        check_release(checkout, "gaudi-ops", tag)
    assert caught.value.rule == rule
    assert main(checkout, ["check", "gaudi-ops", "--tag", tag]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("day", "rule"),
    [
        ("2024-02-30", "date"),
        ("2024-13-28", "date"),
        ("20240228", "date"),
        ("2024-W05-1", "date"),
        ("soon", "date"),
        ("2024-03-01", "future-date"),
        ("9999-12-31", "future-date"),
    ],
)
@pytest.mark.parametrize("tag", [None, "gaudi-ops-v0.2.0"])
def test_a_date_is_a_day_that_has_come(checkout: Path, day: str, rule: str, tag: str | None) -> None:
    write_package(checkout, "ops", "0.2.0", f"0.2.0 ({day})")
    run(checkout, "commit", "-qam", "Release it")
    with pytest.raises(ReleaseError) as caught:
        check_release(checkout, "gaudi-ops", tag, TODAY)
    changelog = checkout / "packages/ops/CHANGELOG.md"
    assert (caught.value.place, caught.value.line, caught.value.rule) == (str(changelog), 3, rule)
    assert caught.value.remedy
    with pytest.raises(ReleaseError):
        check_changelogs(checkout, today=TODAY)


def test_dates_of_earlier_releases_are_checked_too(checkout: Path) -> None:
    text = "- It can more.\n\n## 0.1.0 (2023-02-29)\n\n- It begins."
    write_package(checkout, "ops", "0.2.0", "0.2.0 (2024-02-29)", text)
    with pytest.raises(ReleaseError) as caught:
        read_changelog(checkout / "packages" / "ops", TODAY)
    assert (caught.value.line, caught.value.rule) == (7, "date")


def test_what_is_released_is_committed(checkout: Path) -> None:
    (checkout / "packages/ops/src/new.py").touch()
    assert check_release(checkout, "gaudi-ops") == "0.1.0"
    with pytest.raises(ReleaseError) as caught:
        check_release(checkout, "gaudi-ops", "gaudi-ops-v0.1.0")
    assert caught.value.rule == "uncommitted"
    run(checkout, "add", ".")
    run(checkout, "commit", "-qm", "Add it")
    assert check_release(checkout, "gaudi-ops", "gaudi-ops-v0.1.0") == "0.1.0"
    change_source(checkout)
    with pytest.raises(ReleaseError) as caught:
        check_release(checkout, "gaudi-ops", "gaudi-ops-v0.1.0")
    assert (caught.value.place, caught.value.rule) == ("packages/ops/src/a.py", "uncommitted")


def test_before_the_tag_the_date_may_be_missing(checkout: Path) -> None:
    write_package(checkout, "ops", "0.2.0", "0.2.0 (unreleased)")
    assert check_release(checkout, "gaudi-ops") == "0.2.0"


@pytest.mark.parametrize("package", ["ops", "gaudi-opps", "gaudi-"])
def test_another_package_is_refused(checkout: Path, package: str) -> None:
    for check in (check_release, lambda _, name: check_contents(name, checkout)):
        with pytest.raises(ReleaseError) as caught:
            check(checkout, package)
        assert caught.value.rule == "package"


def change_source(root: Path) -> None:
    (root / "packages/ops/src/a.py").write_text("1\n")


def require_more(root: Path) -> None:
    path = root / "packages/ops/pyproject.toml"
    path.write_text(path.read_text() + 'dependencies = ["numpy"]\n')


def add_source(root: Path) -> None:
    (root / "packages/ops/src/b c.py").write_text("1\n")


def move_source(root: Path) -> None:
    (root / "packages/ops/src/a.py").rename(root / "packages/ops/a.py")


@pytest.mark.parametrize("change", [change_source, require_more, add_source, move_source])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_change_has_to_be_told(checkout: Path, change: Callable[[Path], None], is_committed: bool) -> None:
    assert check_changelogs(checkout) == []
    change(checkout)
    if is_committed:
        run(checkout, "add", ".")
        run(checkout, "commit", "-qm", "Change it")
    for base in (None, "gaudi-models-v0.1.0"):
        (fault,) = check_changelogs(checkout, base)
        assert (fault.place, fault.rule) == ("packages/ops/CHANGELOG.md", "untold")
    assert main(checkout, ["changelogs"]) == 1
    path = checkout / "packages/ops/CHANGELOG.md"
    path.write_text(path.read_text().replace("\n\n## ", "\n\n## 0.2.0 (unreleased)\n\n- It can this.\n\n## "))
    assert check_changelogs(checkout) == []
    assert main(checkout, ["changelogs"]) == 0


def test_a_released_section_is_not_changed_for_the_next_release(checkout: Path) -> None:
    change_source(checkout)
    path = checkout / "packages/ops/CHANGELOG.md"
    path.write_text(path.read_text() + "- It can this, too.\n")
    (fault,) = check_changelogs(checkout)
    assert (fault.line, fault.rule) == (3, "released")


def test_tests_and_documents_need_no_entry(checkout: Path) -> None:
    (checkout / "packages/ops/README.md").write_text("x")
    (checkout / "packages/ops/tests").mkdir()
    (checkout / "packages/ops/tests/test_a.py").write_text("x")
    run(checkout, "add", ".")
    run(checkout, "commit", "-qm", "Test it")
    assert check_changelogs(checkout) == []


def test_the_last_tag_is_that_of_the_newest_version(checkout: Path) -> None:
    for version in ("0.9.0", "0.10.0", "0.10.0rc1"):
        run(checkout, "commit", "-q", "--allow-empty", "-m", version)
        run(checkout, "tag", f"gaudi-ops-v{version}")
    assert find_last_tag(checkout, "ops") == "gaudi-ops-v0.10.0"
    run(checkout, "checkout", "-q", "gaudi-ops-v0.9.0")
    assert find_last_tag(checkout, "ops") == "gaudi-ops-v0.9.0"


def test_a_tag_that_ends_with_no_version_is_of_no_release(checkout: Path) -> None:
    run(checkout, "tag", "gaudi-ops-vbanana")
    assert find_last_tag(checkout, "ops") == "gaudi-ops-v0.1.0"
    assert main(checkout, ["changelogs"]) == 0
    run(checkout, "tag", "-d", "gaudi-ops-v0.1.0")
    assert find_last_tag(checkout, "ops") is None


def test_what_was_never_released_has_to_list_something(checkout: Path) -> None:
    run(checkout, "tag", "-d", "gaudi-ops-v0.1.0")
    change_source(checkout)
    assert check_changelogs(checkout) == []
    write_package(checkout, "ops", "0.1.0", "0.1.0 (unreleased)", "")
    assert [fault.rule for fault in check_changelogs(checkout)] == ["empty"]


@pytest.mark.parametrize(
    ("base", "rule"),
    [("nowhere", "git"), ("", "revision"), ("-h", "revision"), ("--output=x", "revision"), ("--all", "revision")],
)
def test_a_revision_that_is_none_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str], base: str, rule: str
) -> None:
    before = sorted(checkout.iterdir())
    with pytest.raises(ReleaseError) as caught:
        check_changelogs(checkout, base)
    assert caught.value.rule == rule
    assert base in caught.value.place
    assert main(checkout, ["changelogs", f"--base={base}"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert sorted(checkout.iterdir()) == before


@pytest.mark.parametrize("file", ["CHANGELOG.md", "pyproject.toml"])
@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_named(checkout: Path, file: str, content: bytes | None) -> None:
    path = checkout / "packages" / "ops" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReleaseError) as caught:
        check_release(checkout, "gaudi-ops")
    assert (caught.value.place, caught.value.rule) == (str(path), "file")
    assert main(checkout, ["check", "gaudi-ops"]) == 1


def test_where_git_is_missing_it_is_named(checkout: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "release.py"), "changelogs"]
    done = subprocess.run(command, env=os.environ | {"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def write_built(folder: Path, *left_out: str) -> None:
    """Write a wheel and an sdist of gaudi-ops, as far as their names of files go."""
    with zipfile.ZipFile(folder / "gaudi_ops-0.1.0-py3-none-any.whl", "w") as wheel:
        for name in {"gaudi_ops/py.typed", "gaudi_ops-0.1.0.dist-info/licenses/LICENSE"} - {*left_out}:
            wheel.writestr(name, "")
    with tarfile.open(folder / "gaudi_ops-0.1.0.tar.gz", "w:gz") as sdist:
        for name in {"src/gaudi_ops/py.typed", "LICENSE", "README.md", "CHANGELOG.md"} - {*left_out}:
            sdist.addfile(tarfile.TarInfo(f"gaudi_ops-0.1.0/{name}"))


def test_what_was_built_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(place: Path, rule: str) -> None:
        with pytest.raises(ReleaseError) as caught:
            check_contents("gaudi-ops", place)
        assert (Path(caught.value.place).is_relative_to(place), caught.value.rule) == (True, rule)
        assert main(tmp_path, ["contents", "gaudi-ops", str(place)]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1

    check(tmp_path / "nowhere", "dist")
    check(tmp_path, "dist")
    write_built(tmp_path)
    assert main(tmp_path, ["contents", "gaudi-ops", str(tmp_path)]) == 0
    for left_out in ("gaudi_ops/py.typed", "CHANGELOG.md"):
        write_built(tmp_path, left_out)
        check(tmp_path, "contents")
    for built in ("gaudi_ops-0.1.0.tar.gz", "gaudi_ops-0.1.0-py3-none-any.whl"):
        write_built(tmp_path)
        whole = (tmp_path / built).read_bytes()
        for broken in (b"", b"text", whole[: len(whole) // 2]):
            (tmp_path / built).write_bytes(broken)
            check(tmp_path, "dist")
    write_built(tmp_path)
    (tmp_path / "gaudi_ops-0.2.0-py3-none-any.whl").touch()
    check(tmp_path, "dist")


@pytest.mark.parametrize("name", NAMES)
def test_packages_of_this_checkout_can_be_released_together(name: str) -> None:
    assert check_release(ROOT, f"gaudi-{name}") == read_version(ROOT / "packages" / name)
    text = (ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8")
    for line in text.splitlines():
        for quoted in line.split('"')[1::2]:
            if quoted.startswith("gaudi-") and ">=" in quoted:
                requirement = Requirement(quoted)
                other = ROOT / "packages" / requirement.name.removeprefix("gaudi-")
                assert requirement.specifier.contains(read_version(other)), quoted
