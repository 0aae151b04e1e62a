"""Read the modules of the packages and what they import, and find imports that break the project's rules.

`tests/test_arrows.py` holds the project to the rules, `tools/structure.py` measures the graph.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """A module of the packages.

    Attributes:
        name: dotted.
        path: of its file.
        lines: of its file.
        imports: the names that it imports anywhere, for types alone too.
        used_imports: those that it imports when it runs: not those that only a type checker reads.
        top_imports: those that it imports at its top level.
    """

    name: str
    path: Path
    lines: int
    imports: frozenset[str]
    used_imports: frozenset[str]
    top_imports: frozenset[str]

    @property
    def package(self) -> str:
        """Return the name of the package that is imported."""
        return self.name.partition(".")[0]


def read_modules(root: Path, parse: Callable[[str, str], ast.Module] = ast.parse) -> dict[str, Module]:
    """Read every module below packages/*/src, by dotted name; `parse` gives the tree of a text and its path."""
    files = {name_module(path): path for path in sorted(root.glob("packages/*/src/**/*.py"))}
    modules = {}
    for name, path in files.items():
        text = path.read_text(encoding="utf-8")
        tree = parse(text, str(path))
        parts = (walk_statements(tree), walk_used(tree), tree.body)
        found = [frozenset(find_imports(nodes, path, files)) for nodes in parts]
        modules[name] = Module(name, path, len(text.splitlines()), *found)
    return modules


def name_module(path: Path) -> str:
    """Return the dotted name of a file below a src folder."""
    parts = path.with_suffix("").parts
    parts = parts[len(parts) - 1 - parts[::-1].index("src") + 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements below it: no expression holds one, so nine of ten nodes need no look."""
    yield node
    for child in list_statements(node):
        yield from walk_statements(child)


def walk_used(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements below it, but for what stands under `if TYPE_CHECKING`."""
    yield node
    is_guard = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    for child in node.orelse if isinstance(node, ast.If) and is_guard else list_statements(node):
        yield from walk_used(child)


def list_statements(node: ast.AST) -> list[ast.AST]:
    """Return the statements that a node holds itself, and those parts of it that hold some: `except` and `case`."""
    blocks = ("body", "handlers", "orelse", "finalbody", "cases")
    return [child for name in blocks for child in getattr(node, name, ())]


def find_imports(nodes: Iterable[ast.AST], path: Path, files: Mapping[str, Path]) -> Iterator[str]:
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


def find_faults(modules: Mapping[str, Module]) -> list[str]:
    """Return a line for each breach of the rules."""
    return [
        *(fault for module in modules.values() for fault in check_module(module)),
        *check_vendors(modules),
        *(f"import cycle: {' -> '.join(cycle)}" for cycle in find_cycles(modules)),
    ]


def check_module(module: Module) -> Iterator[str]:
    """Yield the breaches in one module: arrows, its name, TensorFlow where NumPy is enough."""
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


def check_vendors(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield the modules that import a vendor's module and may not."""
    for vendor in sorted(VENDORS):
        users = [m for m in modules.values() if any(name.partition(".")[0] == vendor for name in m.imports)]
        for module in users:
            if module.package != "gaudi_distributed":
                yield f"{module.name} imports {vendor}: only gaudi_distributed may"
        for part in PARTS.get(vendor, (vendor,)):
            names = [m.name for m in users if any(f"{name}.".startswith(f"{part}.") for name in m.imports)]
            if len(names) > 1:
                yield f"{part} is imported by {', '.join(names)}: one module may"


def find_cycles(modules: Mapping[str, Module]) -> list[list[str]]:
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


def find_longest_path(modules: Mapping[str, Module]) -> list[str]:
    """Return the longest chain of modules of which each imports the next when it runs.

    Raises:
        ValueError: the modules import each other in a cycle.
    """
    if cycles := find_cycles(modules):
        raise ValueError(f"import cycle: {' -> '.join(cycles[0])}")
    paths: dict[str, list[str]] = {}

    def visit(name: str) -> list[str]:
        if name not in paths:
            below = (visit(target) for target in sorted(modules[name].used_imports & set(modules)))
            paths[name] = [name, *max(below, key=len, default=[])]
        return paths[name]

    return max((visit(name) for name in sorted(modules)), key=len, default=[])


def find_importers(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Return the modules that import each module, by its name."""
    importers: dict[str, list[str]] = {name: [] for name in modules}
    for module in modules.values():
        for target in sorted(module.imports & set(modules) - {module.name}):
            importers[target].append(module.name)
    return importers
