"""Flags from a YAML file under those of the command line.

The file's entries are put in front of the command line as flags, so both are read, converted and checked the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gaudi_apps.cli.flag_rules import find_aliases, find_rules, list_flags
from gaudi_apps.runtime.errors import ConfigFileError
from gaudi_datasets.arguments import FormerFlag, list_given, list_typed, name_as_typed
from gaudi_datasets.errors import FlagError, GaudiError, MissingInputError
from gaudi_datasets.flags import parse_flags

Config = TypeVar("Config")


def parse_config(
    config_class: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    former_flags: Sequence[FormerFlag] = (),
    choose: Callable[[Config, frozenset[str]], Sequence[str]] | None = None,
) -> Config:
    """Make a `config_class` from the command line, from the YAML file that --config names, and from presets.

    The command line wins over the file, and both win over the presets of a flag, see `gaudi_apps.cli.flag_rules`, and
    over a recipe.

    Args:
        config_class: a dataclass.
        argv: the command line.
        prog: the program's name.
        description: what stands at the top of its help text.
        former_flags: of the program that this one replaces.
        choose: returns the flags of a recipe, from the flags without it and the names of those that are given.

    Raises:
        FlagError: a flag of the command line is unknown or has a value it does not take.
        ConfigFileError: the same in the file, or the file is no YAML mapping of flags to values.
        MissingInputError: there is no such file.
    """
    path, from_file = _read_file(config_class, argv, former_flags)
    if path is not None:
        try:
            _parse(config_class, from_file, prog=prog, former_flags=former_flags)
        except FlagError as error:
            raise ConfigFileError(str(error), path=path, flag=error.flag) from None
    given = [*from_file, *argv]
    complete = [*_list_preset(config_class, given), *given]
    config = _parse(config_class, complete, prog=prog, description=description, former_flags=former_flags)
    chosen = [] if choose is None else choose(config, list_given(given, config_class))
    if not chosen:
        return config
    return _parse(config_class, [*chosen, *complete], prog=prog, former_flags=former_flags)


def _parse(config_class: type[Config], argv: Sequence[str], **options: Any) -> Config:
    """Parse flags; a value that the original took is answered with the reason that it is gone."""
    try:
        return parse_flags(config_class, argv, **options)
    except FlagError as error:
        rules = find_rules(config_class)
        for typed in list_typed(argv, config_class):
            gone = rules[typed.flag.removeprefix("--")].gone
            for value in typed.values:
                if typed.word == error.flag and value in gone:
                    raise FlagError(f"{typed.word} {value}: {gone[value]}", flag=typed.word) from None
        raise


@contextlib.contextmanager
def naming_as_typed(
    config_class: type[Any], argv: Sequence[str], former_flags: Sequence[FormerFlag] = ()
) -> Iterator[None]:
    """Make errors name the flags as the command line and the file of --config write them."""
    try:
        yield
    except GaudiError as error:
        words = list(argv)
        with contextlib.suppress(GaudiError, OSError, UnicodeDecodeError):
            words = [*_read_file(config_class, argv, former_flags)[1], *argv]
        with contextlib.suppress(FlagError):  # a switch with a wrong value, which is the error itself
            name_as_typed(error, words, config_class)
        raise


def _read_file(
    config_class: type[Any], argv: Sequence[str], former_flags: Sequence[FormerFlag]
) -> tuple[Path | None, list[str]]:
    """Return the file that --config names, and its flags."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?")
    path = finder.parse_known_args(argv)[0].config
    return (None, []) if path is None else (Path(path), read_flags(Path(path), config_class, former_flags))


def _list_preset(config_class: type[Any], argv: Sequence[str]) -> list[str]:
    """Return the flags that the presets among some arguments stand for."""
    words: list[str] = []
    for name, flag in find_rules(config_class).items():
        if not flag.presets:
            continue
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument(f"--{name}", nargs="?")
        chosen = getattr(finder.parse_known_args(argv)[0], name)
        if chosen is None:
            continue
        if chosen not in flag.presets:
            raise FlagError(f"--{name} {chosen}: must be one of {', '.join(flag.presets)}", flag=f"--{name}")
        for other, value in flag.presets[chosen].items():
            words += [f"--{other}" if value else f"--no_{other}"] if isinstance(value, bool) else [f"--{other}={value}"]
    return words


def read_flags(path: Path, config_class: type[Any], former_flags: Sequence[FormerFlag] = ()) -> list[str]:
    """Return the entries of a YAML file as command-line arguments; null stands for the default.

    Raises:
        ConfigFileError: no YAML, no mapping, or an entry that is no flag of `config_class` (with the nearest one).
        MissingInputError: there is no such file.
    """
    import yaml

    if not path.is_file():
        raise MissingInputError(
            f"--config {path}: there is no such file", flag="--config", remedy="give a YAML file of flags"
        )
    try:
        entries = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ConfigFileError(f"is not YAML: {' '.join(str(error).split())}", path=path) from None
    if not isinstance(entries, dict):
        raise ConfigFileError(f"holds {_describe_kind(entries)}", path=path, remedy="write one `flag: value` a line")
    _drop_former_default(entries)
    own = dict(list_flags(config_class()))
    aliases = {alias: own[name] for alias, name in find_aliases(config_class).items()}
    defaults = {**dict.fromkeys(_list_names(former_flags)), **aliases, **own}
    return [argument for name, value in entries.items() for argument in _to_arguments(path, name, value, defaults)]


def _drop_former_default(entries: dict[Any, Any]) -> None:
    """Drop the 8 workers a machine that earlier versions wrote beside every run, also beside one of one process."""
    has_engine = entries.get("use_horovod") or entries.get("distribution_strategy", "off") != "off"
    if entries.get("num_workers_per_hls") == 8 and not has_engine:
        del entries["num_workers_per_hls"]


def _list_names(former_flags: Sequence[FormerFlag]) -> Iterator[str]:
    for flag in former_flags:
        yield flag.name.removeprefix("--").replace("-", "_")


def _to_arguments(path: Path, name: Any, value: Any, defaults: dict[str, Any]) -> list[str]:
    flag = str(name).replace("-", "_")
    if flag not in defaults or flag == "config":
        nearest = difflib.get_close_matches(flag, defaults, n=1, cutoff=0.5)
        remedy = f"did you mean {nearest[0]}?" if nearest and flag != "config" else "remove it"
        raise ConfigFileError(f"{name}: is no flag that a file can give", path=path, field=str(name), remedy=remedy)
    if value is None:
        return []
    if isinstance(defaults[flag], bool):
        if not isinstance(value, bool):
            raise ConfigFileError(f"{name}: holds {value!r}", path=path, field=str(name), remedy="write true or false")
        return [] if value == defaults[flag] else [f"--{flag}" if value else f"--no_{flag}"]
    if isinstance(value, dict):
        remedy = "give a value, flags stand at the top level"
        raise ConfigFileError(f"{name}: holds {_describe_kind(value)}", path=path, field=str(name), remedy=remedy)
    if isinstance(value, list):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}={value}"]


def _describe_kind(value: Any) -> str:
    kinds = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return kinds.get(type(value), "a single value")
