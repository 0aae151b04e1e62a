"""Measure speed and memory against alternatives, each benchmark in a process of its own, and print one table.

With `--device gpu` the benchmarks are those of benchmarks/gpu, on one card.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.catalogue import GPU_SHARES, NEED_TORCH, SHARES, deal_seconds
from benchmarks.gpu.card import describe_card
from benchmarks.input_shares import find_loaders
from benchmarks.measurement import Figure
from benchmarks.results import (
    GPU_RESULTS,
    RESULTS,
    Outcome,
    compare_with,
    describe_machine,
    format_results,
    format_table,
    list_rows,
    read_earlier,
    split_machines,
)
from benchmarks.torch_process import find_torch
from gaudi_distributed import DeviceError, choose_device

FOLDER = Path(__file__).parent
MINUTES = 20.0
# Of its seconds, what a benchmark measures in: the rest is for imports, tracing and the preparation of data.
MEASURED = 0.65
# One that takes so many times its seconds, and this much longer, is ended.
PATIENCE, GRACE_SECONDS = 2.0, 420.0
# After so many times the minutes of all, what runs is ended, and nothing more is begun.
MOST = 1.5
# Of the benchmarks of a device.
PACKAGES = {"cpu": "benchmarks", "gpu": "benchmarks.gpu"}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Run the benchmarks that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="what computes; default: cpu")
    names = f"{', '.join(SHARES)}; on a GPU {', '.join(GPU_SHARES)}"
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some of {names}; default: all of the device")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="about how long all take together; half as much again at most"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench.json"), help="file for all details")
    parser.add_argument(
        "--write_results",
        action="store_true",
        help=f"write {RESULTS.name}, to be committed; with --only, its other rows of this machine stay",
    )
    parsed = parser.parse_args(arguments)
    known = list_shares(parsed.device)
    if unknown := [name for name in parsed.only or () if name not in known]:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(known)}")
    if not 0 < parsed.minutes < math.inf:
        parser.error(f"--minutes {parsed.minutes:g}: must be above 0, and not endless")
    return parsed


def list_shares(device: str) -> Mapping[str, float]:
    """Return the benchmarks of a device, with their shares of the time."""
    return GPU_SHARES if device == "gpu" else SHARES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named ones, or all; 1 when a figure is not what it must be, or a benchmark failed."""
    options = parse(arguments)
    shares = list_shares(options.device)
    names = [name for name in shares if name in (options.only or shares)]
    machine, results = describe_machine(), RESULTS
    if options.device == "gpu":
        try:
            choose_device("gpu")
            card, results = describe_card(), GPU_RESULTS
            machine |= {"machine": f"{machine['machine']}, {card.partition(',')[0]}", "card": card}
        except DeviceError as error:
            print(f"benchmarks: error: {error}", file=sys.stderr)
            return error.exit_status
    prepare_environments(names)
    # So that a benchmark ends with this program.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("benchmarks: stopped; what has ended is in the file of --json"))
    started = time.monotonic()
    try:
        write_json(options.json, machine, [])
    except OSError as error:
        print(f"benchmarks: error: --json {options.json}: {error.strerror}", file=sys.stderr)
        return 2
    outcomes, omitted = run_each(names, options, machine, started)
    former = results.read_text(encoding="utf-8") if results.exists() else ""
    earlier = read_earlier(split_machines(former).get(machine["machine"], ""))
    print(f"\n{format_table(list_rows(outcomes))}\n")
    print(
        f"compared with {results.name}:" if earlier else f"{results.name} has no table of this machine to compare with"
    )
    ended = [outcome for outcome in outcomes if outcome.benchmark not in omitted]
    for line in compare_with(earlier, ended) if earlier else ():
        print(f"  {line}")
    minutes = (time.monotonic() - started) / 60
    print(f"{minutes:.1f} minutes; all details: {options.json}")
    if options.write_results and ended:  # of others, the former rows stay
        results.write_text(format_results(machine, ended, former, shares), encoding="utf-8")
        print(f"written: {results}")
    if omitted:
        print(
            f"no time was left for some benchmarks; give more --minutes, or --only {' '.join(omitted)}", file=sys.stderr
        )
    if failed := [outcome.benchmark for outcome in ended if not outcome.passed]:
        print(f"not met, or failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed or omitted else 0


def run_each(
    names: Sequence[str], options: argparse.Namespace, machine: Mapping[str, str], started: float
) -> tuple[list[Outcome], list[str]]:
    """Run benchmarks in turn; return what came of them, and the names of those that had no time to their end."""
    shares = list_shares(options.device)
    outcomes: list[Outcome] = []
    omitted: list[str] = []
    for number, name in enumerate(names, 1):
        left = max(0.0, 60 * options.minutes - (time.monotonic() - started))
        seconds = deal_seconds(name, names[number:], left, shares)
        began = time.monotonic()
        rest = MOST * 60 * options.minutes - (began - started)
        if rest <= 0:
            omitted.append(name)
            continue
        print(f"== {name} ({number} of {len(names)}, about {seconds:.0f} s)", flush=True)
        limit = min(rest, PATIENCE * seconds + GRACE_SECONDS)
        outcome = measure(name, seconds, limit=limit, package=PACKAGES[options.device])
        took = time.monotonic() - began
        print(f"took {took:.0f} s", flush=True)
        if outcome.error and took >= rest:
            omitted.append(name)
            if not outcome.figures:
                continue
        outcomes.append(outcome)
        write_json(options.json, machine, outcomes)
    return outcomes, omitted


def prepare_environments(names: Sequence[str]) -> None:
    """Make the environments of others before time is counted; what needs one fails by itself where that fails."""
    for make, benchmarks in ((find_torch, NEED_TORCH), (find_loaders, {"input_shares"})):
        try:
            if not benchmarks.isdisjoint(names):
                make()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"an environment cannot be made: {error}", file=sys.stderr)


