"""Trace the calls from each program's `main` to its train step, and check in the sources that each is a plain call.

`python tools/training_path.py` runs each program up to its first step, with random images, and writes the functions
that are on the stack then to `tools/training_paths.json`. It counts functions of the packages only: what Python's own
`contextlib` or the like has between them is no call to follow. `tests/test_training_path.py` compares the file with new
traces; `tools/structure.py` reads it without running anything, and checks each call of it in the sources.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
PATHS = Path("tools/training_paths.json")
# One step of random images, of a small network where there is a choice.
_CLASSIFIER = ("--use_synthetic_data", "--image_size", "32", "--batch_size", "2")
PROGRAMS: Mapping[str, Sequence[str]] = {
    "ssd_train": ("--use_fake_data", "--backbone", "resnet18", "--batch_size", "1", "--steps", "1", "--no_evaluate"),
    "resnet_train": (*_CLASSIFIER, "--model", "resnet18", "--train_steps", "1", "--skip_eval"),
    "resnext_train": (
        *_CLASSIFIER,
        "--model_type",
        "resnet",
        "--resnet_size",
        "18",
        "--max_train_steps",
        "1",
        "--disable_eval",
    ),
    "ssd_mxnet_train": ("--synthetic", "--batch-size", "1", "--steps", "1"),
}
STEP = "train_step"
LAMBDA = "<lambda>"


def trace(program: str, root: Path = ROOT) -> list[str]:
    """Run a program in a process of its own up to its first step.

    Args:
        program: its name.
        root: the checkout whose packages are run.

    Returns:
        The functions on the stack, from `main` to the step, as "path/below/root.py:Class.function".

    Raises:
        RuntimeError: the program ended without a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "path.json")
        sources = [str(path) for path in sorted(root.glob("packages/*/src"))]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
        command = [
            sys.executable,
            str(Path(__file__)),
            "--run",
            program,
            "--root",
            str(root),
            "--written",
            str(written),
        ]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        if not written.exists():
            raise RuntimeError(f"{program} ended with {done.returncode} before a step: {done.stderr[-2000:]}")
        path: list[str] = json.loads(written.read_text(encoding="utf-8"))
        return path


def run_to_step(program: str, root: Path, written: Path) -> None:
    """Run a program in this process, and end it at its first step, once the path is written."""
    sources = {str(path) for path in root.glob("packages/*/src/**/*.py")}

    def write(step: CodeType, frame: FrameType | None) -> NoReturn:
        functions = [name_function(step, root), *name_functions(frame, sources, root)][::-1]
        start = [name.rpartition(":")[::2] for name in functions].index((find_program(program, root), "main"))
        written.write_text(json.dumps(functions[start:]), encoding="utf-8")
        os._exit(0)

    sys.meta_path.insert(0, _StepFinder(sources, write))
    main = importlib.import_module(f"gaudi_apps.{program}").main
    main([*PROGRAMS[program], "--model_dir", "run"])


class _StepFinder:
    """Put a function in the place of each train step, in the classes of modules of ours, as Python imports them.

    To trace all calls until one is the step takes several times as long as the program itself.

    Args:
        sources: the files of the modules.
        write: called in place of the step, with its code and its caller.
    """

    def __init__(self, sources: set[str], write: Callable[[CodeType, FrameType | None], NoReturn]) -> None:
        self._sources, self._write = sources, write

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as Python does; Python calls this for each import."""
        spec = PathFinder.find_spec(name, path, target) if name.startswith("gaudi_") else None
        if spec is None or spec.origin not in self._sources or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            for each in vars(module).values():
                if isinstance(each, type) and each.__module__ == name and inspect.isfunction(vars(each).get(STEP)):
                    self._replace(each)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def _replace(self, owner: type) -> None:
        code = vars(owner)[STEP].__code__
        setattr(owner, STEP, lambda *_, **__: self._write(code, sys._getframe(1)))


def find_program(program: str, root: Path) -> str:
    """Return the path of a program's module below the root."""
    return (root / f"packages/apps/src/gaudi_apps/{program}.py").relative_to(root).as_posix()


def name_functions(frame: FrameType | None, sources: set[str], root: Path) -> Iterator[str]:
    """Yield the functions on the stack that are the packages' own, the innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in sources and (not code.co_name.startswith("<") or code.co_name == LAMBDA):
            yield name_function(code, root)
        frame = frame.f_back


def name_function(code: CodeType, root: Path) -> str:
    """Return the function that a code is of, as "path/below/root.py:Class.function"."""
    return f"{Path(code.co_filename).relative_to(root).as_posix()}:{qualify(code)}"


def qualify(code: CodeType) -> str:
    """Return the name of a function, with that of its class."""
    if code.co_name == LAMBDA:
        return LAMBDA
    tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))
    for name, node in find_functions(tree).items():
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        if first == code.co_firstlineno and node.name == code.co_name:
            return name
    return code.co_name


def find_functions(tree: ast.AST, prefix: str = "") -> dict[str, ast.FunctionDef]:
    """Return the functions of a module, by their names with those of their classes and of functions around them."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found[f"{prefix}{node.name}"] = node
        inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef | ast.FunctionDef) else prefix
        found |= find_functions(node, inner)
    return found


def read_paths(root: Path) -> dict[str, list[str]]:
    """Return the recorded path of each program."""
    paths: dict[str, list[str]] = json.loads((root / PATHS).read_text(encoding="utf-8"))
    return paths


def find_indirect(path: Sequence[str], root: Path) -> list[str]:
    """Return what of a path is no plain call by name: lambdas, and functions that are passed on or taken from a table.

    Raises:
        LookupError: the sources have no such function, so the path is to be traced anew.
    """
    faults = []
    for caller, called in itertools.pairwise(path):
        name = called.rpartition(":")[2]
        _find_function(called, root)
        if name == LAMBDA:
            faults.append(f"{caller} calls a lambda")
        elif (node := _find_function(caller, root)) is not None and name not in set(_list_calls(node, name)):
            faults.append(f"{caller} has no call of {name}")
    return faults


def _find_function(function: str, root: Path) -> ast.FunctionDef | None:
    file, _, name = function.rpartition(":")
    if name == LAMBDA:
        return None
    functions = find_functions(ast.parse((root / file).read_text(encoding="utf-8"))) if (root / file).exists() else {}
    if name not in functions:
        raise LookupError(f"there is no {function}: trace the path anew, by `python tools/training_path.py`")
    return functions[name]


def _list_calls(function: ast.FunctionDef, name: str) -> Iterator[str]:
    """Yield `name` where the function calls what is so named: a function, a method, or a class by its constructor."""
    class_name, _, last = name.rpartition(".")
    wanted = {class_name.rpartition(".")[2]} if last == "__init__" else {last}
    pending: list[ast.AST] = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Lambda | ast.FunctionDef):
            continue
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in wanted:
            yield name
        pending += ast.iter_child_nodes(node)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trace all programs and write their paths, or run one up to its step."""
    parser = argparse.ArgumentParser(description="Trace the calls from each program's main to its train step.")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--run", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--written", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run is not None:
        run_to_step(options.run, options.root, options.written)
        return
    paths = {program: trace(program, options.root) for program in PROGRAMS}
    for program, path in paths.items():
        print(f"{program}:", *path, sep="\n  ")
    (options.root / PATHS).write_text(json.dumps(paths, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
