"""Lanes of CI are skipped only where everything that they read is as it was when they last passed."""

from __future__ import annotations

import importlib.util
import itertools
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Sessions that need no environment: each notes that it ran, `broken` fails, and `seeing` notes what is recorded.
NOXFILE = """
import os, nox
nox.options.default_venv_backend = "none"
def note(name):
    with open("ran.log", "a") as file:
        file.write(name + "\\n")
@nox.session
def ops(session):
    note("ops")
@nox.session
def data(session):
    note("data")
@nox.session
def split(session):
    note("split:" + os.environ["CI_PARTS"].replace(" ", "+"))
@nox.session
def broken(session):
    note("broken")
    session.error("as planned")
@nox.session
def hanging(session):
    note("hanging")
    session.run("tail", "-f", "/dev/null", external=True)
@nox.session
def seeing(session):
    os.write(1, b"\\xff no text")
    for name in os.listdir(os.path.join(os.environ["XDG_CACHE_HOME"], "gaudi", "ci")):
        note(name)
"""


@pytest.fixture(scope="module")
def ci() -> ModuleType:
    """Load tools/ci.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("tools_ci", ROOT / "tools" / "ci.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in ("packages/ops/src/a.py", "packages/datasets/src/b.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("1\n")
    (root / "noxfile.py").write_text(NOXFILE)
    (root / ".gitignore").write_text("ran.log\n__pycache__\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture
def run(ci: ModuleType, checkout: Path, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run the lanes ops and data, or others; returns the status and the sessions that ran."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "photo.jpg").write_bytes(b"1")
    lanes = {
        "ops": ci.Lane("ops", ("packages/ops",)),
        "data": ci.Lane("data", ("packages/datasets",), data=True),
        "split": ci.Lane(
            "split", parts={"one": ("packages/ops",), "two": ("packages/datasets",), "all": ("packages",)}
        ),
        **{name: ci.Lane(name, ("packages/ops",)) for name in ("broken", "hanging", "seeing")},
    }

    def run(*names: str, most: float = ci.MOST_SECONDS, **environ: str) -> tuple[int, list[str]]:
        log = checkout / "ran.log"
        log.unlink(missing_ok=True)
        fixed = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "REAL_DATA": str(tmp_path / "real")}
        status = ci.main(
            checkout, [lanes[name] for name in names or ("ops", "data")], fixed | environ, jobs=1, most=most
        )
        return status, log.read_text().split() if log.exists() else []

    return run


@pytest.mark.slow
def test_a_lane_runs_again_only_after_a_change_of_what_it_reads(
    run: Callable[..., tuple[int, list[str]]], checkout: Path, tmp_path: Path
) -> None:
    assert run() == (0, ["ops", "data"])
    assert run() == (0, [])
    (checkout / "packages/ops/src/a.py").write_text("2\n")
    assert run() == (0, ["ops"])
    (checkout / "packages/datasets/src/new.py").touch()  # not tracked, not ignored
    (tmp_path / "real" / "photo.jpg").write_bytes(b"2")
    assert run() == (0, ["data"])
    assert run(CI_FULL="1") == (0, ["ops", "data"])


@pytest.mark.slow
def test_of_a_lane_of_parts_those_run_again_that_read_what_changed(
    run: Callable[..., tuple[int, list[str]]], checkout: Path
) -> None:
    assert run("split") == (0, ["split:one+two+all"])
    assert run("split") == (0, [])
    (checkout / "packages/ops/src/a.py").write_text("2\n")
    assert run("split") == (0, ["split:one+all"])
    assert run("split", CI_FULL="1") == (0, ["split:one+two+all"])


def test_a_lane_that_failed_runs_again(run: Callable[..., tuple[int, list[str]]]) -> None:
    for _ in range(2):
        status, ran = run("broken")
        assert status != 0
        assert ran == ["broken"]


def test_the_time_of_processors_is_told_by_lane(
    run: Callable[..., tuple[int, list[str]]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("ops") == (0, ["ops"])
    assert re.findall(r"ci: (\w+): passed in \d+ s, \d+ s of processors", capfd.readouterr().out) == ["ops"]


def test_a_lane_that_hangs_is_ended(
    run: Callable[..., tuple[int, list[str]]], capfd: pytest.CaptureFixture[str]
) -> None:
    status, ran = run("hanging", most=3.0)
    assert status != 0
    assert ran == ["hanging"]
    assert "interrupted" in capfd.readouterr().out.splitlines()[-1]
    assert run("ops") == (0, ["ops"])


def test_a_lane_is_recorded_before_the_others_have_ended(run: Callable[..., tuple[int, list[str]]]) -> None:
    assert run("ops", "seeing") == (0, ["ops", "ops.json"])


def test_a_lane_that_fails_keeps_no_other_from_being_recorded(run: Callable[..., tuple[int, list[str]]]) -> None:
    status, ran = run("broken", "ops")
    assert status != 0
    assert ran == ["broken", "ops"]
    assert run("ops") == (0, [])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"date": "2020", "fingerprint": 1}'])
def test_a_damaged_record_skips_nothing(ci: ModuleType, tmp_path: Path, content: str) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = ci.locate_record("ops", environ)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert ci.find_passed("ops", "1", environ) == ""


def test_fingerprints_tell_inputs_apart(ci: ModuleType, checkout: Path, tmp_path: Path) -> None:
    environ = {"REAL_DATA": str(tmp_path)}
    first = ci.compute_fingerprint(checkout, ci.Lane("ops", ("packages",)), environ)
    (checkout / "packages/ops/src/a.py").rename(checkout / "packages/ops/src/c.py")
    renamed = ci.compute_fingerprint(checkout, ci.Lane("ops", ("packages",)), environ)
    others = [ci.Lane("data", ("packages",)), ci.Lane("ops", ("packages",), newest=True)]
    found = [first, renamed, *(ci.compute_fingerprint(checkout, lane, environ) for lane in others)]
    assert len({*found}) == len(found)


def test_every_lane_reads_the_fixtures_that_all_tests_share(ci: ModuleType, checkout: Path) -> None:
    lane = ci.Lane("ops", ("packages/ops",))
    before = ci.compute_fingerprint(checkout, lane, {})
    (checkout / "conftest.py").touch()
    assert ci.compute_fingerprint(checkout, lane, {}) != before


def test_real_data_that_are_missing_are_an_error(ci: ModuleType, checkout: Path, tmp_path: Path) -> None:
    for folder in ("", str(tmp_path / "nowhere")):
        with pytest.raises(ci.CiError, match="REAL_DATA"):
            ci.compute_fingerprint(checkout, ci.Lane("data", data=True), {"REAL_DATA": folder})


def test_every_lane_is_a_session(ci: ModuleType) -> None:
    defined = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert [lane.session for lane in ci.LANES if f"\ndef {lane.session}(" not in defined] == []
    read = [ROOT / path for lane in ci.LANES for path in (*lane.paths, *itertools.chain(*lane.parts.values()))]
    assert [path for path in (*read, *map(ROOT.joinpath, ci.COMMON)) if not path.exists()] == []


def test_a_lane_reads_the_scripts_that_its_session_runs(ci: ModuleType) -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    for lane in ci.LANES:
        (body,) = re.findall(rf"\ndef {lane.session}\(.*?\n\n\n", noxfile, re.DOTALL)
        for script in re.findall(r"\btools/\w+\.\w+", body):
            assert all({script, "."} & {*read} for read in (lane.parts or {"": lane.paths}).values())


def test_parts_of_a_lane_are_all_of_its_tests(ci: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has some: where it had none, pytest would run all that there are."""
    noxfile = runpy.run_path(str(ROOT / "noxfile.py"))

    def find_tests(session: str, part: str) -> list[str]:
        monkeypatch.setenv("CI_PARTS", part)
        folders: list[str] = noxfile["list_test_folders"]()
        if session in ("slow", "realdata"):
            return list(noxfile["find_tests"](session))
        return [folder for folder in folders if folder != "tests"]

    for lane in ci.LANES:
        tests = [find_tests(lane.session, part) for part in lane.parts]
        assert all(tests)
        assert not lane.parts or sorted(itertools.chain(*tests)) == sorted(find_tests(lane.session, ""))


