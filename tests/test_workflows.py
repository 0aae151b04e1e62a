"""Workflows, hooks and forms agree with the sessions, the pinned versions and the packages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.release import NAMES, UNRELEASED, read_changelog, read_version

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"^ *-? *uses: ([\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$", re.MULTILINE)


def load(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_every_session_of_a_workflow_exists() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    named = {session for path in WORKFLOWS for job in load(path)["jobs"].values() for session in list_sessions(job)}
    assert {"lint", "slow", "current", "trial_release", "release", "tests"} <= named
    assert [name for name in sorted(named) if f"\ndef {name}(" not in noxfile] == []


def list_sessions(job: dict[str, Any]) -> set[str]:
    """Return the sessions that a job runs, from its matrix or its commands."""
    commands = "\n".join(step.get("run", "") for step in job.get("steps", ()))
    found = set(re.findall(r'nox -s "?(\w+)', commands))
    return found | set(job.get("strategy", {}).get("matrix", {}).get("session", ()))


def test_every_package_is_tested() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]
    assert jobs["packages"]["strategy"]["matrix"]["package"] == list(NAMES)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_do_what_it_says_and_no_more(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        writes = {what for what, how in job["permissions"].items() if how == "write"}
        needed = {"release.yml": {"id-token", "attestations"}, "site.yml": {"id-token", "pages"}}.get(path.name, set())
        assert writes == (needed if name == "publish" else set())
        assert not writes or "environment" in job, name
        assert job["timeout-minutes"] <= 180
    for step in (step for job in workflow["jobs"].values() for step in job["steps"]):
        assert "${{" not in step.get("run", "")  # a value may hold commands: it comes by the environment
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_actions_are_pinned_each_to_one_commit() -> None:
    pins: dict[str, set[tuple[str, str]]] = {}
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        found = PINNED.findall(text)
        assert len(found) == len(re.findall(r"uses:", text)), path.name
        for action, commit, version in found:
            pins.setdefault(action, set()).add((commit, version))
    assert {action: pin for action, pin in pins.items() if len(pin) > 1} == {}


def test_a_release_is_built_without_caches_and_published_without_a_token() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    used = {name: [step.get("uses", "").split("@")[0] for step in job["steps"]] for name, job in jobs.items()}
    assert "actions/cache" not in used["build"]
    assert used["publish"][-2:] == ["actions/attest-build-provenance", "pypa/gh-action-pypi-publish"]
    assert jobs["publish"]["environment"] == "pypi"
    assert "secrets" not in (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")


def test_hooks_have_the_tools_of_the_sessions() -> None:
    hooks = [hook for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    pins = read_pins()
    found = {line for hook in hooks for line in hook["additional_dependencies"]}
    assert found == {f"{tool}=={pins[tool]}" for tool in ("mypy", "ruff")}
    (types,) = (hook for hook in hooks if hook["id"] == "mypy")
    folders = [f"packages/{name}/{part}" for name in NAMES for part in ("src", "tests")]
    checked = [word for word in types["entry"].split()[1:] if not word.startswith("-")]
    assert checked == ["noxfile.py", "conftest.py", "tools", "benchmarks", "tests", *folders]


def test_the_citation_is_of_the_newest_release() -> None:
    citation, newest = load(ROOT / "CITATION.cff"), read_changelog(ROOT / "packages" / "apps")[0]
    assert citation["version"] == newest.version == read_version(ROOT / "packages" / "apps")
    assert str(citation.get("date-released", UNRELEASED)) == newest.date
    assert citation["license"] == "Apache-2.0"


def test_the_forms_lead_to_a_private_way_for_reports() -> None:
    links = load(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]
    assert any(link["url"].endswith("privately-reporting-a-security-vulnerability") for link in links)


def test_the_site_is_built_for_the_address_of_its_repository() -> None:
    steps = load(ROOT / ".github" / "workflows" / "site.yml")["jobs"]["build"]["steps"]
    (built,) = (step for step in steps if step.get("run", "").endswith("nox -s docs"))
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = dict(re.findall(r"^(\w+): !ENV \[(\w+), \"\"\]$", settings, re.MULTILINE))
    assert named == {"site_url": "SITE_URL", "repo_url": "REPO_URL"}
    assert {*built["env"]} == {*named.values()}
    assert all("github." in value for value in built["env"].values())


def test_what_runs_on_linux_alone_says_so() -> None:
    for name in NAMES:
        text = (ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8")
        systems = set(re.findall(r'"Operating System :: ([^"]+)"', text))
        portable = {"MacOS", "Microsoft :: Windows"} if name in ("ops", "datasets", "models") else set()
        assert systems == {"POSIX :: Linux"} | portable
        assert "Linux" in (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8"), name
