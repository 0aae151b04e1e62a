"""Check a release of one package, and that changed packages tell of it in their changelogs.

`python tools/release.py check gaudi-ops --tag gaudi-ops-v0.2.0` compares the tag with the version in pyproject.toml and
with the top of CHANGELOG.md, and refuses what is not committed; without a tag, which may be before the release, the
date may be missing. `python tools/release.py changelogs --base REVISION` fails for each package whose source or
requirements changed since the revision while its changelog did not; without `--base` the revision is the package's
last tag.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("ops", "datasets", "models", "distributed", "apps")
UNRELEASED = "unreleased"
_HEADING = re.compile(r"^## (\S+) \(([^)]*)\)$", re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class ReleaseError(Exception):
    """Something that keeps a package from being released, or a changelog from being true.

    Attributes:
        place: the file, tag, package or command that it is about.
        line: the number of the line in the file, from 1; None where it is about no single line.
        rule: the rule that is broken, as one word.
        remedy: what to do.
    """

    def __init__(self, place: Path | str, said: str, *, rule: str, remedy: str, line: int | None = None) -> None:
        self.place, self.line, self.rule, self.remedy = str(place), line, rule, remedy
        super().__init__(f"{place}{'' if line is None else f':{line}'}: {said}; {remedy} [{rule}]")


@dataclass(frozen=True)
class Section:
    """The section of a changelog for one version.

    Attributes:
        version: that it is about.
        date: of the release, as YYYY-MM-DD, or `unreleased`.
        text: below the heading.
        line: the number of the heading's line, from 1.
    """

    version: str
    date: str
    text: str
    line: int


def read_version(package: Path) -> str:
    """Return the version that a package's pyproject.toml declares."""
    path = package / "pyproject.toml"
    found = re.findall(r'^version = "([^"]+)"$', read_text(path), re.MULTILINE)
    if len(found) != 1:
        raise ReleaseError(path, f"has {len(found)} lines `version = ...`", rule="version", remedy="write one")
    return str(found[0])


def read_changelog(package: Path, today: date | None = None) -> list[Section]:
    """Return the sections of a package's changelog, the newest first.

    Args:
        package: its folder.
        today: the last day that may be a release's; None for the newest that any clock on Earth shows now.

    Raises:
        ReleaseError: there is none, a heading has another form, or a date is no day of the calendar or yet to come.
    """
    path = package / "CHANGELOG.md"
    text = read_text(path)
    headings = [*_HEADING.finditer(text)]
    forms = f"`## 0.2.0 (2026-01-31)` or `## 0.2.0 ({UNRELEASED})`"
    if not headings:
        raise ReleaseError(path, "has no section", rule="heading", remedy=f"begin one by a heading such as {forms}")
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("## ") and not _HEADING.fullmatch(line):
            raise ReleaseError(path, f"has the heading {line!r}", rule="heading", remedy=f"write {forms}", line=number)
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    sections = [
        Section(heading[1], heading[2], text[heading.end() : end].strip(), text.count("\n", 0, heading.start()) + 1)
        for heading, end in zip(headings, ends, strict=True)
    ]
    last_day = today or datetime.now(timezone(timedelta(hours=14))).date()
    for section in sections:
        _check_date(path, section, last_day)
    return sections


def _check_date(path: Path, section: Section, today: date) -> None:
    """Raise ReleaseError where the date of a section is neither `unreleased` nor a day that has come."""
    if section.date == UNRELEASED:
        return
    remedy = f"write the day of the release, or `{UNRELEASED}`"
    try:
        day = date.fromisoformat(section.date) if _DATE.fullmatch(section.date) else None  # 3.11 takes other forms
    except ValueError:
        day = None
    said = f"{section.version} has the date {section.date!r}, which"
    if day is None:
        said += " is no day of the calendar as YYYY-MM-DD"
        raise ReleaseError(path, said, rule="date", remedy=remedy, line=section.line)
    if day > today:
        raise ReleaseError(path, f"{said} is yet to come", rule="future-date", remedy=remedy, line=section.line)


