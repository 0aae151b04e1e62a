"""Measure how the project is laid out, and fail where a figure is worse than the one that is recorded.

`python tools/structure.py` prints a table of the figures, each with its target and its limit in `tools/structure.json`.
It ends with 1 where a figure is above its limit. `--show FIGURE` lists what was counted, `--tighten` lowers each limit
to what was measured, but not below its target. Nothing but Python is needed: the sources are read, not run.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script it is not started from the root

from tools.glossary import find_hits  # noqa: E402
from tools.imports import find_importers, find_longest_path, read_modules, walk_statements  # noqa: E402
from tools.training_path import find_indirect, read_paths  # noqa: E402

LIMITS = Path("tools/structure.json")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
SMALL_MODULE_LINES = 80
QUESTIONS = ("What", "How", "Whether")
# Four words in a row; numbers may stand between them.
_WORD = r"[A-Za-z][a-z']*"
PROSE = re.compile(rf"(?<![\w/.=-]){_WORD}(?:[,;:]? (?:\d+ )?{_WORD}){{3}}(?![\w/=])")


@dataclass(frozen=True)
class Figure:
    """Hold a measured figure.

    Attributes:
        name: what was measured.
        value: the lower the better.
        found: a line for each thing that was counted, or what explains the value.
    """

    name: str
    value: int
    found: Sequence[str] = ()


class Sources:
    """Read the Python files of a checkout once.

    Args:
        root: of the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parse = functools.cache(ast.parse)
        self.modules = read_modules(root, self.parse)
        folders = ("packages", "tests", "tools", "benchmarks")
        paths = [*root.glob("*.py"), *(path for folder in folders for path in (root / folder).rglob("*.py"))]
        texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
        self.lines = {name: len(text.splitlines()) for name, text in texts.items()}
        self.texts = texts
        trees = {name: self.parse(text, str(root / name)) for name, text in texts.items()}
        self.statements = {name: list(walk_statements(tree)) for name, tree in trees.items()}
        self.tests = {name for name in texts if name.startswith("tests/") or "/tests/" in name}
        self.packaged = {name for name in texts if re.match(r"packages/\w+/src/", name)}

    def walk(self, names: Iterable[str]) -> Iterator[tuple[str, ast.AST]]:
        """Yield each module and each statement of some files, with the file's name."""
        for name in sorted(names):
            for node in self.statements[name]:
                yield name, node


def measure_training_path(sources: Sources) -> list[Figure]:
    """Count the calls from `main` to the train step, and the files that they are in, of the worst program.

    A path of n functions has n - 1 calls. Both are of the packages' own functions, see `tools/training_path.py`.
    """
    paths = read_paths(sources.root)
    calls, files = (
        {name: len(path) - 1 for name, path in paths.items()},
        {name: len({function.rpartition(":")[0] for function in path}) for name, path in paths.items()},
    )
    lines = [line for name, path in paths.items() for line in (f"{name}:", *(f"  {each}" for each in path))]
    indirect = [f"{name}: {each}" for name, path in paths.items() for each in find_indirect(path, sources.root)]
    return [
        Figure("calls from main to the train step", max(calls.values(), default=0), lines),
        Figure("files of these calls", max(files.values(), default=0), lines),
        Figure("lambdas and calls by table among them", len(indirect), indirect),
    ]


def measure_modules(sources: Sources) -> list[Figure]:
    """Count modules, entries at the top of gaudi_apps, modules in a folder, and small ones of one importer."""
    figures = []
    for package in ("gaudi_apps", "gaudi_distributed"):
        names = [name for name in sources.packaged if f"/{package}/" in name]
        figures.append(Figure(f"modules of {package}", len(names), sorted(names)))
    top = sources.root / "packages/apps/src/gaudi_apps"
    entries = sorted(path.name for path in top.glob("[!.]*") if path.is_dir() or path.suffix == ".py")
    entries = [name for name in entries if name != "__pycache__"]
    folders = Counter(name.rpartition("/")[0] for name in sources.packaged)
    importers = find_importers(sources.modules)
    small = [
        f"{name}: {module.lines} lines, imported by {importers[name][0]}"
        for name, module in sources.modules.items()
        if len(importers[name]) == 1 and module.lines < SMALL_MODULE_LINES and module.path.stem != "__init__"
    ]
    return [
        *figures,
        Figure("entries at the top of gaudi_apps", len(entries), entries),
        Figure(
            "most modules in one folder",
            max(folders.values(), default=0),
            [f"{count} {folder}" for folder, count in folders.most_common()],
        ),
        Figure(f"modules of one importer, below {SMALL_MODULE_LINES} lines", len(small), small),
    ]


