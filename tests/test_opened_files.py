"""Files are opened, written and renamed in one module, `gaudi_ops.files`, which refuses what is no regular file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWNER = "gaudi_ops/files.py"
METHODS = {"read_bytes", "read_text", "write_bytes", "write_text", "touch"}
FUNCTIONS = {
    *("open", "io.open", "os.open", "os.fdopen", "os.rename", "os.replace", "shutil.copy", "shutil.move"),
    *("tempfile.mkstemp", "tempfile.mkdtemp", "tempfile.NamedTemporaryFile"),
}
ALLOWED = {
    ("gaudi_apps/inference/converters.py", "hold_stderr", "open"),  # a descriptor
    ("gaudi_apps/inference/converters.py", "run_signatures", "read_bytes"),  # runs without our packages
    ("gaudi_apps/runtime/session.py", "__enter__", "open"),  # /dev/null
    *(("gaudi_ops/program.py", function, "os.open") for function in ("open_output", "write")),  # /dev/null
    ("gaudi_apps/inference/serving/server.py", "_read_template", "read_text"),  # a file of the package
    ("gaudi_ops/tf/hpu.py", "load_hpu_operations", "read_text"),  # a file of the package
    ("gaudi_datasets/arguments.py", "replace_former_flags", "replace"),  # a method of flags
    # Whole folders.
    ("gaudi_apps/inference/exporter.py", "write_exports", "os.replace"),
    ("gaudi_apps/inference/serving/layouts.py", "_publish", "rename"),
    ("gaudi_apps/training/checkpoint.py", "_publish", "rename"),
    ("gaudi_apps/training/recording.py", "write_recording", "rename"),
    ("gaudi_datasets/detection/scenes.py", "make_scenes", "rename"),
    ("gaudi_datasets/fetching/archives.py", "extract", "rename"),
    ("gaudi_datasets/output_files.py", "resumable_folder", "rename"),
    # gaudi_distributed imports none of our packages.
    *(("gaudi_distributed/cluster/hosts.py", "read_regular_file", name) for name in ("open", "os.open")),
    *(("gaudi_distributed/cluster/hosts.py", "write_file", name) for name in ("open", "os.open", "os.replace")),
    ("gaudi_distributed/devices/machine.py", "read", "open"),  # of /proc and /sys
    ("gaudi_distributed/launch/choices.py", "_check_interpreter", "open"),  # the first line of a program
    ("gaudi_distributed/launch/guard.py", "list_children", "read_text"),  # of /proc
    ("gaudi_distributed/launch/guard.py", "_find_mpi_ranks", "read_bytes"),  # of /proc
    # Folders of Open MPI's files, and their locks.
    *(("gaudi_distributed/devices/machine.py", "_open_folder", name) for name in ("os.open", "tempfile.mkdtemp")),
    ("gaudi_distributed/devices/machine.py", "_remove_left", "os.open"),
    *(("gaudi_distributed/errors.py", function, "os.open") for function in ("open_output", "write")),  # /dev/null
    ("gaudi_distributed/errors.py", "open_log", "os.open"),  # a log that grows
    ("gaudi_distributed/doctor/engines.py", "_read_build", "read_text"),  # of an installed distribution
    # In the user's cache.
    *(("gaudi_distributed/comm/horovod_wheel.py", "run_logged", name) for name in ("open", "read_bytes")),
    *(("gaudi_distributed/comm/horovod_wheel.py", "build_wheel", name) for name in ("shutil.copy", "replace")),
    ("gaudi_distributed/comm/horovod_wheel.py", "write_compiler", "write_text"),  # in the folder of the build
}


def find_calls(node: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """Yield the function and the name of each call that opens, writes or renames a file by its path."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            name = ast.unparse(child.func)
            method = child.func.attr if isinstance(child.func, ast.Attribute) else ""
            mode = child.args[0].value if child.args and isinstance(child.args[0], ast.Constant) else None
            opens = method == "open" and isinstance(mode, str) and set(mode) <= set("rwaxbt+")
            renames = method in ("rename", "replace") and len(child.args) == 1
            if name in FUNCTIONS:
                yield function, name
            elif method in METHODS or opens or renames:
                yield function, method
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield from find_calls(child, inner)


def test_one_module_opens_files() -> None:
    found = set()
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        name = path.as_posix().partition("/src/")[2]
        if name != OWNER:
            found |= {(name, *call) for call in find_calls(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("call", "name"),
    [("open(x)", "open"), ("x.open('wb')", "open"), ("os.replace(a, b)", "os.replace"), ("a.rename(b)", "rename")],
)
def test_a_call_elsewhere_is_found(call: str, name: str) -> None:
    assert [*find_calls(ast.parse(f"def f():\n    g({call})"))] == [("f", name)]
