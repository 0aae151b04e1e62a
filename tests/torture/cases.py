"""A case: a program in some state, one fault or two, and what became of it.

A case is written as `PROGRAM STATE FAULT [FAULT]`, and the same text repeats it. States are `begin` (inputs only),
`early` and `half` (stopped by a kill after some of its work) and `done`. Faults while it runs:

    kill@17 term@17 int@17 hup@17 stop@17   a signal at the 17th call that changes files
    kill~0.4                                the same at this part of the time that it takes
    EIO@17 ENOSPC@17 EINTR@17 ...           that call fails; ENOSPC+17: and all after it
    read-EIO@17 read-short@17 ...           the 17th call that reads
    short@17 delay@17 clock-86400@17        it does half, comes late, or time is set back then
    limit-FSIZE=9000                        a limit of resources
    memory=40                               it may add so many MiB of addresses to those that it starts with
    tmpfs=50                                a disk of as many KiB
    twice twice@17                          two at once; one waits at that call until the other has gone on

and between two runs: flip:PATH:BIT, cut:PATH:BYTES, zero:PATH:BYTE, gone:PATH, swap:PATH (with that of another run).
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tests.torture import shim
from tests.torture.programs import Program, Results
from tests.torture.running import Disturbance, Ended, Moment, Running

STOPPED = {"early": 0.4, "half": 0.55}  # after this part of the files that it writes
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP,
           "stop": signal.SIGSTOP}  # fmt: skip
ERRORS = {
    shim.OPEN: ("EIO", "ENOSPC", "EINTR", "EACCES", "EMFILE", "EROFS"),
    shim.WRITE: ("EIO", "ENOSPC", "EINTR", "EDQUOT", "short"),
    shim.SYNC: ("EIO", "ENOSPC", "EDQUOT"),
    shim.RENAME: ("EIO", "ENOSPC", "EROFS"),
    shim.UNLINK: ("EIO", "EROFS"),
    shim.RMDIR: ("EIO",),
    shim.MKDIR: ("EIO", "ENOSPC", "EROFS"),
    shim.TRUNCATE: ("EIO", "ENOSPC"),
    shim.LINK: ("EIO", "ENOSPC"),
}
FORESEEN = frozenset(range(64, 79)) - {70}
REFUSALS = (75, 77, 78)  # of the second of two at once
TRIES = 3
MOST_LINES, MOST_CHARACTERS = 3, 400
_RUNNING = re.compile(r"(read-)?([a-zA-Z]+)(-\d+)?([@+~])([\d.]+)")
_ERROR = re.compile(r"^[\w.-]+: error: ", re.M)
# Files that tell about a run, and hold nothing that the run goes by.
_UNCHECKED = re.compile(r"events\.out|curves|report\.html|run_log|config\.yaml|/pictures/|analysis|training_data")


@dataclass(frozen=True)
class Reference:
    """Hold what a program does undisturbed.

    Attributes:
        results: its results.
        calls: numbers of kinds of its calls that change files, in their order.
        reads: how many calls read.
        seconds: from its start to its end.
        grown: bytes of addresses that it adds.
        groups: number of the first call of each group: of those that follow each other on one file or draft.
    """

    results: Results
    calls: tuple[int, ...]
    reads: int
    seconds: float
    grown: int = 0
    groups: tuple[int, ...] = (1,)

    def draw_call(self, chance: random.Random) -> int:
        """Draw a call: first a group, so that a single write counts as much as the many of a large file."""
        place = chance.randrange(len(self.groups))
        return chance.randrange(self.groups[place], (*self.groups, len(self.calls) + 1)[place + 1])


@dataclass
class Outcome:
    """Tell what became of a case: `same`, `named`, or `third` and what is wrong."""

    case: str
    state: str
    what: str = ""
    seconds: float = 0.0
    faults: int = 1


def prepare(program: Program, folder: Path) -> Reference:
    """Write the states of a program below a folder, and what it does undisturbed.

    Raises:
        RuntimeError: two undisturbed runs fail, or differ.
    """
    for name, seed in (("begin", 0), ("other", 1)):
        _in_fork(lambda name=name, seed=seed: program.make(folder / name, seed))
    shutil.copytree(folder / "begin", folder / "done", symlinks=True)
    log = folder / "log"
    first = Running(program.main, program.argv, folder / "done", log=log).wait()
    _require_done(program, first)
    logged = list(shim.read_log(log))
    calls, groups = tuple(call.kind for call in logged), list_groups(logged)
    log.unlink()
    results = program.collect(folder / "done")
    if results["left"]:
        raise RuntimeError(f"{program.name}: leaves {results['left'][:3]} undisturbed")
    _require_done(program, Running(program.main, program.argv, folder / "other").wait())
    for name, part in STOPPED.items():
        shutil.copytree(folder / "begin", folder / name, symlinks=True)
        kill = Disturbance(shim.Spoiled(groups[int(len(groups) * part)], f"signal:{signal.SIGKILL:d}"))
        Running(program.main, program.argv, folder / name, kill).wait()
    # A second one, whose reads are counted, in another folder.
    shutil.copytree(folder / "begin", folder / "again", symlinks=True)
    reading = Disturbance(shim.Spoiled(reads=True))
    second = Running(program.main, program.argv, folder / "again", reading).wait()
    _require_done(program, second)
    if difference := compare(results, program.collect(folder / "again")):
        raise RuntimeError(f"{program.name}: two undisturbed runs differ: {difference}")
    shutil.rmtree(folder / "again")
    reference = Reference(
        results, calls, second.calls, max(first.seconds, 0.1), max(first.grown, program.memory << 20), groups
    )
    (folder / "reference.json").write_text(json.dumps(asdict(reference)))
    return reference


def list_groups(calls: Sequence[shim.Call]) -> tuple[int, ...]:
    """Return the number, from 1, of the first call of each group of calls on one file, draft or folder of drafts."""
    if not calls:
        return (1,)
    names = [re.sub(r"\.unfinished\.[0-9a-f]{16}.*", "draft", call.path) for call in calls]
    return tuple(place for place, name in enumerate(names, 1) if place == 1 or name != names[place - 2])


def load_reference(folder: Path) -> Reference:
    """Read what `prepare` wrote, maybe in another process."""
    values = json.loads((folder / "reference.json").read_text())
    lists = {name: tuple(values[name]) for name in ("calls", "groups")}
    return Reference(**{**values, **lists})


def _in_fork(make: Any) -> None:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            make()
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the inputs of a program could not be made")


def _require_done(program: Program, ended: Ended) -> None:
    if ended.status != 0:
        raise RuntimeError(f"{program.name} ends with {ended.status} undisturbed:\n{ended.out}\n{ended.err}")


def compare(before: Results, after: Results) -> str:
    """Return what differs between results; empty where nothing does."""
    before, after = (json.loads(json.dumps(results)) for results in (before, after))
    return "; ".join(
        f"{name}: {_show_difference(before.get(name), after.get(name))}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    )


def _show_difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
        return ", ".join(
            f"{key} {'gone' if key not in after else 'new' if key not in before else 'differs'}" for key in changed[:3]
        )
    if isinstance(before, list) and isinstance(after, list):
        lost, new = ([each for each in a if each not in b] for a, b in ((before, after), (after, before)))
        return f"{len(before)} -> {len(after)}, lost {str(lost[:2])[:80]}, new {str(new[:2])[:80]}"
    return f"{str(before)[:60]} -> {str(after)[:60]}"


def draw_case(program: Program, reference: Reference, states: Path, chance: random.Random) -> str:
    """Draw the text of a case."""
    roll = chance.random()
    if roll < 0.5:
        words = ["begin", draw_running(reference, chance)]
    elif roll < 0.6:
        words = [chance.choice(("early", "half", "done")), draw_running(reference, chance)]
    elif roll < 0.85:
        state = chance.choice(("begin", "early", "half", "half", "done"))
        words = [state, draw_damage(states / state, chance)]
    elif roll < 0.92 and reference.calls:
        words = [
            chance.choice(("begin", *STOPPED)),
            chance.choice(("twice", f"twice@{reference.draw_call(chance)}")),
        ]
    else:
        state = chance.choice(tuple(STOPPED))
        first = draw_running(reference, chance)
        if chance.random() < 0.5:
            words = ["begin", first, draw_running(reference, chance)]
        else:
            words = [state, draw_damage(states / state, chance), first]
    return " ".join((program.name, *words))


def draw_running(reference: Reference, chance: random.Random) -> str:
    """Draw a fault while a program runs."""
    if reference.calls:
        nth, roll = reference.draw_call(chance), chance.random()
    else:  # it changes no files
        nth, roll = 1, chance.choice((0.35, 0.85, 0.9))
    name = chance.choice(("kill", "kill", *SIGNALS))  # after which nothing is tidied up
    if roll < 0.3:
        return f"{name}@{nth}"
    if roll < 0.4:
        return f"{name}~{chance.uniform(0.02, 0.98):.2f}"
    if roll < 0.7:
        return f"{chance.choice(ERRORS[reference.calls[nth - 1]])}@{nth}"
    if roll < 0.8:
        return f"{chance.choice(('ENOSPC', 'EROFS', 'EIO'))}+{nth}"
    if roll < 0.88:
        action = chance.choice(("read-EIO", "read-EINTR", "read-short"))
        return f"{action}@{chance.randrange(max(reference.reads, 1)) + 1}"
    if roll < 0.93:
        most = max(reference.grown >> 20, 2)
        return f"memory={max(2, most // 100, round(most ** chance.random()))}"
    return chance.choice(
        (f"delay@{nth}", f"clock-{chance.choice((1, 3600, 864000, 10**9))}@{nth}",
         f"limit-FSIZE={chance.choice((100, 1000, 5000, 20000, 100000))}", f"tmpfs={chance.choice((40, 80, 200, 600))}")
    )  # fmt: skip


def list_files(folder: Path) -> list[str]:
    """List the files that a damage may hit, by their paths in the folder."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return [str(path.relative_to(folder)) for path in paths if path.stat().st_size]