def measure_imports(sources: Sources) -> list[Figure]:
    """Count the imports along the longest path between modules of gaudi_apps, those for types alone left out."""
    path = find_longest_path({name: each for name, each in sources.modules.items() if each.package == "gaudi_apps"})
    return [Figure("imports on the longest path in gaudi_apps", max(0, len(path) - 1), path)]


def measure_sizes(sources: Sources) -> list[Figure]:
    """Count the packages' source lines, and files and functions that are too long to be read at once.

    A function is counted without its docstring. The packages' tests may be long.
    """
    kept = {name for name in sources.lines if name not in sources.tests}
    files = [f"{name}: {sources.lines[name]} lines" for name in kept if sources.lines[name] > MAX_FILE_LINES]
    functions = [
        f"{name}:{node.lineno}: {node.name}: {length} lines"
        for name, node in sources.walk(kept)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := count_lines(node)) > MAX_FUNCTION_LINES
    ]
    total = sum(sources.lines[name] for name in sources.packaged)
    parts = Counter[str]()
    for name in sources.packaged:
        parts[name.split("/")[1]] += sources.lines[name]
    return [
        Figure("source lines of the packages", total, [f"{lines} {name}" for name, lines in parts.most_common()]),
        Figure(f"files above {MAX_FILE_LINES} lines", len(files), sorted(files)),
        Figure(f"functions above {MAX_FUNCTION_LINES} lines", len(functions), functions),
    ]


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function, without its docstring."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        length -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return length


def measure_docstrings(sources: Sources) -> list[Figure]:
    """Count docstrings that begin as a question, in the packages' sources and in everything else."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    figures = []
    for where, names in (("sources", sources.packaged), ("tests and tools", set(sources.texts) - sources.packaged)):
        found = [
            f"{name}:{node.body[0].lineno}: {docstring.splitlines()[0]}"
            for name, node in sources.walk(names)
            if isinstance(node, kinds)
            and (docstring := ast.get_docstring(node))
            and docstring.split(maxsplit=1)[0] in QUESTIONS
        ]
        figures.append(Figure(f"docstrings that begin with What, How or Whether, in {where}", len(found), found))
    return figures


def measure_concepts(sources: Sources) -> list[Figure]:
    """Count dataclasses and protocols of the packages, and how many there are in 10,000 of their lines, rounded up."""
    found = [
        f"{name}:{node.lineno}: {node.name}"
        for name, node in sources.walk(sources.packaged)
        if isinstance(node, ast.ClassDef)
        and (
            any(_last_name(each) == "dataclass" for each in node.decorator_list)
            or any(_last_name(base) == "Protocol" for base in node.bases)
        )
    ]
    lines = sum(sources.lines[name] for name in sources.packaged)
    return [
        Figure("dataclasses and protocols", len(found), found),
        Figure(
            "density of dataclasses and protocols, in 10,000 lines", -(-10_000 * len(found) // max(1, lines)), found
        ),
    ]


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, of what is called or subscripted too."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return getattr(node, "attr", getattr(node, "id", ""))


def measure_words(sources: Sources) -> list[Figure]:
    """Count places of words that `tools/glossary.py` lists, one a line and word."""
    found = [str(hit) for hit in find_hits(sources.root, parse=sources.parse)]
    return [Figure("former words of the glossary", len(found), found)]


def measure_prose(sources: Sources) -> list[Figure]:
    """Count test functions that assert four or more words of prose in a row.

    Strings count in assertions, in `match=` of `pytest.raises`, in arguments of helpers named `assert_...`, and in the
    table of `pytest.mark.parametrize`.
    """
    found = [
        f"{name}:{node.lineno}: {node.name}: {text!r}"
        for name, node in sources.walk(sources.tests)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and (text := next((one for one in list_asserted(node) if PROSE.search(one)), None)) is not None
    ]
    return [Figure("tests that assert four or more words of prose", len(found), found)]


def list_asserted(test: ast.FunctionDef) -> Iterator[str]:
    """Yield the strings that a test function compares with."""
    parts: list[ast.AST] = list(test.decorator_list)
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            parts.append(node.test)
        elif isinstance(node, ast.Call):
            parts += [keyword.value for keyword in node.keywords if keyword.arg == "match"]
            parts += node.args if _last_name(node.func).startswith("assert_") else ()
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def measure_mxnet(sources: Sources) -> list[Figure]:
    """Count lines of gaudi_apps that name MXNet outside of the files and folders that are named by it."""
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in sorted(sources.packaged)
        if name.startswith("packages/apps/") and "mxnet" not in name
        for number, line in enumerate(sources.texts[name].splitlines(), 1)
        if "mxnet" in line
    ]
    return [Figure("lines of gaudi_apps that name mxnet elsewhere", len(found), found)]


MEASURES: tuple[Callable[[Sources], list[Figure]], ...] = (
    measure_training_path,
    measure_modules,
    measure_imports,
    measure_sizes,
    measure_docstrings,
    measure_concepts,
    measure_words,
    measure_prose,
    measure_mxnet,
)


def measure(root: Path) -> list[Figure]:
    """Measure all figures of a checkout."""
    sources = Sources(root)
    return [figure for each in MEASURES for figure in each(sources)]


def check(figures: Iterable[Figure], limits: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each figure that is above its limit or has none, and for each limit without a figure."""
    values = {figure.name: figure.value for figure in figures}
    faults = [f"{name}: {LIMITS} has no limit of it" for name in values if name not in limits]
    faults += [f"{name}: {LIMITS} has a limit of it, but it is not measured" for name in limits if name not in values]
    return faults + [
        f"{name}: {value}, and no more than {limits[name]['limit']} are allowed; `--show '{name}'` lists them"
        for name, value in values.items()
        if name in limits and value > limits[name]["limit"]
    ]


