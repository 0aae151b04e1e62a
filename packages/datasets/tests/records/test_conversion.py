from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from gaudi_datasets.errors import DataError, FlagError, UnsafeError
from gaudi_datasets.records.conversion import write_shards
from gaudi_datasets.records.tfrecords import index_records, read_record

PROGRAM = Path(__file__).with_name("conversion_program.py")
# Ends a test that would never end.
SECONDS = 600
MORE_MARKS = 10**6  # than any program writes


def write(
    count: int, output_dir: Path, on_record: Callable[[int], None] = lambda index: None, **options: Any
) -> dict[str, Any]:
    """Write records that are numbers as text."""

    def encode(index: int) -> tuple[bytes, str]:
        on_record(index)
        return f"record {index}".encode(), "even" if index % 2 == 0 else ""

    given = {"manifest": {"kind": "detection"}, "fingerprint": "x", "shards": 3, **options}
    return write_shards(encode, count, output_dir, "train", **given)


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of each file that is not hidden."""
    files = (path for path in folder.iterdir() if not path.name.startswith("."))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(
    output_dir: Path, processes: int, *, records: int = 230, size: int = 4000, trouble: str = ""
) -> subprocess.Popen[str]:
    """Start the program, and stop it at the moment when it begins to convert."""
    words = [output_dir, processes, records, size, trouble]
    program = subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MARK": output_dir.name},
    )
    assert program.stdout is not None
    # Not through its buffer, which would take more than this line.
    assert b"".join(iter(partial(os.read, program.stdout.fileno(), 1), b"\n")) == b"started"
    return program


def wait_for_marks(program: subprocess.Popen[str], count: int) -> bool:
    """Wait until a program whose trouble is "marks" has written so many; False: it has ended before."""
    assert program.stdout is not None
    for _ in range(count):
        assert select.select([program.stdout], [], [], SECONDS)[0]
        if not os.read(program.stdout.fileno(), 1):
            return False
    return True


def test_records_are_dealt_in_turn_and_the_manifest_tells_of_them(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    manifest = write(7, tmp_path / "out", suffix="", progress=lambda *now: told.append(now))
    assert told == [(done, 7) for done in range(1, 8)]
    assert manifest == json.loads((tmp_path / "out" / "train.json").read_text())
    assert (manifest["split"], manifest["kind"], manifest["fixed"]) == ("train", "detection", {"even": 4})
    assert [shard["name"] for shard in manifest["shards"]] == [f"train-0000{n}-of-00003" for n in range(3)]
    for number, shard in enumerate(manifest["shards"]):
        path = tmp_path / "out" / shard["name"]
        found = [read_record(place).decode() for place in index_records(path)]
        assert found == [f"record {index}" for index in range(number, 7, 3)]
        assert (shard["records"], shard["bytes"]) == (len(found), path.stat().st_size)
        assert shard["crc32c"] == f"{google_crc32c.value(path.read_bytes()):08x}"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(contents(tmp_path / "out"))


def test_a_shard_that_was_replaced_since_is_named(tmp_path: Path) -> None:
    write(7, tmp_path)
    path = tmp_path / "train-00001-of-00003.tfrecord"
    content = path.read_bytes()
    path.write_bytes(content[:-5] + b"\0" + content[-4:])
    with pytest.raises(DataError) as caught:
        write(7, tmp_path)
    assert (caught.value.path, caught.value.field) == (str(path), "crc32c")
    write(7, tmp_path, overwrite=True)
    assert path.read_bytes() == content


def test_there_may_be_more_shards_than_records(tmp_path: Path) -> None:
    manifest = write(2, tmp_path, shards=4)
    assert [shard["records"] for shard in manifest["shards"]] == [1, 1, 0, 0]


@pytest.mark.costly
def test_any_number_of_processes_writes_the_same(tmp_path: Path) -> None:
    found = []
    for processes in (1, 2, 5):
        program = start(tmp_path / f"{processes}", processes)
        assert program.wait(SECONDS) == 0
        found.append(contents(tmp_path / f"{processes}"))
    assert len(found[0]) == 25
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_files(
    tmp_path: Path, wait_for_end: Callable[[Callable[[], list[int]]], None]
) -> None:
    """Kills one program after the other until 20 were killed; those that come to their end must have done it right."""
    assert start(tmp_path / "whole", 1).wait(SECONDS) == 0
    expected, generator, kills, ends = contents(tmp_path / "whole"), random.Random(0), 0, 0
    out = tmp_path / uuid.uuid4().hex
    while kills < 20 or ends < 4:
        program = start(out, 1 + kills % 2, trouble="marks")
        if wait_for_marks(program, generator.randrange(250) if kills < 20 else MORE_MARKS):
            program.kill()
            kills += 1
        program.communicate(timeout=SECONDS)
        wait_for_end(partial(find_processes, out.name))
        if program.returncode != -signal.SIGKILL:
            assert program.returncode == 0
            assert contents(out) == expected
            assert sorted(path.name for path in out.iterdir()) == sorted(expected)
            out, ends = tmp_path / uuid.uuid4().hex, ends + 1


def find_processes(mark: str) -> list[int]:
    """Return the processes of a program, by what `start` gave it, and those that it has started."""
    paths = Path("/proc").glob("[0-9]*/environ")
    return [int(path.parent.name) for path in paths if f"MARK={mark}\0" in _environment(path)]


def _environment(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or is not ours
        return ""


def stop_at(number: int) -> Callable[[int], None]:
    def on_record(index: int) -> None:
        if index == number:
            raise KeyboardInterrupt

    return on_record


def test_what_was_finished_is_not_written_again(tmp_path: Path) -> None:
    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        write(9, tmp_path / "out", stop_at(4))
    assert contents(tmp_path / "out") == {}
    told: list[tuple[int, int]] = []
    write(9, tmp_path / "out", seen.append, progress=lambda *now: told.append(now))
    assert seen == [1, 4, 7, 2, 5, 8]
    assert told == [(done, 9) for done in range(4, 10)]
    write(9, tmp_path / "once")
    assert contents(tmp_path / "out") == contents(tmp_path / "once")


@pytest.mark.parametrize(
    "other", [{"fingerprint": "y"}, {"shards": 2}, {"manifest": {"kind": "classification"}}, {"suffix": ".x"}]
)
def test_shards_of_another_job_are_not_used(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(9, tmp_path, stop_at(4))
    seen: list[int] = []
    write(9, tmp_path, seen.append, **other)
    assert sorted(seen) == list(range(9))
    assert len(contents(tmp_path)) == other.get("shards", 3) + 2


@pytest.mark.parametrize("stopped_at", range(1, 14))
def test_publishing_is_finished_where_it_was_stopped(
    tmp_path: Path, stopped_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records in 5 shards are replaced by others in 4; stopped before each of the removals and renames."""
    out, calls = tmp_path / "out", 0
    write(9, tmp_path / "once", shards=4)
    write(30, out, shards=5)

    def stop_in_time(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += (out / ".unfinished-train" / "plan.json").exists()
            if calls == stopped_at:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stop_in_time(Path.unlink))
        patch.setattr(os, "replace", stop_in_time(os.replace))
        with pytest.raises(KeyboardInterrupt):
            write(9, out, shards=4, overwrite=True)
    write(9, out, shards=4, overwrite=True)
    assert contents(out) == contents(tmp_path / "once")
    assert sorted(path.name for path in out.iterdir()) == sorted(contents(out))