def check_release(root: Path, distribution: str, tag: str | None = None, today: date | None = None) -> str:
    """Raise ReleaseError unless version, changelog and tag of a package agree; return the version.

    Args:
        root: the checkout.
        distribution: the package by its name on the index, such as gaudi-ops.
        tag: of the release; None before there is one, when the changelog may still say `unreleased`, and changes may
            be uncommitted.
        today: the last day that may be a release's; None for that of the clock.
    """
    package = root / "packages" / find_name(distribution)
    changelog = package / "CHANGELOG.md"
    version, newest = read_version(package), read_changelog(package, today)[0]
    if read_tagged_version(version) is None or str(Version(version)) != version:
        remedy = "write one such as 0.2.0 or 0.2.0rc1"
        said = f"{version} is no version in the form of PEP 440"
        raise ReleaseError(package / "pyproject.toml", said, rule="version", remedy=remedy)
    if newest.version != version:
        said = f"its top is for {newest.version}, the package is {version}"
        raise ReleaseError(changelog, said, rule="version", remedy="make them agree", line=newest.line)
    if not newest.text.startswith("- "):
        raise _lists_nothing(changelog, newest)
    if tag is None:
        return version
    if tag != f"{distribution}-v{version}":
        said = f"{distribution} is {version}"
        raise ReleaseError(f"tag {tag}", said, rule="tag", remedy=f"give the tag {distribution}-v{version}")
    if newest.date == UNRELEASED:
        said = f"{version} has the date {newest.date!r}"
        raise ReleaseError(changelog, said, rule="date", remedy="write the day of the release", line=newest.line)
    if uncommitted := git(root, "status", "--porcelain", "-z").split("\0")[0]:
        remedy = "commit it or remove it, for the tag will be without it"
        raise ReleaseError(uncommitted[3:], "is not committed as it is here", rule="uncommitted", remedy=remedy)
    return version


def check_changelogs(root: Path, base: str | None = None, today: date | None = None) -> list[ReleaseError]:
    """Return an error for each package that changed since a revision while its changelog did not.

    Source and pyproject.toml count. What is not committed counts, too, also files that git does not know yet.

    Args:
        root: the checkout.
        base: a revision; None: of each package its own last tag. A package without a tag was never released; its
            changelog must list something.
        today: the last day that may be a release's; None for that of the clock.
    """
    faults = []
    # Where the branch began: what others changed on the main branch since is not this one's.
    began = None if base is None else find_beginning(root, base)
    for name in NAMES:
        changelog = Path("packages", name, "CHANGELOG.md")
        since = began or find_last_tag(root, name)
        changed = list_changes(root, since, f"packages/{name}") if since else []
        sources = [path for path in changed if path.startswith((f"packages/{name}/src/", f"packages/{name}/pyproject"))]
        newest = read_changelog(root / "packages" / name, today)[0]
        if sources and str(changelog) not in changed:
            said = f"says nothing of {sources[0]}, changed since {since}"
            faults.append(ReleaseError(changelog, said, rule="untold", remedy="add what users see"))
        elif sources and git(root, "tag", "--list", f"gaudi-{name}-v{newest.version}"):
            said, remedy = f"its top is {newest.version}, which is released", "begin a section for the next version"
            faults.append(ReleaseError(changelog, said, rule="released", remedy=remedy, line=newest.line))
        elif not newest.text.startswith("- "):
            faults.append(_lists_nothing(changelog, newest))
    return faults


def find_name(distribution: str) -> str:
    """Return the short name of a package by its name on the index."""
    name = distribution.removeprefix("gaudi-")
    if name not in NAMES or not distribution.startswith("gaudi-"):
        known = ", ".join(f"gaudi-{each}" for each in NAMES)
        said = "is no package of this repository"
        raise ReleaseError(distribution or "''", said, rule="package", remedy=f"name one of {known}")
    return name


def find_beginning(root: Path, base: str) -> str:
    """Return the commit where this branch left another revision."""
    if not base or base.startswith("-"):  # which git would take for an option
        remedy = "name a branch, a tag or a commit"
        raise ReleaseError(f"--base {base!r}", "is no name of a revision", rule="revision", remedy=remedy)
    return git(root, "merge-base", base, "HEAD").strip()


def list_changes(root: Path, since: str, folder: str) -> list[str]:
    """Return the files of a folder that differ from a revision, with those that git does not know and not ignores."""
    known = git(root, "diff", "--name-only", "--no-renames", "-z", since, "--", folder)
    unknown = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", folder)
    return [path for path in (known + unknown).split("\0") if path]


def find_last_tag(root: Path, name: str) -> str | None:
    """Return the tag of a package's newest version among those that this commit comes from, or None.

    A tag that ends with no version is of no release, and is passed over.
    """
    start = f"gaudi-{name}-v"
    versions = {
        tag: version
        for tag in git(root, "tag", "--merged", "HEAD", "--list", f"{start}*").split()
        if (version := read_tagged_version(tag.removeprefix(start)))
    }
    return max(versions, key=lambda tag: versions[tag], default=None)


