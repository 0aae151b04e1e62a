"""Check a release of one package, and that changed packages tell of it in their changelogs.

`python tools/release.py check gaudi-ops --tag gaudi-ops-v0.2.0` compares the tag with the version in pyproject.toml and
with the top of CHANGELOG.md; without a tag, which may be before the release, the date may be missing. `python
tools/release.py changelogs --base REVISION` fails for each package whose source or requirements changed since the
revision while its changelog did not; without `--base` the revision is the package's last tag.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("ops", "datasets", "models", "distributed", "apps")
UNRELEASED = "unreleased"
_HEADING = re.compile(r"^## (\S+) \(([^)]*)\)$", re.MULTILINE)
_DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])")


class ReleaseError(Exception):
    """Something that keeps a package from being released, or a changelog from being true."""


@dataclass(frozen=True)
class Section:
    """The section of a changelog for one version.

    Attributes:
        version: that it is about.
        date: of the release, as YYYY-MM-DD, or `unreleased`.
        text: below the heading.
    """

    version: str
    date: str
    text: str


def read_version(package: Path) -> str:
    """Return the version that a package's pyproject.toml declares."""
    text = (package / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'^version = "([^"]+)"$', text, re.MULTILINE)
    if len(found) != 1:
        raise ReleaseError(f"{package / 'pyproject.toml'}: has {len(found)} lines `version = ...`; it needs one")
    return str(found[0])


def read_changelog(package: Path) -> list[Section]:
    """Return the sections of a package's changelog, the newest first."""
    path = package / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    headings = [*_HEADING.finditer(text)]
    if not headings or text.count("\n## ") != len(headings):
        raise ReleaseError(f"{path}: each section needs a heading such as `## 0.2.0 (2026-01-31)` or `({UNRELEASED})`")
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    return [
        Section(heading[1], heading[2], text[heading.end() : end].strip())
        for heading, end in zip(headings, ends, strict=True)
    ]


def check_release(root: Path, distribution: str, tag: str | None = None) -> str:
    """Raise ReleaseError unless version, changelog and tag of a package agree; return the version.

    Args:
        root: the checkout.
        distribution: the package by its name on the index, such as gaudi-ops.
        tag: of the release; None before there is one, when the changelog may still say `unreleased`.
    """
    name = distribution.removeprefix("gaudi-")
    if name not in NAMES or not distribution.startswith("gaudi-"):
        known = ", ".join(f"gaudi-{each}" for each in NAMES)
        raise ReleaseError(f"{distribution}: is no package of this repository; they are {known}")
    package = root / "packages" / name
    version, newest = read_version(package), read_changelog(package)[0]
    try:
        if str(Version(version)) != version:
            raise InvalidVersion
    except InvalidVersion:
        raise ReleaseError(f"{package / 'pyproject.toml'}: {version} is no version in the form of PEP 440") from None
    if newest.version != version:
        raise ReleaseError(
            f"{package / 'CHANGELOG.md'}: its top is for {newest.version}, the package is {version}; make them agree"
        )
    if not newest.text.startswith("- "):
        raise ReleaseError(
            f"{package / 'CHANGELOG.md'}: the section of {version} lists no change; write what users see"
        )
    if tag is None:
        return version
    if tag != f"{distribution}-v{version}":
        raise ReleaseError(f"tag {tag}: {distribution} is {version}, so the tag must be {distribution}-v{version}")
    if not _DATE.fullmatch(newest.date):
        raise ReleaseError(
            f"{package / 'CHANGELOG.md'}: {version} has the date {newest.date!r}; write the day of the release there"
        )
    return version


def check_changelogs(root: Path, base: str | None = None) -> list[str]:
    """Return a line for each package that changed since a revision while its changelog did not.

    Source and pyproject.toml count. What is not committed counts, too.

    Args:
        root: the checkout.
        base: a revision; None: of each package its own last tag. A package without a tag was never released; its
            changelog must list something.
    """
    faults = []
    for name in NAMES:
        package = root / "packages" / name
        # Where the branch began: what others changed on the main branch since is not this one's.
        since = git(root, "merge-base", base, "HEAD").strip() if base else find_last_tag(root, name)
        changed = git(root, "diff", "--name-only", since, "--", f"packages/{name}").split() if since else []
        sources = [path for path in changed if path.startswith((f"packages/{name}/src/", f"packages/{name}/pyproject"))]
        newest = read_changelog(package)[0]
        if sources and f"packages/{name}/CHANGELOG.md" not in changed:
            faults.append(
                f"packages/{name}/CHANGELOG.md: says nothing of {sources[0]}, changed since {since}; add what users see"
            )
        elif sources and git(root, "tag", "--list", f"gaudi-{name}-v{newest.version}"):
            faults.append(
                f"packages/{name}/CHANGELOG.md: its top is {newest.version}, which is released;"
                f" begin a section for the next version"
            )
        elif not newest.text.startswith("- "):
            faults.append(f"packages/{name}/CHANGELOG.md: the section of {newest.version} lists no change")
    return faults


def find_last_tag(root: Path, name: str) -> str | None:
    """Return the tag of a package's newest version among those that this commit comes from, or None."""
    start = f"gaudi-{name}-v"
    tags = git(root, "tag", "--merged", "HEAD", "--list", f"{start}*").split()
    return max(tags, key=lambda tag: Version(tag.removeprefix(start)), default=None)


def check_contents(distribution: str, dist: Path) -> None:
    """Raise ReleaseError unless wheel and sdist of a package hold the licence and the mark of a typed package.

    Args:
        distribution: such as gaudi-ops.
        dist: the folder with one wheel and one sdist of it.
    """
    name = distribution.replace("-", "_")
    (wheel,), (sdist,) = dist.glob(f"{name}-*.whl"), dist.glob(f"{name}-*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
    with tarfile.open(sdist) as tar:
        inside_sdist = tar.getnames()
    for names, endings in (
        (inside, (f"{name}/py.typed", "licenses/LICENSE")),
        (inside_sdist, (f"src/{name}/py.typed", "LICENSE", "README.md", "CHANGELOG.md")),
    ):
        if missing := [ending for ending in endings if not any(each.endswith(ending) for each in names)]:
            raise ReleaseError(f"{distribution}: {', '.join(missing)} is not in what was built")


def git(root: Path, *arguments: str) -> str:
    """Run git in the checkout; return what it prints."""
    done = subprocess.run(["git", *arguments], cwd=root, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
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
        faults = [str(error)]
    for fault in faults:
        print(f"release: error: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))