def tighten(figures: Iterable[Figure], limits: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the limits, each lowered to what was measured, but not below its target."""
    values = {figure.name: figure.value for figure in figures}
    return {
        name: {
            "target": each["target"],
            "limit": min(each["limit"], max(each["target"], values.get(name, each["limit"]))),
        }
        for name, each in limits.items()
    }


def format_table(figures: Iterable[Figure], limits: Mapping[str, Mapping[str, int]]) -> str:
    """Return a line for each figure: its value, target and limit, and whether it reaches the target."""
    rows: list[tuple[str, ...]] = [("figure", "now", "target", "limit", "")]
    for figure in figures:
        bounds = limits.get(figure.name, {})
        reached = "yes" if figure.value <= bounds.get("target", -1) else "not yet"
        rows.append((figure.name, str(figure.value), *(str(bounds.get(n, "")) for n in ("target", "limit")), reached))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:<{width}}" + "".join(f"{each:>8}" for each in rest) for name, *rest in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or what one figure counts; returns 1 where a figure is above its limit."""
    parser = argparse.ArgumentParser(description="Measure how the project is laid out.")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout")
    parser.add_argument("--show", metavar="FIGURE", help="list what it counted; the beginning of its name is enough")
    parser.add_argument("--tighten", action="store_true", help=f"lower the limits in {LIMITS} to what was measured")
    options = parser.parse_args(arguments)
    try:
        figures = measure(options.root)
    except LookupError as error:
        print(f"structure: {error.args[0]}", file=sys.stderr)
        return 1
    limits = json.loads((options.root / LIMITS).read_text(encoding="utf-8"))
    if options.show is not None:
        for figure in figures:
            if figure.name.startswith(options.show):
                print(f"{figure.name}: {figure.value}", *figure.found, sep="\n  ")
        return 0
    if options.tighten:
        limits = tighten(figures, limits)
        (options.root / LIMITS).write_text(json.dumps(limits, indent=2) + "\n", encoding="utf-8")
    print(format_table(figures, limits))
    for fault in (faults := check(figures, limits)):
        print(f"structure: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    gc.disable()  # millions of nodes are looked through for garbage, and stay until the end
    sys.exit(main())