def draw_damage(folder: Path, chance: random.Random) -> str:
    """Draw a damage of a file that lies in a folder."""
    names = list_files(folder)
    name = chance.choices(names, [1 if _UNCHECKED.search(name) else 8 for name in names])[0]
    size = (folder / name).stat().st_size
    kind = chance.choice(("flip", "flip", "flip", "cut", "zero", "gone", "swap"))
    places = {"flip": chance.randrange(8 * size), "cut": chance.randrange(size), "zero": chance.randrange(size)}
    return f"{kind}:{name}:{places[kind]}" if kind in places else f"{kind}:{name}"


def damage(folder: Path, fault: str, states: Path) -> bool:
    """Damage a file as a fault says; False where nothing changed."""
    kind, _, rest = fault.partition(":")
    name, _, place = (rest, "", "0") if kind in ("gone", "swap") else rest.rpartition(":")
    path = folder / name
    if not path.is_file():  # of a case that is repeated with other sources
        return False
    before = path.read_bytes()
    content, at = bytearray(before), int(place)
    if kind == "flip":
        content[at // 8] ^= 1 << at % 8
    elif kind == "cut":
        del content[at:]
    elif kind == "zero":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "gone":
        path.unlink()
        return True
    else:
        other = states / "other" / name
        if not other.exists():
            return False
        content = bytearray(other.read_bytes())
    path.write_bytes(content)
    return bytes(content) != before


def read_running(fault: str, reference: Reference) -> Disturbance:
    """Return the disturbance that a fault while running means."""
    if fault.startswith("memory="):
        return Disturbance(memory=int(fault.partition("=")[2]) << 20)
    if fault.startswith("limit-"):
        name, _, number = fault.removeprefix("limit-").partition("=")
        return Disturbance(limits={getattr(resource, f"RLIMIT_{name}"): int(float(number))})
    found = _RUNNING.fullmatch(fault)
    if found is None:
        raise ValueError(f"{fault}: is no fault")
    reads, word, seconds, mode, place = found.groups()
    if mode == "~":
        return Disturbance(moment=Moment(float(place) * reference.seconds, SIGNALS[word]))
    if word in SIGNALS:
        action = f"signal:{SIGNALS[word]:d}"
    elif word in ("short", "delay"):
        action = word
    elif word == "clock":
        action = f"clock:{seconds}"
    else:
        action = f"{'from' if mode == '+' else 'errno'}:{getattr(errno, word)}"
    return Disturbance(shim.Spoiled(int(place), action, bool(reads)))


class Case:
    """Run a case in a folder of its own.

    Args:
        text: the case.
        program: which it is about.
        reference: of this program.
        states: the folder of its states.
        folder: where it runs; it is removed before.
    """

    def __init__(self, text: str, program: Program, reference: Reference, states: Path, folder: Path) -> None:
        _, self.state, *self.faults = text.split(" ")
        self.text, self.program, self.reference, self.states, self.folder = text, program, reference, states, folder
        self.damaged: list[str] = []
        self.wrong: list[str] = []
        self.mounted = False
        self.seconds = 0.0
        self.told = ""  # by all runs, for only the one that finds a damage tells of it
        self.lacked_memory = False

    def run(self) -> Outcome:
        """Run it; what is left in the folder is for the next one to remove."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.with_name(f"{self.folder.name}.order").unlink(missing_ok=True)
        shutil.copytree(self.states / self.state, self.folder, symlinks=True)
        try:
            for fault in self.faults:
                self._meet(fault)
            named = self._repeat()
        finally:
            self._unmount()
        state = "third" if self.wrong else "named" if named else "same"
        return Outcome(self.text, state, "; ".join(self.wrong), self.seconds, len(self.faults))

    def _start(self, disturbance: Disturbance | None = None, log: Path | None = None) -> Running:
        return Running(self.program.main, self.program.argv, self.folder, disturbance, log)

    def _wait(self, running: Running) -> Ended:
        ended = running.wait()
        self.seconds = max(self.seconds, ended.seconds)
        self.told += ended.err
        return ended

    def _meet(self, fault: str) -> None:
        if ":" in fault:
            if damage(self.folder, fault, self.states):
                self.damaged.append(fault.split(":")[1])
        elif fault.startswith("twice"):
            both = self._start_both(int(fault.partition("@")[2] or 0))
            ends = [self._wait(running) for running in both]
            for ended in ends:
                self._check_end(ended, set())
            if others := [ended for ended in ends if ended.status not in (0, *REFUSALS)]:
                self.wrong.append(f"of two at once one ends with {others[0].status}: {_last_line(others[0])}")
            if all(ended.status for ended in ends):
                self.wrong.append(f"of two at once none is done ({ends[0].status}, {ends[1].status})")
        elif fault.startswith("tmpfs="):
            self._mount(int(fault.partition("=")[2]))
            self._check_end(self._wait(self._start()), set())
            self._unmount()
        else:
            disturbance = read_running(fault, self.reference)
            self.lacked_memory |= disturbance.memory > 0
            log = self.folder.with_name("log")
            log.unlink(missing_ok=True)
            ended = self._wait(self._start(disturbance, log))
            self._check_end(ended, _allow_signals(disturbance, self.program.saves))
            if ended.status == 0 and fault == self.faults[-1]:  # it says that it is done
                self._check_results(is_last=False)
            if ended.status in FORESEEN and "errno" in disturbance.spoiled.action:
                calls = list(shim.read_log(log))
                if len(calls) >= disturbance.spoiled.nth:
                    self._check_name(ended, calls[disturbance.spoiled.nth - 1])

    def _start_both(self, nth: int) -> list[Running]:
        stopping = Disturbance(shim.Spoiled(nth, f"signal:{signal.SIGSTOP:d}" if nth else ""))
        first = self._start(stopping)
        if nth:
            first.wait_for_stop()
        second = self._start()
        if nth:  # it may wait for the first one
            second.has_ended(2 * self.reference.seconds + 1)
        return [first, second]

    def _mount(self, kib: int) -> None:
        """Give the outputs a small disk; without root they get a limit of a file's size."""
        target = self.folder / self.program.outputs[0]
        if os.geteuid() or target.exists():
            return
        target.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", target], check=True)
        self.mounted = True

    def _unmount(self) -> None:
        if not self.mounted:
            return
        target, copy = self.folder / self.program.outputs[0], self.folder / "copy"
        shutil.copytree(target, copy, symlinks=True)
        subprocess.run(["umount", target], check=True)
        target.rmdir()
        copy.rename(target)
        self.mounted = False

    def _repeat(self) -> bool:
        """Give the same command until it says done; return whether an error that names the damage ended it."""
        for _ in range(TRIES):
            ended = self._wait(self._start())
            self._check_end(ended, set())
            if ended.status == 0:
                self._check_results()
                return False
            if self.wrong:
                return True
        if not self.damaged:
            self.wrong.append(f"does not go on: {_last_line(ended)}")
        elif not any(_is_named(name, ended.err) for name in self._list_nameable()):
            self.wrong.append(f"what is damaged is not named: {_last_line(ended)}")
        return True

    def _list_nameable(self) -> list[str]:
        """List what an error may name: the damaged files, and the outputs where these are of other inputs."""
        is_input = any(name.split("/")[0] in self.program.inputs for name in self.damaged)
        addresses = ["http://"] * ("list.yaml" in self.damaged)
        return [*self.damaged, *(self.program.outputs if is_input else ()), *addresses]

    def _check_end(self, ended: Ended, signals: set[int]) -> None:
        """See that a program ended as it may: done, with a named error, or by the signal that it got."""
        is_early = bool(signals & {signal.SIGTERM, signal.SIGINT})  # before its own code runs
        if ended.status is None:
            self.wrong.append("hangs")
        elif is_starved(ended, signals):
            return
        elif "Traceback (most recent call last)" in ended.err + ended.out and not is_early:
            _, began, rest = (ended.err + ended.out).partition("Traceback")
            self.wrong.append(f"traceback: {_last_line(ended)}: {(began + rest)[:2000]!r}")
        elif ended.status == 0 or -ended.status in signals or is_early:
            return
        elif ended.status not in FORESEEN:
            self.wrong.append(f"status {ended.status}: {_last_line(ended)}")
        else:
            found = [match.start() for match in _ERROR.finditer(ended.err)]
            # Of ranks, each may tell its own; the last one is that of the launcher.
            text = ended.err[found[-1 if self.program.name == "ranks" else 0] :].strip() if found else ""
            if not found:
                self.wrong.append(f"status {ended.status} without an error: {_last_line(ended)}")
            elif len(text.splitlines()) > MOST_LINES or len(text) > MOST_CHARACTERS:
                self.wrong.append(f"an error of {len(text.splitlines())} lines, {len(text)} characters: {text!r}")

    def _check_name(self, ended: Ended, call: shim.Call) -> None:
        """See that an error of a file names it, or its folder, or what it is a part of."""
        if ended.status == 75:  # stopped, which is not about a file
            return
        paths = [Path(path) for path in (call.path, call.other) if path]
        names = {part for path in paths for part in path.relative_to(self.folder).parts}
        names |= {re.sub(r"^\.unfinished[-.]\w+-?|\.tmp$", "", name) for name in names}
        names.discard("")  # of a draft, which is of another name
        if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", ended.err) for name in names):
            self.wrong.append(f"{shim.NAMES[call.kind]} of {paths[0].name} is not named: {_last_line(ended)}")

    def _check_results(self, *, is_last: bool = True) -> None:
        results = self.program.collect(self.folder)
        expected = json.loads(json.dumps(self.reference.results))
        if not is_last:  # a draft that the disk let nobody remove goes at the next start
            results["left"] = [name for name in results["left"] if ".unfinished." not in name]
            if "files" in results:
                results["files"] = {k: each for k, each in results["files"].items() if ".unfinished." not in k}
        for name in self.damaged:
            forgive(name, expected, results, self.told)
        allow_more(expected, results)
        if self.lacked_memory:
            allow_rounding(expected, results, self.states / "done", self.folder)
        difference = compare(expected, results)
        if difference and not self._is_other_data():
            self.wrong.append(f"differs: {difference}")

    def _is_other_data(self) -> bool:
        """Tell whether damaged inputs without checksums gave what they give from the start: they are other data."""
        inputs = [name for name in self.damaged if name.split("/")[0] in self.program.inputs]
        if not inputs or any(name.startswith(("records/", "run/")) for name in inputs):
            return False
        fresh = self.folder.with_name("fresh")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(self.folder, fresh, symlinks=True, ignore=shutil.ignore_patterns(*self.program.outputs))
        ended = Running(self.program.main, self.program.argv, fresh).wait()
        if ended.status != 0:
            return False
        expected, results = self.program.collect(fresh), self.program.collect(self.folder)
        allow_more(expected, results)
        return not compare(expected, results)


def forgive(name: str, expected: Results, results: Results, told: str) -> None:
    """Leave out of two results what nobody reads again: an older checkpoint of a run, and rows that a warning is of."""
    inner = name.partition("/")[2]
    for side in (expected, results):
        if isinstance(side.get("weights"), dict):
            side["weights"].pop(inner, None)
        if isinstance(side.get("names"), list) and inner in side["names"]:
            side["names"].remove(inner)
    if inner in expected.get("rows", {}):
        rows, found = expected["rows"][inner], results["rows"][inner]
        if f"/{inner}: " in told and len(found) <= len(rows):
            expected["rows"][inner] = found
    if _UNCHECKED.search(name):
        expected["names"], results["names"] = [], []


def allow_rounding(expected: Results, results: Results, before: Path, after: Path) -> None:
    """Make results equal where they differ by rounding: without memory, oneDNN takes other kernels.

    Args:
        expected: of the undisturbed program; what is near it is put into `results`.
        results: of the case.
        before: folder of the undisturbed program.
        after: folder of the case.
    """
    for kind in ("weights", "detections"):
        for name, content in (expected.get(kind) or {}).items():
            files = [folder / "run" / name for folder in (before, after)]
            if name in results[kind] and is_near(*map(_read_numbers, files)):
                results[kind][name] = content
    for kind in ("rows", "scores"):
        if kind in results and is_near(expected[kind], results[kind]):
            results[kind] = expected[kind]


def _read_numbers(path: Path) -> Any:
    return load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())


