"""Mutation check: change one operator or number of a module at a time, and list the changes that no test notices.

Cosmic Ray finds and makes the mutants. Each one is imported in place of its module by a process forked from this one,
which has pytest and the libraries loaded, so no file is changed and no mutant waits for imports.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import gc
import importlib
import io
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from hypothesis import HealthCheck, Phase, settings

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "runs" / "mutation.md"
MEMORY = 16 * 2**30  # bytes of addresses of one process: a mutant may ask for any size
MOST_SURVIVORS = 10.0  # percent of the mutants
EXAMPLES = 100  # of each property, as in CI
LONGEST = 600  # seconds of a module's tests
SLACK = 20  # seconds that a mutant may take besides
LIBRARIES = (
    "hotcoco",
    "hypothesis.extra.numpy",
    "pycocotools.cocoeval",
    "rich.table",
    "safetensors.numpy",
    "tensorflow",
)
OPS, DATASETS, APPS = (f"packages/{name}/tests" for name in ("ops", "datasets", "apps"))
# The tests of each module, quick ones first: all of its package's NumPy half, or those that are about it.
TESTS: dict[str, tuple[str, ...]] = {
    **{
        f"gaudi_ops.{name}": (f"{OPS}/test_{name}.py", *(f"{OPS}/test_{other}.py" for other in others))
        for name, others in {
            "anchors": ("coding", "matching", "targets"),
            "boxes": ("anchors", "coding", "matching", "nms", "targets"),
            "reference": (),
            "schedules": (),
            "targets": ("coding", "matching"),
        }.items()
    },
    "gaudi_datasets.sampling": (f"{DATASETS}/test_sampling.py",),
    "gaudi_datasets.detection.scoring": (
        f"{DATASETS}/detection/test_scoring.py",
        f"{DATASETS}/detection/test_scoring_oracle.py",
    ),
    "gaudi_apps.training.checkpoint": (
        f"{APPS}/training/test_chosen_checkpoints.py",
        f"{APPS}/training/test_checkpoints.py",
    ),
    "gaudi_apps.inference.evaluator": (
        f"{APPS}/inference/test_evaluator.py",
        f"{APPS}/training/test_training.py::test_the_best_checkpoint_is_kept_besides_the_newest",
    ),
}


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    Attributes:
        module: the module's name.
        path: the module's file.
        operator: Cosmic Ray's name of the kind of change.
        source: the whole file after the change.
    """

    module: str
    path: Path
    operator: str
    source: str

    def diff(self) -> str:
        """Return the change as a unified diff without context."""
        before, after = (text.splitlines() for text in (self.path.read_text(encoding="utf-8"), self.source))
        name = str(self.path.relative_to(ROOT))
        return "\n".join(difflib.unified_diff(before, after, name, self.operator, n=0, lineterm=""))


class MutantLoader(SourceFileLoader):
    """Loads a mutant's source in place of its file, and imports everything else as usual."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(mutant.path))
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        """Compile the mutant; compiled code of the file is neither read nor written."""
        return compile(self._mutant.source, self.path, "exec", dont_inherit=True)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the mutant, as an entry of `sys.meta_path`."""
        if name != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self._mutant.path, loader=self)


def find_mutants(modules: Iterable[str], seed: int, sample: int | None) -> Iterator[Mutant]:
    """Yield mutants in a random order that the seed decides: so many, or all with None."""
    operators = {name: get_operator(name) for name in operator_names()}
    places: list[tuple[str, str, int]] = []
    for module in modules:
        nodes = list(ast_nodes(get_ast(read_module(module)[1])))
        for name, operator in operators.items():
            if not operator.arguments():  # the others need to be told what to insert
                made = operator()
                count = sum(len(list(made.mutation_positions(node))) for node in nodes)
                places += [(module, name, occurrence) for occurrence in range(count)]
    # Each by a number of its own: a change of one module leaves the order of the others' mutants as it is.
    places.sort(key=lambda place: random.Random(f"{seed} {place}").random())
    mutants = (make_mutant(module, name, occurrence) for module, name, occurrence in places)
    yield from itertools.islice((mutant for mutant in mutants if mutant is not None), sample)


def make_mutant(module: str, operator: str, occurrence: int) -> Mutant | None:
    """Make one mutant; None where it is no Python, or computes the same for sure."""
    path, before, code = read_module(module)
    after = mutate_code(before, get_operator(operator)(), occurrence)
    with contextlib.suppress(SyntaxError):  # an asterisk before arguments is taken for an operator, too
        if after is not None and dump_code(after) != code:
            return Mutant(module, path, operator.removeprefix("core/"), after)
    return None


@functools.cache
def read_module(module: str) -> tuple[Path, str, str]:
    """Return the file of a module of ours, its source and its `dump_code`, without importing its package."""
    package, *rest = module.split(".")
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; run `nox -s mutation`")
    path = Path(spec.submodule_search_locations[0], *rest).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    return path, source, dump_code(source)