def read_tagged_version(text: str) -> Version | None:
    """Return a version, or None where a text is none in the form of PEP 440."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def check_contents(distribution: str, dist: Path) -> None:
    """Raise ReleaseError unless wheel and sdist of a package hold the licence and the mark of a typed package.

    Args:
        distribution: such as gaudi-ops.
        dist: the folder with one wheel and one sdist of it.
    """
    name = f"gaudi_{find_name(distribution)}"
    wheel, sdist = _find_one(dist, f"{name}-*.whl"), _find_one(dist, f"{name}-*.tar.gz")
    for path, endings in (
        (wheel, (f"{name}/py.typed", "licenses/LICENSE")),
        (sdist, (f"src/{name}/py.typed", "LICENSE", "README.md", "CHANGELOG.md")),
    ):
        names = _list_archive(path)
        if missing := [ending for ending in endings if not any(each.endswith(ending) for each in names)]:
            remedy = "add it to what pyproject.toml packs"
            raise ReleaseError(path, f"is without {', '.join(missing)}", rule="contents", remedy=remedy)


def _find_one(folder: Path, pattern: str) -> Path:
    """Return the one file of a folder that has a name of this form."""
    if not folder.is_dir():
        raise ReleaseError(folder, "is no folder", rule="dist", remedy="name the folder that was built into")
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        remedy = "build the package into an empty folder"
        raise ReleaseError(folder, f"has {len(found)} files {pattern}, not one", rule="dist", remedy=remedy)
    return found[0]


def _list_archive(path: Path) -> list[str]:
    """Return the names in a wheel or an sdist."""
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                return archive.namelist()
        with tarfile.open(path, "r:gz") as tar:
            return tar.getnames()
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise ReleaseError(path, f"cannot be read: {error}", rule="dist", remedy="build it again") from None


def _lists_nothing(changelog: Path, section: Section) -> ReleaseError:
    said = f"the section of {section.version} lists no change"
    return ReleaseError(changelog, said, rule="empty", remedy="write what users see", line=section.line)


def read_text(path: Path) -> str:
    """Return the text of a file of a package."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        said, remedy = f"cannot be read: {error.strerror}", "each package needs it"
    except UnicodeDecodeError as error:
        said, remedy = f"is not UTF-8: {error.reason} at byte {error.start}", "write it as UTF-8"
    raise ReleaseError(path, said, rule="file", remedy=remedy)


def git(root: Path, *arguments: str) -> str:
    """Run git in the checkout; return what it prints."""
    place = f"git {' '.join(arguments)}"
    try:
        done = subprocess.run(["git", *arguments], cwd=root, check=False, capture_output=True, text=True)
    except OSError as error:
        raise ReleaseError(place, f"git does not start: {error}", rule="git", remedy="install git") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"ended with {done.returncode}"
        raise ReleaseError(place, said, rule="git", remedy="run it in a whole clone that has what is named")
    return done.stdout


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the checks' flags."""
    parser = argparse.ArgumentParser(description="Check a release, or that changelogs tell of changes.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="compare version, changelog and tag of a package")
    check.add_argument("package", help="such as gaudi-ops")
    check.add_argument("--tag", help="such as gaudi-ops-v0.2.0; without it the changelog needs no date")
    changelogs = commands.add_parser("changelogs", help="find changed packages whose changelogs did not change")
    changelogs.add_argument("--base", help="revision to compare with; by default the last tag of each package")
    contents = commands.add_parser("contents", help="find what the wheel or the sdist of a package lacks")
    contents.add_argument("package", help="such as gaudi-ops")
    contents.add_argument("dist", type=Path, help="folder with one wheel and one sdist of it")
    return parser


def main(root: Path, arguments: Sequence[str]) -> int:
    """Run one of the checks; return 0, or 1 after lines that tell what is wrong."""
    chosen = make_parser().parse_args(arguments)
    try:
        if chosen.command == "check":
            print(f"{chosen.package} {check_release(root, chosen.package, chosen.tag)}: version and changelog agree")
            return 0
        if chosen.command == "contents":
            check_contents(chosen.package, chosen.dist)
            return 0
        faults = check_changelogs(root, chosen.base)
    except ReleaseError as error:
        faults = [error]
    for fault in faults:
        print(f"release: error: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))