def is_near(one: Any, other: Any) -> bool:
    """Tell whether two values of JSON or dicts of arrays are the same but for what float32 rounds in some steps."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_near, one, other))
    if isinstance(one, float | np.ndarray) and type(one) is type(other):
        return np.shape(one) == np.shape(other) and bool(np.allclose(one, other, rtol=1e-4, atol=1e-5))
    return bool(one == other)


def allow_more(expected: Results, results: Results) -> None:
    """Leave out of two results what a run has besides when it was stopped: checkpoints, and steps not noted."""
    if "images" in results:  # a run that went on notes the steps since then
        results["images"] = [line for line in results["images"] if line not in expected["images"]]
        expected["images"] = []
        extra = {
            name for name in results["weights"] if name not in expected["weights"] and name.startswith("checkpoints/")
        }
        folders = {str(Path(name).parent) for name in extra}
        results["weights"] = {name: each for name, each in results["weights"].items() if name not in extra}
        results["names"] = [name for name in results["names"] if str(Path(name).parent) not in folders]


def _allow_signals(disturbance: Disturbance, saves: bool) -> set[int]:
    """Return the signals that may end a program without a word: a kill, and others before it has begun.

    A hangup may, too, unless the program saves what it has done at a signal.
    """
    sent = disturbance.moment.signal if disturbance.moment else 0
    if disturbance.spoiled.action.startswith("signal:"):
        sent = int(disturbance.spoiled.action.partition(":")[2])
    is_early = disturbance.moment is not None and disturbance.moment.seconds < 0.5
    allowed = {sent} & {signal.SIGKILL, *(() if saves else (signal.SIGHUP,))} | ({sent} if is_early else set())
    if disturbance.memory:  # libraries in C++ abort where there is none
        allowed |= {signal.SIGABRT, signal.SIGSEGV, signal.SIGTRAP, signal.SIGILL, signal.SIGBUS}
    return {int(each) for each in allowed}


def is_starved(ended: Ended, signals: Collection[int]) -> bool:
    """Tell whether a library ended a program: C's, where a thread's own variables find no memory, or MXNet's.

    MXNet answers a signal that may end the program by a message and a status.
    """
    if ended.status == 255 and signal.SIGSEGV in signals:
        return "Segmentation fault: 11" in ended.err
    return ended.status == 127 and "cannot allocate memory for thread-local data" in ended.err


def _is_named(name: str, text: str) -> bool:
    path = Path(name)
    return any(part in text for part in (path.name, path.parent.name, name) if part)


def _last_line(ended: Ended) -> str:
    lines = [line for line in (ended.err or ended.out).strip().splitlines() if line.strip()]
    found = [line for line in lines if _ERROR.match(line)]
    return (found or lines or ["nothing was printed"])[-1].strip()[:200]
