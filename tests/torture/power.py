"""Power loss: what the disk may hold after it, made from the calls that a program made before.

The file system is one that keeps the order of changes of names (as ext4 and XFS do): after a loss at call K, names are
as they were after some call J, from the last sync of any file or folder up to K. The content of a file is what its last
sync saw; of what was written since then, nothing is there, or half, or all, or zeros in its place.

A case is written as `checkpoints power loss:K:J:WRITTEN` or `records power loss:K:J:WRITTEN`.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.torture import cases, programs, shim
from tests.torture.running import Disturbance, Running

WRITTEN = ("none", "half", "all", "zeros")
STATES = {"checkpoints": 80, "records": 8}  # tried in one job, by what is written
O_TRUNC = os.O_TRUNC


@dataclass(frozen=True)
class Moment:
    """Hold what there is after a call: content of each file by number, as synced and as written, and the names.

    Attributes:
        synced, written: contents by the number of the file.
        names: number of the file by path; -1: a folder.
        is_sync: the call was a sync.
    """

    synced: dict[int, bytes]
    written: dict[int, bytes]
    names: dict[str, int]
    is_sync: bool


def list_moments(calls: Sequence[shim.Call], root: Path) -> list[Moment]:
    """Return what there is before the first call and after each; calls on what is not known change nothing."""
    moment = Moment({}, {}, {str(root): -1}, True)
    moments = [moment]
    for call in calls:
        synced, written, names = dict(moment.synced), dict(moment.written), dict(moment.names)
        known = names.get(call.path, -1)
        if call.kind == shim.OPEN:
            if call.path not in names:
                names[call.path] = number = len(written)
                written[number] = synced[number] = b""
            elif known >= 0 and call.offset & O_TRUNC:
                written[known] = b""
        elif call.kind == shim.WRITE and known >= 0:
            before = written[known].ljust(call.offset, b"\0")
            written[known] = before[: call.offset] + call.data + before[call.offset + len(call.data) :]
        elif call.kind == shim.TRUNCATE and known >= 0:
            written[known] = written[known][: call.offset]
        elif call.kind == shim.SYNC and known >= 0:
            synced[known] = written[known]
        elif call.kind == shim.RENAME and call.path in names:
            _rename(names, call.path, call.other)
        elif call.kind == shim.MKDIR:
            names.setdefault(call.path, -1)
        elif call.kind in (shim.UNLINK, shim.RMDIR):
            names.pop(call.path, None)
        moment = Moment(synced, written, names, call.kind == shim.SYNC)
        moments.append(moment)
    return moments


def _rename(names: dict[str, int], old: str, new: str) -> None:
    moved = {path: number for path, number in names.items() if path == old or path.startswith(f"{old}/")}
    for path in moved:
        del names[path]
    for path, number in moved.items():
        names[new + path.removeprefix(old)] = number


def write_disk(moments: Sequence[Moment], last: int, named: int, written: str, root: Path, target: Path) -> None:
    """Write what the disk holds after a loss at call `last`, with the names of call `named`, below `target`."""
    target.mkdir(parents=True)
    moment = moments[last]
    for path, number in sorted(moments[named].names.items()):
        place = target / Path(path).relative_to(root)
        if number < 0:
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        content, synced = moment.written[number], moment.synced[number]
        if content != synced:
            half = content[: (len(synced) + len(content)) // 2] if len(content) > len(synced) else content
            kinds = {"none": synced, "half": half, "all": content, "zeros": synced.ljust(len(content), b"\0")}
            content = kinds[written]
        place.write_bytes(content)


@dataclass(frozen=True)
class Recorded:
    """A program's calls.

    Attributes:
        moments: see `list_moments`.
        root: the folder that it wrote into.
        acknowledged: number of calls after which each step was said to be saved.
        results: its results.
    """

    moments: list[Moment]
    root: Path
    acknowledged: dict[int, int]
    results: programs.Results


def make_tensors(step: int) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a step's checkpoint."""
    return {"kernel": np.full([50, 20], step, np.float32), "step": np.array(step)}


def save_checkpoints(argv: Sequence[str]) -> None:
    """Save four checkpoints into `run`, two of which stay, and note when each was saved."""
    from gaudi_apps.training.checkpoint import CheckpointFolder

    folder = CheckpointFolder(Path("run"), keep=2)
    control = Path(next(line for line in os.environ[shim.VARIABLE].splitlines() if line.startswith("control="))[8:])
    for step in range(1, 5):
        folder.save(step, make_tensors(step), {"settings": {"seed": 0}, "position": {"epoch": 0, "image": step}})
        with Path(f"../acknowledged-{argv[0]}").open("a") as file:
            file.write(f"{step} {shim.count_calls(control)}\n")