def dump_code(source: str) -> str:
    """Return the syntax tree of a module as text, without annotations and the marks `*` and `/` between parameters."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            node.args = node.posonlyargs + node.args + node.kwonlyargs
            node.defaults += [value for value in node.kw_defaults if value is not None]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def run_tests(mutant: Mutant | None, module: str, folder: Path) -> None:
    """Run a module's tests on a mutant, or on the code as it is, and end this process with pytest's exit status."""
    os.setsid()  # what the tests start ends with them
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if mutant is not None:
        sys.meta_path.insert(0, MutantLoader(mutant))
    # The same examples in every run, and no search for the smallest one that fails.
    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    same = settings(untimed, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
    settings.register_profile("mutation", same, max_examples=EXAMPLES)
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'files'}", "--hypothesis-profile=mutation"]
    status = int(pytest.main([*options, *TESTS[module]]))
    if status == 0 and module not in sys.modules:
        print(f"{module} is not imported by its tests", flush=True)
        status = 1
    os._exit(status)


def examine(mutant: Mutant | None, module: str, limit: float) -> str:
    """Return what became of a mutant in so many seconds: killed, survived or timeout; None is the code as it is.

    Raises:
        SystemExit: the tests fail on the code as it is.
    """
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    process = get_context("fork").Process(target=run_tests, args=(mutant, module, folder))
    process.start()
    try:
        process.join(limit)
        if mutant is None and process.exitcode != 0:
            log = (folder / "log").read_text(encoding="utf-8")
            raise SystemExit(f"{log}\n{module}: these tests fail though nothing is changed; mend them first")
        return "timeout" if process.exitcode is None else "killed" if process.exitcode else "survived"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(process.pid), signal.SIGKILL)  # type: ignore[arg-type]  # it was started
        process.join()
        shutil.rmtree(folder, ignore_errors=True)


def choose_limits(modules: Iterable[str]) -> dict[str, float]:
    """Return the seconds that a mutant of each module may take: five times what the tests take without a change."""
    limits = {}
    for module in modules:
        began = time.monotonic()
        examine(None, module, LONGEST)
        limits[module] = SLACK + 5 * (time.monotonic() - began)
    return limits


def examine_all(mutants: Sequence[Mutant], limits: Mapping[str, float], jobs: int) -> list[str]:
    """Return the outcome of each mutant; so many are examined at a time."""
    modules = [mutant.module for mutant in mutants]
    outcomes = []
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        for outcome in pool.map(examine, mutants, modules, [limits[module] for module in modules]):
            outcomes.append(outcome)
            print(f"\r{len(outcomes)}/{len(mutants)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return outcomes


def render(mutants: Sequence[Mutant], outcomes: Sequence[str]) -> str:
    """Return the counts of each module and the survivors' diffs, as Markdown."""
    lines = ["| module | mutants | killed | timeouts | survived | share |", "|---|---|---|---|---|---|"]
    for module in (*TESTS, "all"):
        found = [end for one, end in zip(mutants, outcomes, strict=True) if module in (one.module, "all")]
        if found:
            counts = [found.count(name) for name in ("killed", "timeout", "survived")]
            share = f"{counts[-1] / len(found):.1%}"
            lines.append("| " + " | ".join([module, *map(str, (len(found), *counts)), share]) + " |")
    for name in ("survived", "timeout"):
        diffs = sorted(one.diff() for one, outcome in zip(mutants, outcomes, strict=True) if outcome == name)
        lines += [f"\n## {name}\n", *(f"```diff\n{diff}\n```" for diff in diffs)] if diffs else []
    return "\n".join(lines) + "\n"


def warm_up() -> None:
    """Load pytest's plugins and the libraries, and keep garbage collection of forked processes off their pages."""
    for name in LIBRARIES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-p", "no:cacheprovider", empty])
    gc.collect()
    gc.freeze()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 1 where more mutants survive than may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=400, help="mutants to try, drawn from all (default: 400)")
    parser.add_argument("--all", action="store_true", help="try all mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument(
        "--most_survivors",
        type=float,
        default=MOST_SURVIVORS,
        help=f"percent that may survive before this ends with 1 (default: {MOST_SURVIVORS:g})",
        metavar="P",
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument(
        "--modules", nargs="+", choices=TESTS, default=list(TESTS), help="modules to change", metavar="M"
    )
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    warm_up()
    began = time.monotonic()
    limits = choose_limits(options.modules)
    mutants = list(find_mutants(options.modules, options.seed, None if options.all else options.sample))
    outcomes = examine_all(mutants, limits, options.jobs)
    text = render(mutants, outcomes)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(text, encoding="utf-8")
    share = 100 * outcomes.count("survived") / max(len(outcomes), 1)
    print(f"{text}\n{time.monotonic() - began:.0f} s; also in {REPORT.relative_to(ROOT)}")
    print(f"{share:.1f} % survived; at most {options.most_survivors:g} % may")
    return int(share > options.most_survivors)


if __name__ == "__main__":
    sys.exit(main())
