from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.fetching.downloads import Download
from gaudi_datasets.fetching.file_lists import read_file_list

SHA = "ab" * 32


def write(folder: Path, text: str) -> Path:
    path = folder / "list.yaml"
    path.write_text(text)
    return path


def test_a_list_is_read(tmp_path: Path) -> None:
    text = f"""
- url: https://example.org/a/one%20file.zip?download=1
  sha256: {SHA.upper()}
- {{url: "http://example.org/", sha256: {SHA}, name: folder/two.zip}}
"""
    assert read_file_list(write(tmp_path, text), tmp_path / "out") == [
        Download("https://example.org/a/one%20file.zip?download=1", tmp_path / "out" / "one file.zip", SHA),
        Download("http://example.org/", tmp_path / "out" / "folder" / "two.zip", SHA),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (f"sha256: {SHA}", r"files\[0\]: url is missing"),
        ("url: http://x/y", r"files\[0\]: sha256 is missing"),
        (f"{{url: 'file:///etc/passwd', sha256: {SHA}}}", 'url is "file:///etc/passwd"'),
        (f"{{url: 5, sha256: {SHA}}}", "url is 5"),
        ("{url: http://x/y, sha256: abc}", 'sha256 is "abc"'),
        (f"{{url: http://x/y, sha256: {'1' * 64}}}", "sha256 is 1+..."),
        (f"{{url: http://x/y, sha: {SHA}}}", '"sha" is no field'),
        (f"{{url: http://x/y, sha256: {SHA}, name: ../y}}", "name \"../y\" has '..', which leaves the"),
        (f"{{url: http://x/y, sha256: {SHA}, name: /y}}", 'name "/y" is absolute'),
        (f"{{url: 'http://x/%2e%2e', sha256: {SHA}}}", 'name ".." has'),
        (f"{{url: 'http://x/..%2fy', sha256: {SHA}}}", 'name "../y" has'),
        (f"{{url: http://x/, sha256: {SHA}}}", 'name "" is empty'),
        ("just text", r"files\[0\]: is \"just text\""),
        (f"{{url: http://x/y, sha256: {SHA}}}\n- {{url: http://z/Y, sha256: {SHA}}}", 'name "Y" was given before'),
        (f"&a {{url: http://x/y, sha256: {SHA}}}\n- *a", r"found a reference \(\*\)"),
        (f"!!python/object/apply:os.system ['true']\n- {SHA}", "could not determine"),
        ("{url: http://x/y", "is not YAML"),
        ("[" * 5000, "nested too deeply"),
        (f"{{url: http://x/y, sha256: {'9' * 5000}}}", "is not YAML of plain values"),
        ("\x07", "is not YAML"),
    ],
)
def test_a_fault_of_the_list_is_named(entry: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"- {entry}\n")
    with pytest.raises(DataError, match=message) as caught:
        read_file_list(path, tmp_path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "url: x", "5"])
def test_what_is_no_list_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no list"):
        read_file_list(write(tmp_path, text), tmp_path)
    with pytest.raises(DataError, match="is a folder"):
        read_file_list(tmp_path, tmp_path)
    with pytest.raises(MissingInputError, match="there is no"):
        read_file_list(tmp_path / "none", tmp_path)


@pytest.mark.costly
def test_two_processes_take_turns(
    server: Any, faults: Any, content: bytes, tmp_path: Path, make_channel: Callable[[str], Any]
) -> None:
    second_waits = threading.Event()
    page = server.add("/a.bin", content, faults.slow(10_000, second_waits.wait))
    path = write(tmp_path, f"- url: {server.url}/a.bin\n  sha256: {page.sha256}\n")
    flags = ["--list", str(path), "--output_dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "gaudi_datasets", "fetch", "files", *flags]
    told = make_channel("told")
    with told.path.open("w") as output:
        environ = {**os.environ, "PYTHONUNBUFFERED": ""}  # a line is written as a whole
        processes = [subprocess.Popen(command, stdout=output, env=environ) for _ in range(2)]
    waiting = f"{tmp_path / 'out'}: another process fetches into it; waiting until it is done"
    told.wait_for(waiting)
    second_waits.set()
    assert [each.wait(600) for each in processes] == [0, 0]
    while len(told.lines) < 3:
        told.read()
    waited, fetched, found = sorted(line.partition(": ")[2] for line in told.lines)
    assert waiting.endswith(waited)
    assert fetched.startswith("fetched, 300000 bytes,")
    assert found.startswith("there already, 300000 bytes,")
    assert len(server.requests) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.bin"]
