"""Make the pages of the API by reading the sources; nothing of the packages is imported.

Public are the modules that a package's README names, and the names in the `__all__` of the package and of these. A page
shows each module that defines one of them, and a package's first page lists the names with where they are, and the
modules with what they say of themselves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import griffe
from tools.docsite.documents import PACKAGES, ROOT


@dataclass(frozen=True)
class Api:
    """The public part of a package.

    Attributes:
        package: the import name, such as ``gaudi_ops``.
        names: each public name with the dotted path of what it stands for.
        modules: dotted paths of the modules to show, sorted, each with the first sentence of its docstring.
        undocumented: public names, shown modules, and public things of these, that have no docstring.
    """

    package: str
    names: Mapping[str, str]
    modules: Mapping[str, str]
    undocumented: tuple[str, ...]


@functools.cache
def read_apis(root: Path = ROOT) -> tuple[Api, ...]:
    """Read the public part of each package."""
    paths = [root / "packages" / name / "src" for name in PACKAGES]
    loader = griffe.GriffeLoader(search_paths=paths)
    for name in PACKAGES:
        loader.load(f"gaudi_{name}")
    loader.resolve_aliases(implicit=True)
    named = {name: _name_modules(loader, root, name) for name in PACKAGES}
    names = {name: _find_names(modules) for name, modules in named.items()}
    # A name of another package of ours is shown where it is defined.
    targets = {target for found in names.values() for target in found.values()}
    return tuple(_make_api(loader, named[name], names[name], targets) for name in PACKAGES)


def make_api_pages(apis: Sequence[Api]) -> Mapping[str, str]:
    """Return the Markdown of each page by its path: one for each package, and one for each of its public modules."""
    pages = {}
    for api in apis:
        pages[f"api/{api.package}/index.md"] = _list_names(api)
        for module in api.modules:
            pages[f"api/{api.package}/{_file_name(module)}"] = f"::: {module}\n"
    return pages


def _name_modules(loader: griffe.GriffeLoader, root: Path, name: str) -> list[griffe.Object | griffe.Alias]:
    """Return a package and the modules of it that its README names."""
    package = loader.modules_collection[f"gaudi_{name}"]
    readme = (root / "packages" / name / "README.md").read_text(encoding="utf-8")
    return [module for module in _list_modules(package) if module is package or _is_named(module.path, readme)]


def _find_names(modules: Sequence[griffe.Object | griffe.Alias]) -> dict[str, str]:
    """Return the names in the `__all__` of modules, each with the path of what it stands for."""
    names = {}
    for module in modules:
        for export in module.exports or ():
            target = module[str(export)]
            names[f"{module.path}.{export}"] = (target.final_target if target.is_alias else target).path
    return names


def _make_api(
    loader: griffe.GriffeLoader,
    named: Sequence[griffe.Object | griffe.Alias],
    names: Mapping[str, str],
    targets: Collection[str],
) -> Api:
    package = named[0].path
    shown = {module.path for module in named[1:]}
    for target in targets:
        found = loader.modules_collection[target]
        if found.package.path == package:
            shown.add((found if found.is_module else found.module).path)
    shown.discard(package)
    undocumented = {path for module in shown for path in _find_undocumented(loader.modules_collection[module])}
    undocumented |= {name for name, target in names.items() if not loader.modules_collection[target].has_docstring}
    modules = {module: _read_first_sentence(loader.modules_collection[module]) for module in sorted(shown)}
    undocumented |= {module for module, sentence in modules.items() if not sentence}
    return Api(package, names, modules, tuple(sorted(undocumented)))


def _read_first_sentence(module: griffe.Object | griffe.Alias) -> str:
    """Return the first sentence of a module's docstring, or nothing."""
    paragraph = module.docstring.value.strip().partition("\n\n")[0] if module.docstring else ""
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0].replace("\n", " ")


def _is_named(module: str, readme: str) -> bool:
    """Tell whether a README names a module, also without its package, or a thing in it by its whole path."""
    short = re.escape(module.partition(".")[2] or module)
    return bool(re.search(rf"`(?:{re.escape(module)}(?:\.\w+)?[`(]|{short}`)", readme))


def _list_modules(module: griffe.Object | griffe.Alias) -> list[griffe.Object | griffe.Alias]:
    """Return a module and all below it."""
    below = [part for part in module.modules.values() if not part.is_alias and not part.name.startswith("_")]
    return [module, *(each for part in below for each in _list_modules(part))]


def _find_undocumented(thing: griffe.Object | griffe.Alias) -> list[str]:
    """Return the public functions and classes of a module or class, and the methods of these, without a docstring."""
    found = []
    for name, member in thing.members.items():
        if name.startswith("_") or member.is_alias or member.is_module or member.is_attribute:
            continue
        if not member.has_docstring and not _overrides(member):
            found.append(member.path)
        if member.is_class:
            found += _find_undocumented(member)
    return found


def _overrides(member: griffe.Object | griffe.Alias) -> bool:
    """Tell whether a method stands for one of a base class, whose docstring holds."""
    return member.parent is not None and member.parent.is_class and bool(member.parent.bases)


def _list_names(api: Api) -> str:
    lines = [f"# API of {api.package.replace('_', '-')}\n", "| import | defined as |", "|---|---|"]
    for name, target in sorted(api.names.items(), key=lambda item: (item[0].count("."), item[0].lower())):
        shown = f"[`{target}`][{target}]" if target.startswith(f"{api.package}.") else f"`{target}`"
        lines.append(f"| `{name}` | {shown} |")
    lines += ["", "## Modules", "", "| module | what it does |", "|---|---|"]
    for module, sentence in api.modules.items():
        told = sentence.replace("|", r"\|")
        lines.append(f"| [`{module}`][{module}] | {told} |")
    return "\n".join(lines) + "\n"


def _file_name(module: str) -> str:
    return module.partition(".")[2] + ".md"
