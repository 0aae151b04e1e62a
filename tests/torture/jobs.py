"""Draw jobs from a seed, run them side by side until the time is over, and tell what was found."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.torture import cases, inputs, power, programs, running, targets

INPUTS, POWER = (2, 5, 8), (7,)  # of ten jobs, those that are inputs and power loss; the others are faults
BATCH = 100


@dataclass
class Findings:
    """Hold what a run of the suite found.

    Attributes:
        outcomes: of the cases.
        tried: of the inputs, by target.
        seconds: of the whole, the preparation among it.
        slowest_input: seconds, and the target.
        broken: faults of the suite itself.
    """

    outcomes: list[cases.Outcome] = field(default_factory=list)
    tried: dict[str, inputs.Tried] = field(default_factory=dict)
    seconds: float = 0.0
    prepared: float = 0.0
    seed: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def notes(self) -> dict[str, str]:
        """Return what third outcomes say, without numbers, each with the case that repeats it, or nothing."""
        noted = {jot(note): "" for tried in self.tried.values() for note in tried.thirds}
        noted |= {jot(text): "" for text in self.broken}
        return noted | {jot(each.what): each.case for each in self.outcomes if each.state == "third"}

    @property
    def has_thirds(self) -> bool:
        """Return whether there was a third outcome, or the suite itself failed."""
        has_input = any(each.thirds for each in self.tried.values())
        return has_input or bool(self.broken) or any(each.state == "third" for each in self.outcomes)


def choose_programs(options: Namespace) -> list[str]:
    """Return the names of the programs to disturb: those that are asked for, else all that the time allows."""
    if options.case:
        return [options.case.split(" ")[0]]
    if options.programs:
        return list(options.programs)
    return programs.list_programs(options.minutes or 0)


def run(options: Namespace, work: Path, report: Path) -> Findings:
    """Prepare the programs, and run jobs until the time is over."""
    began = time.monotonic()
    kinds = options.only or (("faults",) if options.programs or options.case else ("faults", "inputs", "power"))
    is_power = bool(options.case) and " power " in options.case
    names = choose_programs(options) if "faults" in kinds and not is_power else []
    programs.import_modules(names or ["convert"])
    running.freeze()
    server = programs.serve(work / "served")
    try:
        return _run(options, names, kinds, is_power, work, report, began)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _run(
    options: Namespace,
    names: Sequence[str],
    kinds: Sequence[str],
    is_power: bool,
    work: Path,
    report: Path,
    began: float,
) -> Findings:
    _prepare(names, work, options.jobs)
    for name in names:
        running.import_noted(work / "states" / name / "modules")
    running.freeze()
    prepared = time.monotonic()
    references = {name: cases.load_reference(work / "states" / name) for name in names}
    if is_power:
        return Findings([power.repeat(options.case, work / "power")], seconds=time.monotonic() - began)
    if options.case:
        outcome = run_case(options.case, references, work, work / "repeat")
        return Findings([outcome], seconds=time.monotonic() - began, prepared=prepared - began)
    end = prepared + 60 * (options.minutes or math.inf)
    known = set(json.loads(options.known.read_text())) if options.known else None
    kept, readers = report / "inputs", list(options.targets or targets.TARGETS)
    random.Random(options.seed).shuffle(readers)
    kept.mkdir(parents=True, exist_ok=True)

    def work_off(worker: int, write: Callable[[Any], None]) -> None:
        folder = work / f"worker-{worker}"
        folder.mkdir()
        for number in range(worker, options.count or 10**9, options.jobs):
            if time.monotonic() > end or (work / "stop").exists():
                return
            for result in do_job(number, options.seed, kinds, references, work, folder, kept, readers):
                write(result)
                if known is not None and list_notes(result) - known:
                    (work / "stop").touch()

    found = Findings(seed=options.seed, prepared=prepared - began)
    for kind, result in in_parallel(options.jobs, work_off, work):
        if kind == "outcome":
            found.outcomes.append(cases.Outcome(**result))
        elif kind == "tried":
            add_tried(found.tried, result)
        else:
            found.broken.append(result)
    found.seconds = time.monotonic() - began
    return found


def _prepare(names: Sequence[str], work: Path, jobs: int) -> None:
    """Write the states of the programs, side by side."""

    def prepare(worker: int, write: Callable[[Any], None]) -> None:
        for name in names[worker::jobs]:
            folder = work / "states" / name
            folder.mkdir(parents=True)
            cases.prepare(programs.PROGRAMS[name], folder)

    broken = [result for kind, result in in_parallel(jobs, prepare, work) if kind == "broken"]
    if broken:
        raise SystemExit("\n".join(broken))


def do_job(
    number: int,
    seed: int,
    kinds: Sequence[str],
    references: dict[str, cases.Reference],
    work: Path,
    folder: Path,
    kept: Path,
    readers: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Do a job, which its number and the seed decide; yield what it found."""
    chance = random.Random(f"{seed} {number}")
    kind = "inputs" if number % 10 in INPUTS else "power" if number % 10 in POWER else "faults"
    if kind not in kinds:
        kind = chance.choice(list(kinds))
    if kind == "inputs":
        turn = number // 10 * len(INPUTS) + INPUTS.index(number % 10) if number % 10 in INPUTS else number
        name = readers[turn % len(readers)]
        yield {"tried": try_batch(name, chance.randrange(2**32), folder / "inputs", kept)}
    elif kind == "power":
        for outcome in power.draw(chance, folder / "power"):
            yield asdict(outcome)
    else:
        weights = [programs.PROGRAMS[name].weight for name in references]
        name = chance.choices(list(references), weights)[0]
        text = cases.draw_case(programs.PROGRAMS[name], references[name], work / "states" / name, chance)
        yield asdict(run_case(text, references, work, folder / "case"))