def measure(name: str, seconds: float, *, limit: float, package: str = "benchmarks") -> Outcome:
    """Run one benchmark in a process of its own, which is ended where it takes much longer than it may.

    Args:
        name: of the module.
        seconds: that it should take.
        limit: seconds after which it is ended.
        package: of the module.
    """
    with tempfile.TemporaryDirectory() as folder:
        figures, errors = Path(folder) / "figures.json", Path(folder) / "errors"
        command = [sys.executable, "-m", f"{package}.{name}", "--budget_seconds", f"{MEASURED * seconds:g}"]
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [*command, "--json", str(figures)], stderr=stream, cwd=FOLDER.parent, start_new_session=True
            )
            try:
                status, ended = process.wait(timeout=limit), ""
            except subprocess.TimeoutExpired:
                status, ended = -1, f"took more than {limit:.0f} s and was ended"
            finally:
                end_group(process)
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        found = tuple(Figure(**one) for one in _load(figures))
    missed = any(not figure.passed for figure in found)
    if status == 0 or (status == 1 and missed and not any("Traceback" in line for line in lines)):
        return Outcome(name, found)
    sys.stderr.write("".join(f"{line}\n" for line in lines[-15:]))
    return Outcome(name, found, ended or (lines[-1] if lines else f"ended with status {status}"))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_json(path: Path, machine: Mapping[str, str], outcomes: Sequence[Outcome]) -> None:
    """All that is known by now: a run may be stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"benchmark": outcome.benchmark, "error": outcome.error, "figures": [vars(one) for one in outcome.figures]}
        for outcome in outcomes
    ]
    path.write_text(json.dumps({**machine, "benchmarks": rows}, indent=2) + "\n", encoding="utf-8")


def _load(path: Path) -> list[dict[str, Any]]:
    """Return the fields of each figure that was written, if any."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [{name: value for name, value in row.items() if name != "passed"} for row in rows]


if __name__ == "__main__":
    sys.exit(main())
