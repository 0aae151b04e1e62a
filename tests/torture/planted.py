"""Thirty bugs, planted one at a time into a copy of the sources: does the suite find each of them, and how fast?

A bug counts as found where the suite gives a third outcome that it does not give in the same search without the bug, or
where two undisturbed runs differ. A bug whose text is in the sources no more has to be written anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ops", "datasets", "models", "distributed", "apps")
MOST_MISSED = 2
SEARCHES = 3  # of one bug, where the first finds what is there without it
CONVERT, FETCH, SSD = (("--programs", name) for name in ("convert", "fetch", "ssd"))
POWER, INPUTS = ("--only", "power"), ("--only", "inputs")


@dataclass(frozen=True)
class Bug:
    """A bug.

    Attributes:
        name: what is wrong.
        path: the file, below packages/.
        old, new: a text that stands there once, and what takes its place.
        search: arguments of the suite: the part of it that is about this file.
    """

    name: str
    path: str
    old: str
    new: str
    search: tuple[str, ...]


CONVERSION = "datasets/src/gaudi_datasets/records/conversion.py"
FILES = "ops/src/gaudi_ops/files.py"
OUTPUT_FILES = "datasets/src/gaudi_datasets/output_files.py"
DOWNLOADS = "datasets/src/gaudi_datasets/fetching/downloads.py"
CHECKPOINT = "apps/src/gaudi_apps/training/checkpoint.py"
TRAINER = "apps/src/gaudi_apps/training/trainer.py"
HISTORY = "apps/src/gaudi_apps/training/history.py"
PROGRAM = "ops/src/gaudi_ops/program.py"
DOCUMENTS = "datasets/src/gaudi_datasets/documents.py"

BUGS = (
    Bug(
        "a shard is not synced",
        CONVERSION,
        "sync_file(file)\n            if bring",
        "file.read(0)\n            if bring",
        POWER,
    ),
    Bug(
        "a shard that was changed since the plan is published",
        CONVERSION,
        'if not path.is_file() or checksum_file(path) != row["crc32c"]:',
        "if not path.is_file():",
        CONVERT,
    ),
    Bug("the plan is not synced", CONVERSION, "_PLAN, plan)", "_PLAN, plan, durable=False)", POWER),
    Bug("the manifest is not synced", CONVERSION, "path.name, document)", "path.name, document, durable=False)", POWER),
    Bug(
        "files are written in place",
        FILES,
        'with open(descriptor, "wb", _WRITTEN_AT_ONCE, closefd=_WINDOWS) as file:\n                yield file\n'
        "                file.flush()\n                if durable:\n                    os.fsync(file.fileno())\n"
        "            os.replace(draft, target)\n",
        'with open(target, "wb") as file:\n                yield file\n',
        CONVERT,
    ),
    Bug("the lock is not taken", FILES, "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", CONVERT),
    Bug(
        "shards of another job are used",
        CONVERSION,
        'if plan is not None or not job.exists() or read_text(job, errors="replace") != identity:',
        "if plan is not None or not job.exists():",
        CONVERT,
    ),
    Bug("publishing cannot be repeated", CONVERSION, 'if (staging / shard["name"]).exists():', "if True:", CONVERT),
    Bug(
        "the folder of drafts stays",
        OUTPUT_FILES,
        "folder.rename(done)\n        shutil.rmtree(done)",
        "folder.rename(done)",
        CONVERT,
    ),
    Bug(
        "the lock's file stays",
        FILES,
        "        path.unlink(missing_ok=True)\n        return\n",
        "        return\n",
        CONVERT,
    ),
    Bug(
        "an interrupt is not caught",
        PROGRAM,
        "except (Exception, KeyboardInterrupt) as error:",
        "except Exception as error:",
        CONVERT,
    ),
    Bug("an OSError has no status", PROGRAM, "statuses = {OSError: EX_IOERR, ", "statuses = {", CONVERT),
    Bug(
        "an error names no file",
        FILES,
        "raise OSError(error.errno, error.strerror, str(target)) from None",
        "raise OSError(error.errno, error.strerror) from None",
        CONVERT,
    ),
    Bug(
        "records are in the wrong shard after a stop",
        CONVERSION,
        "for number in missing)",
        "for number in range(len(missing)))",
        CONVERT,
    ),
    Bug(
        "a download is not verified", DOWNLOADS, "if self.sha256 and (found", "if self.sha256 == 'x' and (found", FETCH
    ),
    Bug(
        "what is there is not verified",
        DOWNLOADS,
        "            try:\n                download.verify(path)\n",
        "            try:\n                pass\n",
        FETCH,
    ),
    Bug(
        "the state of a download stays",
        DOWNLOADS,
        "publish_file(self.path, path)\n        self._state.unlink(missing_ok=True)",
        "publish_file(self.path, path)",
        FETCH,
    ),
    Bug("a checkpoint is not synced", CHECKPOINT, "        sync_file(file)\n", "", POWER),
    Bug("the folder of checkpoints is not synced", CHECKPOINT, "            sync_folder(self.folder)\n", "", POWER),
    Bug("the oldest checkpoint is taken", CHECKPOINT, "for step in reversed(steps):", "for step in steps:", POWER),
    Bug("the newest checkpoints are removed", CHECKPOINT, "[: -self._keep]", "[self._keep :]", POWER),
    Bug(
        "the hash of tensors is not compared",
        CHECKPOINT,
        "if sha256 != hash_file(path / TENSORS):",
        "if not sha256:",
        INPUTS,
    ),
    Bug(
        "the hash of the manifest is not compared",
        CHECKPOINT,
        "if content != _render(manifest):",
        "if not manifest:",
        INPUTS,
    ),
    Bug(
        "a step is counted twice",
        TRAINER,
        "self.step = self.state.step\n",
        "self.step = self.state.step + bool(self.state.step)\n",
        SSD,
    ),
    Bug(
        "images go on from a wrong place",
        TRAINER,
        "batches = self.data.batches(self.step)",
        "batches = self.data.batches(max(self.step - 1, 0))",
        SSD,
    ),
    Bug(
        "images are drawn without the seed",
        "datasets/src/gaudi_datasets/sampling.py",
        "return generator.permutation(self.num_images), ",
        "return np.random.permutation(self.num_images), ",
        SSD,
    ),
    Bug(
        "the momentum is not restored",
        "apps/src/gaudi_apps/training/keras_task.py",
        "            variable.assign(tensors[name])\n",
        '            if "momentum" not in name and "optimizer" not in name:\n'
        "                variable.assign(tensors[name])\n",
        SSD,
    ),
    Bug("rows of repeated steps stay", HISTORY, 'if row["step"] <= step]', "]", SSD),
    Bug(
        "deep JSON is not caught",
        DOCUMENTS,
        'except RecursionError:\n        raise DataError(\n            "is nested too deeply to be JSON',
        'except ZeroDivisionError:\n        raise DataError(\n            "is nested too deeply to be JSON',
        INPUTS,
    ),
    Bug(
        "broken safetensors are not caught",
        "models/src/gaudi_models/weights/reading.py",
        "    SafetensorError,\n",
        "",
        INPUTS,
    ),
)


@dataclass(frozen=True)
class Search:
    """Tell what a search found.

    Attributes:
        notes: third outcomes, without numbers, each with its case, or nothing.
        seconds: until it ended.
    """

    notes: Mapping[str, str]
    seconds: float


def copy_sources(folder: Path) -> None:
    """Copy the sources of the packages."""
    for name in PACKAGES:
        shutil.copytree(ROOT / "packages" / name / "src", folder / name / "src", ignore=shutil.ignore_patterns("*.pyc"))


def search(folder: Path, arguments: Sequence[str], seed: int, minutes: float, known: Collection[str] | None) -> Search:
    """Run the suite on a copy of the sources; with `known`, until it finds what is not known."""
    record, told = folder / "record.json", folder / "known.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.torture", *arguments, "--seed", str(seed), "--minutes", str(minutes)]
    command += ["--record", str(record)]
    if known is not None:
        told.write_text(json.dumps(sorted(known)))
        command += ["--known", str(told)]
    environ: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        "PYTHONPATH": os.pathsep.join(str(folder / name / "src") for name in PACKAGES),
    }
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if record.exists():
        return Search(json.loads(record.read_text()), seconds)
    return Search({f"cannot be prepared: {done.stderr.strip().splitlines()[-1:]}": ""}, seconds)


def plant(bug: Bug, folder: Path) -> bool:
    """Plant a bug in a copy; False where its text is not there once."""
    path = folder / bug.path
    text = path.read_text() if path.exists() else ""
    if text.count(bug.old) != 1:
        return False
    path.write_text(text.replace(bug.old, bug.new))
    return True


def find(bug: Bug, whole: Path, known: set[str], options: Namespace, minutes: float) -> tuple[str, str, float]:
    """Plant a bug and search; return "found", "missed" or "does not apply", by what it was found, and the seconds.

    What the sources do without the bug, too, when the case is repeated, is known from then on; then the search goes on.
    """
    seconds = 0.0
    with tempfile.TemporaryDirectory(prefix="torture-planted-") as name:
        shutil.copytree(whole, name, dirs_exist_ok=True)
        if not plant(bug, Path(name)):
            return "does not apply", "", 0.0
        for _ in range(SEARCHES):
            found = search(Path(name), bug.search, options.seed, minutes, known)
            seconds += found.seconds
            new = {note: case for note, case in found.notes.items() if note not in known}
            if not new:
                break
            for note, case in new.items():
                again = search(whole, ("--case", case), options.seed, minutes, None).notes if case else {}
                if not again:
                    return "found", note, seconds
                known |= {note, *again}
    return "missed", "", seconds


def main(options: Namespace, report: Path) -> int:
    """Plant the bugs and search for each; return 1 where more than two are missed."""
    bugs = [bug for bug in BUGS if not options.bugs or any(word in bug.name for word in options.bugs)]
    rows, missed, minutes = list[str](), 0, options.minutes / max(len(bugs), 1)
    before: dict[tuple[str, ...], set[str]] = {}
    with tempfile.TemporaryDirectory(prefix="torture-whole-") as name:
        whole = Path(name)
        copy_sources(whole)
        for bug in bugs:
            if bug.search not in before:
                before[bug.search] = set(search(whole, bug.search, options.seed, minutes, None).notes)
            state, what, seconds = find(bug, whole, before[bug.search], options, minutes)
            missed += state != "found"
            told = " ".join(what.split())[:90]
            rows.append(f"| {bug.name} | {bug.path.rpartition('/')[2]} | {state} | {seconds:.0f} | {told} |")
            print(rows[-1], flush=True)
    head = f"{len(bugs) - missed} of {len(bugs)} planted bugs found, seed {options.seed}.\n\n"
    text = f"{head}| bug | file | | seconds | by |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    report.mkdir(parents=True, exist_ok=True)
    (report / "planted.md").write_text(text)
    print(head)
    return int(missed > MOST_MISSED)
