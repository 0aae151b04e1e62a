"""Torture the programs: faults while they run and between runs, power loss, and inputs that are wrong.

    python -m tests.torture
    python -m tests.torture --minutes 60 --seed 1
    python -m tests.torture --case "convert begin kill@17"
    python -m tests.torture --input npz runs/torture/inputs/npz-1234
    python -m tests.torture --planted

Ends with 1 where a third outcome was found, or where more than two planted bugs were missed. See docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.torture import shim

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "runs" / "torture"
JOBS, COUNT = 2, 200
PLANTED_MINUTES = 60.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="torture", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, help="the budget, beside the preparation (default: see --count)")
    told = f"do so many jobs, the same ones for a seed (default: {COUNT}, which take some three minutes)"
    parser.add_argument("--count", type=int, help=told)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--programs", nargs="+", metavar="P", help="only these programs, and no inputs")
    parser.add_argument("--only", nargs="+", choices=("faults", "inputs", "power"), help="only these kinds of jobs")
    parser.add_argument("--targets", nargs="+", metavar="T", help="of inputs, only these readers")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"at a time (default: {JOBS})")
    parser.add_argument("--case", help="repeat one case")
    parser.add_argument("--input", nargs=2, metavar=("TARGET", "FILE"), help="repeat one input")
    parser.add_argument("--planted", action="store_true", help="plant thirty bugs, and see which are found in the time")
    parser.add_argument("--bugs", nargs="+", metavar="WORD", help="plant only those whose names hold a word")
    parser.add_argument("--record", type=Path, help="write the third outcomes as JSON to this file, too")
    parser.add_argument("--known", type=Path, help="end with the first third outcome that is not in this record")
    options = parser.parse_args(arguments)
    if options.minutes is None and options.planted:
        options.minutes = PLANTED_MINUTES
    if options.minutes is None and options.count is None:
        options.count = COUNT
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; return its exit status."""
    options = parse(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    if options.planted:
        from tests.torture import planted

        return planted.main(options, REPORT)
    shim.preload(shim.build(Path(tempfile.gettempdir()) / f"torture-{os.getuid()}"))
    from tests.torture import jobs

    REPORT.mkdir(parents=True, exist_ok=True)
    with work_folder() as work:
        if options.input:
            return jobs.repeat_input(options.input[0], options.input[1], work)
        found = jobs.run(options, work, REPORT)
    text = jobs.render(found)
    print(text)
    if not options.case:
        (REPORT / "report.md").write_text(text)
    if options.record:
        options.record.write_text(json.dumps(found.notes))
    return int(found.has_thirds)


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Give a folder of this process, which is removed with all that cases leave there."""
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    owner = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