def record(what: str, folder: Path) -> Recorded:
    """Run what is to lose its power, and record its calls."""
    shutil.rmtree(folder, ignore_errors=True)
    root, log = folder / "case", folder / "log"
    folder.mkdir(parents=True)
    notes = folder / "acknowledged-0"
    if what == "checkpoints":
        root.mkdir()
        ended = Running(save_checkpoints, ["0"], root, log=log).wait()
    else:
        programs.make_images(root)
        convert = programs.PROGRAMS["convert"]
        ended = Running(convert.main, convert.argv, root, log=log).wait()
    if ended.status:
        raise RuntimeError(f"{what}: ended with {ended.status}: {ended.err}")
    calls = list(shim.read_log(log))
    lines = notes.read_text().splitlines() if notes.exists() else []
    acknowledged = {int(step): int(count) for step, count in map(str.split, lines)}
    results = programs.collect_records(root) if what == "records" else {}
    return Recorded(list_moments(calls, root.resolve()), root.resolve(), acknowledged, results)


@functools.cache
def find_record(what: str, folder: Path) -> Recorded:
    """Record once in each process."""
    return record(what, folder)


def draw(chance: random.Random, folder: Path) -> Iterator[cases.Outcome]:
    """Try some losses of one kind."""
    what = chance.choice(list(CHECKS))
    recorded = find_record(what, folder / what)
    for _ in range(STATES[what]):
        last = chance.randrange(len(recorded.moments))
        named = chance.randint(find_synced(recorded, last), last)
        yield lose(what, last, named, chance.choice(WRITTEN), folder)


def find_synced(recorded: Recorded, last: int) -> int:
    """Return the last call up to a call by which all names before it are on the disk."""
    return max(place for place in range(last + 1) if recorded.moments[place].is_sync)


def repeat(text: str, folder: Path) -> cases.Outcome:
    """Repeat the case of a text."""
    what, _, loss = text.split(" ")
    _, last, named, written = loss.split(":")
    return lose(what, int(last), int(named), written, folder)


def lose(what: str, last: int, named: int, written: str, folder: Path) -> cases.Outcome:
    """Lose the power, go on with what the disk holds, and see what comes of it."""
    recorded = find_record(what, folder / what)
    last = min(last, len(recorded.moments) - 1)
    named = max(named, find_synced(recorded, last))  # a case may be of a program that synced elsewhere
    # In the same place as before: a conversion knows its inputs by their paths.
    target = recorded.root.with_name("lost") if what == "checkpoints" else recorded.root
    began = time.monotonic()
    _clear(what, target)
    if what == "checkpoints":
        write_disk(recorded.moments, last, named, written, recorded.root, target)
    else:
        draft = recorded.root.with_name("draft")
        shutil.rmtree(draft, ignore_errors=True)
        write_disk(recorded.moments, last, named, written, recorded.root, draft)
        if (draft / "out").exists():
            (draft / "out").rename(target / "out")
    state, text = CHECKS[what](recorded, target, last)
    case = f"{what} power loss:{last}:{named}:{written}"
    return cases.Outcome(case, state, text, time.monotonic() - began)


def _clear(what: str, target: Path) -> None:
    shutil.rmtree(target if what == "checkpoints" else target / "out", ignore_errors=True)


def check_checkpoints(recorded: Recorded, target: Path, last: int) -> tuple[str, str]:
    """Load the newest checkpoint, which must be whole and no older than what was said to be saved; save another."""
    from gaudi_apps.training.checkpoint import CheckpointFolder
    from gaudi_datasets.errors import DataError, MissingInputError
    from gaudi_ops import files

    files._cleaned.clear()  # as in a process that starts after the loss

    promised = max((step for step, count in recorded.acknowledged.items() if count <= last), default=0)
    folder = CheckpointFolder(target / "run", keep=2)
    try:
        found = folder.load_newest()
    except (DataError, MissingInputError) as error:
        if promised:
            return "third", f"step {promised} was saved, and is lost: {type(error).__name__}"
        found = None
    except Exception as error:
        return "third", f"{type(error).__name__}: {str(error)[:150]}"
    if found is not None:
        if found.step < promised:
            return "third", f"step {promised} was saved, step {found.step} is found"
        expected = make_tensors(found.step)
        if any(not np.array_equal(expected[name], value) for name, value in found.tensors.items()):
            return "third", f"step {found.step} has other weights"
    try:
        folder.save(5, make_tensors(5), {})
        is_saved = folder.load_newest().step == 5
    except Exception as error:
        return "third", f"cannot be saved into: {type(error).__name__}: {str(error)[:150]}"
    left = [name for name in programs.list_leftovers(target) if "step-" in name]
    if left or not is_saved:
        return "third", f"left: {left}" if left else "what was saved last is not what is found"
    return "same", ""


def check_records(recorded: Recorded, target: Path, last: int) -> tuple[str, str]:
    """Convert again, which must give the same."""
    convert = programs.PROGRAMS["convert"]
    ended = Running(convert.main, convert.argv, target, Disturbance()).wait()
    if ended.status != 0:
        return "third", f"status {ended.status}: {ended.err[-200:]}"
    difference = cases.compare(recorded.results, programs.collect_records(target))
    return ("third", f"differs: {difference}") if difference else ("same", "")


CHECKS: dict[str, Callable[[Recorded, Path, int], tuple[str, str]]] = {
    "checkpoints": check_checkpoints,
    "records": check_records,
}
