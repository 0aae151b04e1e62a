"""A release is checked by its tag, its version and its changelog, in real repositories of git."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools.release import NAMES, ReleaseError, check_changelogs, check_release, find_last_tag, main, read_version

ROOT = Path(__file__).resolve().parents[1]


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
        write_package(tmp_path, name, "0.1.0", "0.1.0 (2026-01-31)")
    run(tmp_path, "add", ".")
    run(tmp_path, "commit", "-qm", "Begin")
    for name in NAMES:
        run(tmp_path, "tag", f"gaudi-{name}-v0.1.0")
    return tmp_path


def test_a_release_has_one_version(checkout: Path) -> None:
    assert check_release(checkout, "gaudi-ops", "gaudi-ops-v0.1.0") == "0.1.0"
    assert main(checkout, ["check", "gaudi-ops", "--tag", "gaudi-ops-v0.1.0"]) == 0


@pytest.mark.parametrize(
    ("version", "heading", "text", "tag"),
    [
        ("0.2.0", "0.2.0 (2026-02-28)", "- It can more.", "gaudi-ops-v0.1.0"),
        ("0.2.0", "0.2.0 (2026-02-28)", "- It can more.", "gaudi-models-v0.2.0"),
        ("0.2.0", "0.2.0 (2026-02-28)", "- It can more.", "v0.2.0"),
        ("0.2.0", "0.1.0 (2026-02-28)", "- It can more.", "gaudi-ops-v0.2.0"),
        ("0.2.0", "0.2.0 (unreleased)", "- It can more.", "gaudi-ops-v0.2.0"),
        ("0.2.0", "0.2.0 (2026-13-28)", "- It can more.", "gaudi-ops-v0.2.0"),
        ("0.2.0", "0.2.0", "- It can more.", "gaudi-ops-v0.2.0"),
        ("0.2.0", "0.2.0 (2026-02-28)", "", "gaudi-ops-v0.2.0"),
        ("0.2.0-final", "0.2.0-final (2026-02-28)", "- It can more.", "gaudi-ops-v0.2.0-final"),
    ],
)
def test_a_release_that_disagrees_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str], version: str, heading: str, text: str, tag: str
) -> None:
    write_package(checkout, "ops", version, heading, text)
    with pytest.raises(ReleaseError):
        check_release(checkout, "gaudi-ops", tag)
    assert main(checkout, ["check", "gaudi-ops", "--tag", tag]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_before_the_tag_the_date_may_be_missing(checkout: Path) -> None:
    write_package(checkout, "ops", "0.2.0", "0.2.0 (unreleased)")
    assert check_release(checkout, "gaudi-ops") == "0.2.0"


@pytest.mark.parametrize("package", ["ops", "gaudi-opps", "gaudi-"])
def test_another_package_is_refused(checkout: Path, package: str) -> None:
    with pytest.raises(ReleaseError, match="gaudi-ops"):
        check_release(checkout, package)


def change_source(root: Path) -> None:
    (root / "packages/ops/src/a.py").write_text("1\n")


def require_more(root: Path) -> None:
    path = root / "packages/ops/pyproject.toml"
    path.write_text(path.read_text() + 'dependencies = ["numpy"]\n')


@pytest.mark.parametrize("change", [change_source, require_more])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_change_has_to_be_told(checkout: Path, change: Callable[[Path], None], is_committed: bool) -> None:
    assert check_changelogs(checkout) == []
    change(checkout)
    if is_committed:
        run(checkout, "commit", "-qam", "Change it")
    for base in (None, "gaudi-models-v0.1.0"):
        (fault,) = check_changelogs(checkout, base)
        assert fault.startswith("packages/ops/CHANGELOG.md: ")
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
    assert "0.1.0" in fault


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


def test_what_was_never_released_has_to_list_something(checkout: Path) -> None:
    run(checkout, "tag", "-d", "gaudi-ops-v0.1.0")
    change_source(checkout)
    assert check_changelogs(checkout) == []
    write_package(checkout, "ops", "0.1.0", "0.1.0 (unreleased)", "")
    assert len(check_changelogs(checkout)) == 1


def test_a_revision_that_is_none_is_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(checkout, ["changelogs", "--base", "nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err


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
