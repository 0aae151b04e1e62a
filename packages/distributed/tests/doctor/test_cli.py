"""`gaudi-run doctor` as a program, on the machine that tests run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.cli import parse_flags, run_checks
from gaudi_distributed.doctor.findings import Request, exit_status, format_table
from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.cli import launch
from gaudi_distributed.launch.flags import parse_flags as parse_launch

# Ends where the program opens a file for writing, or changes one in any other way; /dev/null is no file.
GUARDED = """
import os, sys
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "os.setxattr", "tempfile.", "os.putenv")
def watch(event, args):
    if event == "open":
        path, mode, flags = args
        writes = set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if writes and isinstance(path, (str, bytes)) and os.fsencode(path) != b"/dev/null":
            os.write(2, f"opens {path} to write".encode()); os._exit(99)
    elif event.startswith(CHANGES):
        os.write(2, f"{event} {args}".encode()); os._exit(99)
sys.addaudithook(watch)
from gaudi_distributed.launch.cli import main
main()
"""
CHECKS = [
    *(
        "processor",
        "cores",
        "device",
        "bf16",
        "Gaudi",
        "SynapseAI",
        "GPU",
        "Python",
        "TensorFlow",
        "jemalloc",
        "memory",
    ),
    *("data set", "huge pages", "shared memory", "open files", "locked memory", "disk", "clock", "MPI", "Horovod"),
    "network",
]


def run(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_it_says_all_and_changes_nothing(tmp_path: Path) -> None:
    folder, data = tmp_path / "here", tmp_path / "records"
    folder.mkdir()
    data.mkdir()
    (data / "train-00000-of-00001").write_bytes(bytes(100))
    before = data.stat().st_mtime_ns
    flags = ["--device", "cpu", "--data_dir", str(data), "--model-dir", "runs/new", "--json"]
    done = run(folder, GUARDED, "doctor", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert list(checks) == CHECKS
    assert checks["data set"]["facts"] | {"allowed": 0} == {"bytes": 100, "files": 1, "records": "train", "allowed": 0}
    assert checks["cores"]["facts"]["usable"] == len(os.sched_getaffinity(0))
    assert checks["disk"]["facts"]["folder"] == str(folder.resolve())
    assert list(folder.iterdir()) == []
    assert data.stat().st_mtime_ns == before


def test_a_fault_is_status_78_with_its_remedy(tmp_path: Path) -> None:
    findings = run_checks(Machine(tmp_path, {}), Request(device="hpu"))
    assert exit_status(findings) == 78
    table = format_table(findings, "node1").splitlines()
    at = next(number for number, line in enumerate(table) if line.startswith("fault    device"))
    assert f"{tmp_path}/sys/class/accel/accel0 does not" in table[at]
    assert table[at + 1].endswith("choose --device cpu")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--hosts", "a:1,a:2"], 78, "named twice"),
        (["--hosts", "a b"], 78, "not a host"),
        (["--hosts=-oProxyCommand=x:1"], 78, "not a host"),
        (["--ssh_config", "nowhere"], 66, "does not exist"),
        (["--interface", "x;y"], 64, "not an interface"),
        (["--nothing"], 64, "did you mean --json"),
        (["--device", "tpu"], 64, "--device: invalid choice: 'tpu'"),
        (["--np", "0"], 64, "not a number"),
        (["ssd_train"], 64, "starts no program"),
    ],
)
def test_wrong_flags_are_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    assert launch(["doctor", *arguments], {}) == status
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("gaudi-run: error: ")
    assert errors.count("\n") == 1
    assert words in errors


def test_only_the_first_word_is_the_subcommand() -> None:
    assert parse_launch(["--np", "2", "doctor", "--json"]).command == ("doctor", "--json")
    assert parse_launch(["--", "doctor"]).command == ("doctor",)


def test_hyphens_are_underscores() -> None:
    assert parse_flags(["--model-dir", "a-b"]).model_dir == Path("a-b")
    with pytest.raises(FlagError, match="did you mean --hosts"):
        parse_flags(["--host", "a"])


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom gaudi_distributed.launch.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'tensorflow', 'numpy', 'horovod', 'habana_frameworks', 'mxnet'} & set(sys.modules)))\n"
    )
    done = run(tmp_path, code, "doctor", "--help")
    assert done.stdout.startswith("usage: gaudi-run doctor [flags]\n")
    assert done.stdout.endswith("[]\n")
