"""Who may import whom: the arrows between the packages, no cycles, no module that is a drawer for everything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ARROWS: dict[str, set[str]] = {
    "gaudi_ops": set(),
    "gaudi_datasets": {"gaudi_ops"},
    "gaudi_models": {"gaudi_ops"},
    "gaudi_distributed": set(),
    "gaudi_apps": {"gaudi_ops", "gaudi_datasets", "gaudi_models", "gaudi_distributed"},
}
DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc"}
VENDORS = {"horovod", "habana_frameworks"}
# Horovod's module for each framework is imported by one of ours.
PARTS = {"horovod": ("horovod.tensorflow", "horovod.mxnet")}
TENSORFLOW = {"tensorflow", "tf_keras", "keras"}


@dataclass(frozen=True)
class Module:
    """A module of ours: dotted name, file, the names it imports anywhere, and those it imports at its top level."""

    name: str
    path: Path
    imports: frozenset[str]
    top_imports: frozenset[str]

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def read_modules(root: Path) -> dict[str, Module]:
    """Read every module below packages/*/src, by dotted name."""
    files = {name_module(path): path for path in sorted(root.glob("packages/*/src/**/*.py"))}
    modules = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        every = frozenset(find_imports(ast.walk(tree), path, files))
        top = frozenset(find_imports(iter(tree.body), path, files))
        modules[name] = Module(name, path, every, top)
    return modules


def name_module(path: Path) -> str:
    """Return the dotted name of a file below a src folder."""
    parts = path.with_suffix("").parts
    parts = parts[len(parts) - 1 - parts[::-1].index("src") + 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(nodes: Iterator[ast.AST], path: Path, files: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that import statements among the nodes name; `from a import b` is a.b if that is a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name_module(path.parent / "__init__.py").split(".")
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base


def find_faults(modules: dict[str, Module]) -> list[str]:
    """Return a line for each breach of the rules."""
    return [
        *(fault for module in modules.values() for fault in check_module(module)),
        *check_vendors(modules),
        *(f"import cycle: {' -> '.join(cycle)}" for cycle in find_cycles(modules)),
    ]


def check_module(module: Module) -> Iterator[str]:
    packages = {name.partition(".")[0] for name in module.imports}
    for package in sorted((packages & set(ARROWS)) - ARROWS[module.package] - {module.package}):
        yield f"{module.name} imports {package}: there is no such arrow"
    for part in module.name.split("."):
        if part in DRAWERS:
            yield f"{module.name} is named {part}: name it by what it is about"
    if module.package == "gaudi_ops" and not module.name.startswith("gaudi_ops.tf"):
        if packages & TENSORFLOW:
            yield f"{module.name} imports TensorFlow: that belongs below gaudi_ops.tf"
        if any(name.startswith("gaudi_ops.tf") for name in module.top_imports):
            yield f"{module.name} imports gaudi_ops.tf: the top level of gaudi_ops works without TensorFlow"


def check_vendors(modules: dict[str, Module]) -> Iterator[str]:
    for vendor in sorted(VENDORS):
        users = [m for m in modules.values() if any(name.partition(".")[0] == vendor for name in m.imports)]
        for module in users:
            if module.package != "gaudi_distributed":
                yield f"{module.name} imports {vendor}: only gaudi_distributed may"
        for part in PARTS.get(vendor, (vendor,)):
            names = [m.name for m in users if any(f"{name}.".startswith(f"{part}.") for name in m.imports)]
            if len(names) > 1:
                yield f"{part} is imported by {', '.join(names)}: one module may"


def find_cycles(modules: dict[str, Module]) -> list[list[str]]:
    """Return the cycles met by going depth first, each from its first name on; none exactly if there is none."""
    cycles: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            cycle = trail[trail.index(name) :]
            start = cycle.index(min(cycle))
            cycles.append([*cycle[start:], *cycle[:start], cycle[start]])
        elif name not in done:
            for target in sorted(modules[name].imports & set(modules)):
                visit(target, [*trail, name])
            done.add(name)

    for name in sorted(modules):
        visit(name, [])
    return cycles


def test_the_project_keeps_to_the_arrows() -> None:
    modules = read_modules(ROOT)
    assert {module.package for module in modules.values()} == set(ARROWS)
    assert find_faults(modules) == []


CLEAN = {
    "ops/src/gaudi_ops/__init__.py": "from gaudi_ops import boxes\n",
    "ops/src/gaudi_ops/boxes.py": "import numpy\n",
    "ops/src/gaudi_ops/tf/__init__.py": "import tensorflow\nfrom gaudi_ops import boxes\n",
    "datasets/src/gaudi_datasets/__init__.py": "def f():\n    from gaudi_ops.boxes import g\n",
    "distributed/src/gaudi_distributed/habana.py": "import habana_frameworks.tensorflow\n",
    "distributed/src/gaudi_distributed/horovod.py": "import horovod.tensorflow\n",
    "distributed/src/gaudi_distributed/mxnet.py": "import horovod.mxnet\n",
}


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        (
            "ops/src/gaudi_ops/a.py",
            "import gaudi_models.ssd",
            "gaudi_ops.a imports gaudi_models: there is no such arrow",
        ),
        (
            "datasets/src/gaudi_datasets/a.py",
            "def f():\n    from gaudi_distributed import devices",
            "gaudi_datasets.a imports gaudi_distributed: there is no such arrow",
        ),
        (
            "apps/src/gaudi_apps/ssd/utils.py",
            "",
            "gaudi_apps.ssd.utils is named utils: name it by what it is about",
        ),
        (
            "models/src/gaudi_models/common/a.py",
            "",
            "gaudi_models.common.a is named common: name it by what it is about",
        ),
        (
            "apps/src/gaudi_apps/a.py",
            "import horovod.mxnet",
            "gaudi_apps.a imports horovod: only gaudi_distributed may",
        ),
        (
            "distributed/src/gaudi_distributed/a.py",
            "def f():\n    import habana_frameworks",
            "habana_frameworks is imported by gaudi_distributed.a, gaudi_distributed.habana: one module may",
        ),
        (
            "distributed/src/gaudi_distributed/a.py",
            "import horovod.mxnet as hvd",
            "horovod.mxnet is imported by gaudi_distributed.a, gaudi_distributed.mxnet: one module may",
        ),
        (
            "ops/src/gaudi_ops/nms.py",
            "def f():\n    import tensorflow",
            "gaudi_ops.nms imports TensorFlow: that belongs below gaudi_ops.tf",
        ),
        (
            "ops/src/gaudi_ops/nms.py",
            "from gaudi_ops.tf import masks",
            "gaudi_ops.nms imports gaudi_ops.tf: the top level of gaudi_ops works without TensorFlow",
        ),
        (
            "ops/src/gaudi_ops/boxes.py",
            "from . import tf",
            "import cycle: gaudi_ops.boxes -> gaudi_ops.tf -> gaudi_ops.boxes",
        ),
        (
            "ops/src/gaudi_ops/boxes.py",
            "import gaudi_ops",
            "import cycle: gaudi_ops -> gaudi_ops.boxes -> gaudi_ops",
        ),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, path: str, text: str, fault: str) -> None:
    for name, content in (CLEAN | {path: text}).items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert fault in find_faults(read_modules(tmp_path))


def test_a_clean_tree_has_no_faults(tmp_path: Path) -> None:
    for name, content in CLEAN.items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert find_faults(read_modules(tmp_path)) == []