def run_case(text: str, references: dict[str, cases.Reference], work: Path, folder: Path) -> cases.Outcome:
    """Run the case of a text."""
    name = text.split(" ")[0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    case = cases.Case(text, programs.PROGRAMS[name], references[name], work / "states" / name, folder)
    return case.run()


def try_batch(name: str, seed: int, folder: Path, kept: Path) -> dict[str, Any]:
    """Try a batch of inputs in a process of its own; return what became of them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def batch(worker: int, write: Callable[[Any], None]) -> None:
        (folder / "good").mkdir()
        write({"tried": asdict(inputs.try_inputs(targets.TARGETS[name], seed, BATCH, folder / "good", kept))})

    for kind, result in in_parallel(1, batch, folder):
        if kind == "tried":
            return {**result, "target": name}
        note = f"{name}: its process: {result[-300:]}"
        return {**asdict(inputs.Tried(thirds={note: "--only inputs"}, counts={note: 1})), "target": name}
    raise RuntimeError(f"{name}: a batch of inputs ended without a word")


def add_tried(all_tried: dict[str, inputs.Tried], result: dict[str, Any]) -> None:
    """Add a batch to what became of the inputs of its target."""
    tried = all_tried.setdefault(result["target"], inputs.Tried())
    tried.taken += result["taken"]
    tried.refused += result["refused"]
    tried.thirds.update(result["thirds"])
    tried.slowest = max(tried.slowest, result["slowest"])
    for note, count in result["counts"].items():
        tried.counts[note] = tried.counts.get(note, 0) + count


def in_parallel(
    jobs: int, work: Callable[[int, Callable[[Any], None]], None], folder: Path
) -> Iterator[tuple[str, Any]]:
    """Run a function in so many forks; yield what each of them wrote, and what broke it."""
    paths = [folder / f"results-{time.monotonic_ns()}-{worker}" for worker in range(jobs)]
    pids = []
    sys.stdout.flush()
    sys.stderr.flush()
    for worker, path in enumerate(paths):
        pid = os.fork()
        if not pid:
            with path.open("a") as file:

                def write(result: Any, file: Any = file) -> None:
                    print(json.dumps(result), file=file, flush=True)

                try:
                    work(worker, write)
                except BaseException:
                    write({"broken": traceback.format_exc()})
            os._exit(0)
        pids.append(pid)
    for pid, path in zip(pids, paths, strict=True):
        status = os.waitpid(pid, 0)[1]
        for line in path.read_text().splitlines() if path.exists() else ():
            result = json.loads(line)
            if "broken" in result:
                yield "broken", result["broken"]
            elif "tried" in result:
                yield "tried", result["tried"]
            else:
                yield "outcome", result
        if status:
            yield "broken", f"a process ended with {os.waitstatus_to_exitcode(status)}"
        path.unlink(missing_ok=True)


def repeat_input(name: str, path: str, work: Path) -> int:
    """Read one input that was kept, and print what becomes of it."""
    target = targets.TARGETS[name]
    target.make(work)
    target.read(work)  # the good one, by which another content is known
    (work / target.name_in).write_bytes(Path(path).read_bytes())
    state, what = inputs.judge(target.read, work)
    print(f"{name}: {state} {what}")
    return int(state == "third")


def jot(text: str) -> str:
    """Return a text without what differs from case to case: numbers, and random names."""
    return re.sub(r"(unfinished|tmp)\S*|[0-9a-f]*\d[0-9a-f]*", "#", text)


def list_notes(result: dict[str, Any]) -> set[str]:
    """Return what the third outcomes of a job say."""
    texts = [result["what"]] if result.get("state") == "third" else list(result.get("tried", {}).get("thirds", ()))
    return {jot(text) for text in texts}


def name_fault(fault: str) -> str:
    """Return the kind of a fault: without its place."""
    return re.split(r"[@+~:=]", fault)[0].removesuffix("-1").rstrip("0123456789").rstrip("-")


def render(found: Findings) -> str:
    """Return tables of faults and inputs, and each third outcome with the command that repeats it, as Markdown."""
    names = list(dict.fromkeys(outcome.case.split(" ")[0] for outcome in found.outcomes))
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in found.outcomes:
        program, _, *faults = outcome.case.split(" ")
        counts.update((name_fault(fault), program) for fault in faults)
    states = Counter(outcome.state for outcome in found.outcomes)
    total = sum(counts.values())
    length = f"{found.seconds / 60:.1f} minutes, {found.prepared:.0f} s of them preparation"
    ends = f"{states['same']} same, {states['named']} named, {states['third']} third"
    lines = [f"# Torture, seed {found.seed}: {length}\n", f"{total} faults in {len(found.outcomes)} cases: {ends}.\n"]
    if found.outcomes:
        lines += [f"| fault | {' | '.join(names)} | all |", "|---|" + "---|" * (len(names) + 1)]
        for fault in sorted({fault for fault, _ in counts}):
            row = [counts[fault, name] for name in names]
            lines.append(f"| {fault} | {' | '.join(map(str, row))} | {sum(row)} |")
        slowest = max(found.outcomes, key=lambda outcome: outcome.seconds)
        lines.append(f"\nThe slowest run of a program: {slowest.seconds:.1f} s, in `{slowest.case}`.\n")
    if found.tried:
        lines += ["| inputs | all | taken | refused | third | slowest, s |", "|---|---|---|---|---|---|"]
        for name, tried in sorted(found.tried.items()):
            third = sum(tried.counts.values())
            lines.append(
                f"| {name} | {tried.total} | {tried.taken} | {tried.refused} | {third} | {tried.slowest:.2f} |"
            )
        lines.append(f"| all | {sum(tried.total for tried in found.tried.values())} | | | | |\n")
    thirds = [outcome for outcome in found.outcomes if outcome.state == "third"]
    noted = [
        (note, command, tried.counts[note]) for tried in found.tried.values() for note, command in tried.thirds.items()
    ]
    if thirds or noted:
        lines.append("## Third outcomes\n")
        lines += [f'- {one.what}\n  `nox -s torture -- --case "{one.case}"`' for one in thirds]
        lines += [f"- {count} x {note}\n  `nox -s torture -- {command}`" for note, command, count in noted]
    lines += [f"\n## The suite failed\n\n```\n{text}\n```" for text in found.broken]
    return "\n".join(lines) + "\n"