def test_a_file_of_the_name_of_the_index_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train.index").write_text("of somebody")
    for overwrite in (False, True):
        with pytest.raises(UnsafeError):
            write(9, tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == {"train.index": hashlib.sha256(b"of somebody").hexdigest()}


def test_a_file_of_the_name_of_the_manifest_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{"images": []}')
    with pytest.raises(UnsafeError) as caught:
        write(9, tmp_path)
    assert caught.value.path == str(tmp_path)
    assert contents(tmp_path) == {"train.json": hashlib.sha256(b'{"images": []}').hexdigest()}


@pytest.mark.costly
@pytest.mark.parametrize("processes", [1, 2])
def test_a_fault_leaves_nothing_behind(tmp_path: Path, processes: int) -> None:
    program = start(tmp_path / "deep" / "out", processes, trouble="fault")
    _, error = program.communicate(timeout=SECONDS)
    assert error.splitlines()[-1].startswith("DataError: record 11")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_a_worker_that_is_killed_is_told(tmp_path: Path) -> None:
    program = start(tmp_path / "out", 2, trouble="death")
    _, error = program.communicate(timeout=SECONDS)
    assert "ChildProcessError: a process that" in error
    program = start(tmp_path / "out", 2)
    assert program.wait(SECONDS) == 0


def test_two_at_once_are_kept_apart(tmp_path: Path) -> None:
    with (tmp_path / ".unfinished-train.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UnsafeError, match="another process writes"):
            write(9, tmp_path)
    write(9, tmp_path)


def test_earlier_records_stay_when_it_fails(tmp_path: Path) -> None:
    def fail(index: int) -> None:
        raise DataError("no")

    write(9, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UnsafeError, match="name another or --overwrite"):
        write(8, tmp_path)
    with pytest.raises(DataError):
        write(9, tmp_path, fail, overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        write(9, tmp_path, stop_at(3), overwrite=True)
    assert contents(tmp_path) == before


def test_the_same_again_does_nothing(tmp_path: Path) -> None:
    seen: list[int] = []
    first = write(9, tmp_path)
    assert write(9, tmp_path, seen.append) == first
    assert seen == []
    index = (tmp_path / "train.index").read_bytes()
    (tmp_path / "train.index").unlink()
    assert write(9, tmp_path, seen.append) == first  # but for what is lost and known
    assert (tmp_path / "train.index").read_bytes() == index
    (tmp_path / "train-00001-of-00003.tfrecord").unlink()
    with pytest.raises(UnsafeError, match="name another or --overwrite"):
        write(9, tmp_path)
    assert write(9, tmp_path, seen.append, overwrite=True) == first
    assert sorted(seen) == list(range(9))


@pytest.mark.parametrize("bad", [{"shards": 0}, {"processes": -1}])
def test_bad_arguments_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a"):
        write(9, tmp_path, **bad)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, processes: int) -> None:
    used = []
    for records in (100, 400):
        program = start(tmp_path / f"{records}", processes, records=records, size=300_000)
        out, error = program.communicate(timeout=SECONDS)
        assert program.returncode == 0, error
        used.append(int(out) / 1024)
    assert used[1] - used[0] < 8  # MiB, where the data grows by 90


def _encode_number(index: int) -> tuple[bytes, str]:
    return f"record {index}".encode(), ""


@pytest.mark.costly
def test_other_processes_tell_what_they_have_written(tmp_path: Path) -> None:
    told: list[int] = []
    options: dict[str, Any] = {"manifest": {}, "fingerprint": "x", "shards": 4, "processes": 2}
    write_shards(_encode_number, 64, tmp_path, "train", **options, progress=lambda done, _: told.append(done))
    assert (told, told[-1]) == (sorted(told), 64)


@pytest.mark.costly
def test_no_worker_goes_on_after_a_fault_in_this_process(tmp_path: Path) -> None:
    """The exception is kept, and with it the frames that hold what they have opened."""

    def fail(done: int, total: int) -> None:
        raise RuntimeError(f"{done} of {total}")

    with pytest.raises(RuntimeError) as kept:
        write_shards(
            _encode_number, 64, tmp_path, "train", manifest={}, fingerprint="x", shards=16, processes=2, progress=fail
        )
    assert kept.value.args[0].endswith("of 64")
    assert multiprocessing.active_children() == []


# SIGTERM comes when the first worker was started and has not been told its work yet.
INTERRUPTED = """
import os, signal, sys
from multiprocessing import util
from gaudi_datasets.records.conversion import write_shards
from gaudi_ops.program import run_program

start = util.spawnv_passfds

def start_and_interrupt(path, words, descriptors):
    pid = start(path, words, descriptors)
    if "--multiprocessing-fork" in map(os.fsdecode, words):
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

def encode(index):
    return b"record", ""

def main():
    write_shards(encode, 64, sys.argv[1], "train", manifest={}, fingerprint="x", shards=16, processes=2)

if __name__ == "__main__":
    util.spawnv_passfds = start_and_interrupt
    run_program(main, prog="x")
"""


@pytest.mark.costly
def test_an_interrupt_while_workers_start_shows_no_traceback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    words = [sys.executable, str(program), str(tmp_path / "records")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (75, "x: error: interrupted\n")


def test_more_shards_than_are_of_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagError) as caught:
        write(3, tmp_path, shards=10**9)
    assert (caught.value.exit_status, caught.value.flag) == (64, "--shards")
    assert list(tmp_path.iterdir()) == []


def stop_before_the_end(folder: Path, record: int = 8) -> Path:
    """Stop a conversion of nine records in three shards while the last one is written; return the drafts' folder."""
    with pytest.raises(KeyboardInterrupt):
        write(9, folder, on_record=stop_at(record))
    return folder / ".unfinished-train"


@pytest.mark.parametrize("name", ["train-00000-of-00003.tfrecord", "0.json", "job.json"])
@pytest.mark.parametrize("damage", ["flip", "empty", "gone"])
def test_what_was_changed_while_stopped_is_written_again(name: str, damage: str, tmp_path: Path) -> None:
    write(9, tmp_path / "whole")
    path = stop_before_the_end(tmp_path / "out") / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(content if damage == "flip" else b"")
    write(9, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def stop_while_renaming(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert until one of three shards has its name."""

    def stop(draft: Path, path: Path) -> None:
        if path.name.startswith("train-00001"):
            raise KeyboardInterrupt
        os.replace(draft, path)

    with monkeypatch.context() as patched:
        patched.setattr("gaudi_datasets.records.conversion.publish_file", stop)
        with pytest.raises(KeyboardInterrupt):
            write(9, folder)


def test_another_conversion_that_was_stopped_while_renaming_is_finished_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(9, tmp_path / "whole")
    write(5, tmp_path / "other", fingerprint="y")
    stop_while_renaming(tmp_path / "out", monkeypatch)
    with pytest.raises(UnsafeError, match="has records"):
        write(5, tmp_path / "out", fingerprint="y")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    write(5, tmp_path / "out", fingerprint="y", overwrite=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_a_changed_shard_of_another_stopped_conversion_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_while_renaming(tmp_path / "out", monkeypatch)
    draft = tmp_path / "out" / ".unfinished-train" / "train-00002-of-00003.tfrecord"
    draft.write_bytes(b"changed")
    with pytest.raises(UnsafeError) as raised:
        write(5, tmp_path / "out", fingerprint="y", overwrite=True)
    assert raised.value.path == str(tmp_path / "out" / draft.name)
    assert draft.read_bytes() == b"changed"


def test_shards_that_were_changed_before_they_are_renamed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(9, tmp_path / "whole")
    stop_while_renaming(tmp_path / "out", monkeypatch)
    published, draft = tmp_path / "out", tmp_path / "out" / ".unfinished-train"
    (published / "train-00000-of-00003.tfrecord").write_bytes(b"changed")
    (draft / "train-00002-of-00003.tfrecord").unlink()
    write(9, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_plan_that_was_changed_is_named_and_nothing_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("gaudi_datasets.records.conversion._publish", lambda *arguments: stop_at(0)(0))
        with pytest.raises(KeyboardInterrupt):
            write(9, tmp_path / "out")
    plan = tmp_path / "out" / ".unfinished-train" / "plan.json"
    plan.write_text(plan.read_text().replace("detection", "detectiom"))
    before = sorted(path.name for path in plan.parent.iterdir())
    for _ in range(2):
        with pytest.raises(UnsafeError) as raised:
            write(9, tmp_path / "out")
        assert raised.value.path == str(plan)
    assert sorted(path.name for path in plan.parent.iterdir()) == before


def test_a_shard_that_is_written_as_another_one_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another version of a library that encodes images."""
    with monkeypatch.context() as patched:
        patched.setattr("gaudi_datasets.records.conversion._publish", lambda *arguments: stop_at(0)(0))
        with pytest.raises(KeyboardInterrupt):
            write(9, tmp_path / "out")
    draft = tmp_path / "out" / ".unfinished-train"
    (draft / "train-00001-of-00003.tfrecord").unlink()
    given: dict[str, Any] = {"manifest": {"kind": "detection"}, "fingerprint": "x", "shards": 3}
    with pytest.raises(UnsafeError) as raised:
        write_shards(lambda index: (b"another", ""), 9, tmp_path / "out", "train", **given)
    assert raised.value.path == str(tmp_path / "out" / "train-00001-of-00003.tfrecord")
    assert not (tmp_path / "out" / "train.json").exists()
