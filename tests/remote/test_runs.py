"""A run at a URL ends with the weights of one in a folder, and is whole in its store, through kills and faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.remote.conftest import BUCKET, SECRET, Bucket

from gaudi_apps.training.checkpoint import CheckpointFolder, load_checkpoint
from gaudi_datasets.fetching.stores import find_copy

URL = f"s3://{BUCKET}/run"
PROGRAM = str(Path(__file__).parents[2] / "packages/apps/tests/small_ssd.py")
STEPS = 6
TENSORS = "state.safetensors"
LAST = f"checkpoints/step-{STEPS:08d}"


def command(records: Path, *flags: str, model_dir: str | Path = URL) -> list[str]:
    usual = ["-b", "4", "-s", str(STEPS), "-c", "0.34", "--device", "cpu", "-d", "fp32"]
    places = ["--data_dir", str(records), "--model_dir", str(model_dir)]
    return [sys.executable, PROGRAM, *places, *usual, *flags]


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(argv, capture_output=True, text=True)
    assert SECRET not in found.stdout + found.stderr
    return found


def train(records: Path, *flags: str, **places: Any) -> subprocess.CompletedProcess[str]:
    return run(command(records, *flags, **places))


def read_hash(content: bytes) -> str:
    return str(json.loads(content)["manifest"]["sha256"][TENSORS])


@pytest.fixture(scope="session")
def expected(records: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train in a folder, and return the hash of the last checkpoint."""
    folder = tmp_path_factory.mktemp("local") / "run"
    found = train(records, model_dir=folder)
    assert found.returncode == 0, found.stderr
    return read_hash((folder / LAST / "manifest.json").read_bytes())


def require_whole(bucket: Bucket, expected: str, tmp_path: Path) -> None:
    """Compare the run in the bucket with one in a folder, and load its checkpoints; the last one is there."""
    names = bucket.list("run/")
    assert {"run.json", "config.yaml", "history.jsonl", "report.html", "evaluation.json"} <= names
    assert "run.lock" not in names
    folders = sorted({name.rpartition("/")[0] for name in names if name.startswith("checkpoints/")})
    for name in names:
        path = tmp_path / "whole" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bucket.get(f"run/{name}"))
    loaded = [load_checkpoint(tmp_path / "whole" / folder) for folder in folders]
    assert (loaded[-1].step, loaded[-1].sha256) == (STEPS, expected)
    rows = [json.loads(line) for line in (tmp_path / "whole/history.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == STEPS


def use_empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forget all that was fetched and written, as a machine that the run has not been on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))


def test_a_run_and_its_uses(
    bucket: Bucket, records: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train(records, "--keep_ckpt_max", "2", "-s", "4")
    assert found.returncode == 0, found.stderr
    use_empty_machine(monkeypatch, tmp_path)
    bucket.aim("PUT", "state.safetensors", "503", "spoil")
    found = train(records, "--keep_ckpt_max", "2")
    assert found.returncode == 0, found.stderr
    assert "after step 4" in found.stdout
    assert not bucket.aimed
    require_whole(bucket, expected, tmp_path)
    assert f"model_dir: {URL}" in bucket.get("run/config.yaml").decode()
    use_empty_machine(monkeypatch, tmp_path / "third")
    bucket.delete("run/evaluation.json")
    found = train(records, "--mode", "eval", "--checkpoint", "4")
    assert found.returncode == 0, found.stderr
    assert json.loads(bucket.get("run/evaluation.json"))["step"] == 4
    bucket.delete("run/report.html")
    report = [sys.executable, "-m", "gaudi_apps.cli.run_commands", "report", URL]
    found = run(report)
    assert found.returncode == 0, found.stderr
    assert b"<html" in bucket.get("run/report.html")


def test_a_kill_in_an_upload_and_an_empty_machine(
    bucket: Bucket, records: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.aim("PUT", "/checkpoints/step-00000004/", "", "stall", "stall")
    bucket.aim("PUT", "/checkpoints/step-00000006/", "", "stall", "stall")
    first = subprocess.Popen(command(records), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert bucket.stalled.wait(600)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    bucket.aimed.clear()
    assert "run.lock" in bucket.list("run/")
    bucket.delete("run/run.lock")  # else the other machine waits a lease for a sign of life
    use_empty_machine(monkeypatch, tmp_path)
    found = train(records)
    assert found.returncode == 0, found.stderr
    require_whole(bucket, expected, tmp_path)


def test_a_run_that_is_stopped_is_in_the_store_as_far_as_it_came(bucket: Bucket, records: Path) -> None:
    bucket.aim("PUT", "/checkpoints/", "stall")
    stopped = subprocess.Popen(command(records, "-s", "100000"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert bucket.stalled.wait(600)
    stopped.send_signal(signal.SIGTERM)
    bucket.released.set()
    told = stopped.communicate()[1].decode()
    assert stopped.returncode == 75, told
    newest = max(CheckpointFolder(find_copy(URL) / "checkpoints").steps())
    assert f"checkpoints/step-{newest:08d}/manifest.json" in bucket.list("run/")
    assert "run.lock" not in bucket.list("run/")


def test_a_store_that_refuses_at_the_end(bucket: Bucket, records: Path, expected: str, tmp_path: Path) -> None:
    bucket.aim("PUT", "/checkpoints/", *["expired"] * 1000)
    found = train(records)
    assert found.returncode == 77, found.stderr
    assert URL in found.stderr.splitlines()[-1]
    assert "checkpoint of step" in found.stderr.splitlines()[-1]
    assert not {name for name in bucket.list("run/") if name.startswith("checkpoints/")}
    bucket.aimed.clear()
    found = train(records)
    assert found.returncode == 0, found.stderr
    require_whole(bucket, expected, tmp_path)
