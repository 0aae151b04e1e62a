from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

run: Callable[..., int] = runpy.run_path(str(Path(__file__).parents[1] / "run_command.py"))["run_command"]


def list_of(server: Any, folder: Path, *pages: tuple[str, str]) -> Path:
    path = folder / "list.yaml"
    path.write_text("".join(f"- {{url: {server.url}{name}, sha256: {sha256}}}\n" for name, sha256 in pages))
    return path


def test_the_files_of_a_list_are_fetched_once(
    server: Any, faults: Any, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [server.add("/a.bin", content, faults.cut(5000)), server.add("/b.bin", content[:10])]
    flags = ["--list", list_of(server, tmp_path, ("/a.bin", pages[0].sha256), ("/b.bin", pages[1].sha256))]
    out = tmp_path / "out"
    for state in ("fetched", "there already"):
        assert run("fetch", "files", *flags, "--output_dir", out) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"{out / 'a.bin'}: {state}, 300000 bytes, SHA-256 verified",
            f"{out / 'b.bin'}: {state}, 10 bytes, SHA-256 verified",
        ]
    assert (out / "a.bin").read_bytes() == content


def test_each_error_has_its_status_and_one_line(
    server: Any, faults: Any, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.add("/annotations/annotations_trainval2017.zip", content)
    server.add("/forbidden", content, faults.status(403))
    page = server.add("/taken", content)
    (tmp_path / "taken").write_text("mine")
    out = ["--output_dir", tmp_path]
    cases: list[tuple[int, list[object]]] = [
        (64, ["fetch", "coco"]),
        (64, ["fetch", "coco", *out, "--splits", "test"]),
        (64, ["fetch", "coco", *out, "--max_images", "-1"]),
        (65, ["fetch", "coco", *out, "--mirror", server.url]),
        (65, ["fetch", "coco", *out, "--mirror", "nowhere"]),
        (65, ["fetch", "files", *out, "--list", tmp_path]),
        (66, ["fetch", "files", *out, "--list", tmp_path / "none.yaml"]),
        (66, ["fetch", "files", *out, "--list", list_of(server, tmp_path, ("/gone", page.sha256))]),
    ]
    for status, argv in cases:
        assert run(*argv) == status, argv
        error = capsys.readouterr().err
        assert error.startswith("gaudi-datasets: error: "), error
        assert error.count("\n") == 1, error
    for status, name in ((74, "/forbidden"), (77, "/taken")):
        assert run("fetch", "files", *out, "--list", list_of(server, tmp_path, (name, page.sha256))) == status
        assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.yaml", "taken"]


@pytest.mark.costly
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_ended_goes_on(end: int, server: Any, faults: Any, content: bytes, tmp_path: Path) -> None:
    """It was cut once, and is in the midst of the rest when it is ended."""
    resumed = threading.Event()
    page = server.add("/a.bin", content, faults.cut(60_000), faults.silent(50_000, resumed))
    flags = ["--list", list_of(server, tmp_path, ("/a.bin", page.sha256)), "--output_dir", tmp_path / "out"]
    command = [sys.executable, "-m", "gaudi_datasets", "fetch", "files", *map(str, flags)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    part = tmp_path / "out" / "a.bin.part"
    assert resumed.wait(600)
    os.kill(process.pid, end)
    message = process.communicate(timeout=600)[1]
    assert process.returncode == (-signal.SIGKILL if end == signal.SIGKILL else 75), message
    size = part.stat().st_size
    assert 60_000 <= size <= 110_000
    assert run("fetch", "files", *flags) == 0
    assert server.requests[-1] == ("/a.bin", f"bytes={size}-", '"1"')
    assert (tmp_path / "out" / "a.bin").read_bytes() == content
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != ".fetch.lock"] == ["a.bin"]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from gaudi_datasets.commands import fetch\n"
        "heavy = {'requests', 'rich', 'numpy', 'PIL', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