def test_a_part_reads_its_package_and_those_that_it_needs(ci: ModuleType) -> None:
    needed = runpy.run_path(str(ROOT / "noxfile.py"))["PACKAGES"]
    for lane in ci.LANES:
        for part, read in lane.parts.items():
            folders = (
                {f"packages/{name}" for name in (part, *needed[part])} if part in needed else {"packages", "tests"}
            )
            assert folders <= {*read} or {"packages", "."} & {*read}


def test_what_a_lane_leaves_to_another_one_that_one_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in the short form of CI; a session that is started by its name leaves nothing out."""
    noxfile = runpy.run_path(str(ROOT / "noxfile.py"))
    folders = [folder for left in noxfile["SHARED"].values() for folder in left]
    assert len({*folders}) == len(folders)
    assert [folder for folder in folders if not (ROOT / "packages/apps/tests" / folder).is_dir()] == []
    # The session `slow` leaves `costly` to those two, which do not know the tests of the root.
    noxfile["list_test_folders"].__globals__["PACKAGES"].clear()
    assert noxfile["find_tests"]("slow")
    assert noxfile["find_tests"]("costly") == []
    for environ, is_short in (({}, False), ({"CI_LANE": "current"}, True), ({"CI_LANE": "x", "CI_FULL": "1"}, False)):
        for name in ("CI_LANE", "CI_FULL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert noxfile["is_short"]() == is_short


def test_what_python_has_compiled_is_taken_where_the_file_is_the_same(tmp_path: Path) -> None:
    bytecode = runpy.run_path(str(ROOT / "tools" / "bytecode.py"))
    one, other = (tmp_path / name / "lib" / "python3.11" / "site-packages" for name in (bytecode["COMPILED"][0], "new"))
    for name in ("same.py", "changed.py", "deep/same.py", "deep/compiled.py", "deep/missing.py"):
        for folder in (one, other):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (one / name).write_text(name)
        if name not in ("changed.py", "deep/missing.py"):
            (other / name).hardlink_to(one / name)
        cached = Path(importlib.util.cache_from_source(str(one / name)))
        cached.parent.mkdir(exist_ok=True)
        cached.write_text(f"compiled {name}")
    (other / "changed.py").write_text("changed.py")
    (other / "deep" / "__pycache__").mkdir()
    own = Path(importlib.util.cache_from_source(str(other / "deep" / "compiled.py")))
    own.write_text("its own")
    for _ in range(2):
        bytecode["main"](tmp_path / "new")
    found = {str(path.relative_to(other)): path.read_text() for path in other.rglob("*.pyc")}
    tag = sys.implementation.cache_tag
    assert found == {
        f"__pycache__/same.{tag}.pyc": "compiled same.py",
        f"deep/__pycache__/same.{tag}.pyc": "compiled deep/same.py",
        f"deep/__pycache__/compiled.{tag}.pyc": "its own",
    }


def test_marks_stand_in_the_files_that_have_them() -> None:
    """The sessions `slow` and `realdata` collect the files that name their marks, so none comes by another name."""
    files = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "conftest.py"]
    elsewhere = re.compile(r"pytest\.mark\b(?!\.)|import mark\b|modifyitems")
    found = [path for path in files if elsewhere.search(path.read_text(encoding="utf-8"))]
    assert found == [Path(__file__)]
    shared = [path for path in files if path.name == "conftest.py" and "mark." in path.read_text(encoding="utf-8")]
    assert shared == []
