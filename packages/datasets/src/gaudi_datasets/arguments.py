"""Rewrite command-line arguments to the form that the parser takes, and replace the flags of earlier programs.

The programs that ours replace read their flags by argparse or by absl. The forms of both are taken: a switch with a
value (`--clean=True`, `--clean false`, `--noclean`), and one dash or two before any name (`-batch_size`, `--bs`).
"""

from __future__ import annotations

import contextlib
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeAlias, Union

from gaudi_datasets.errors import FlagError

_NAME = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_TRUE, _FALSE = ("true", "t", "1"), ("false", "f", "0")


@dataclass(frozen=True)
class Option:
    """A flag that a program has.

    Attributes:
        flag: its long form.
        default: of a switch; None: it takes values.
    """

    flag: str
    default: bool | None = None


@dataclass(frozen=True)
class Word:
    """An argument that looks like a flag: its name without dashes and with underscores, and what stands behind `=`."""

    name: str
    value: str | None


def split_word(argument: str) -> Word | None:
    """Return the name and the value of an argument; None where it is no flag."""
    match = _NAME.fullmatch(argument)
    return None if match is None else Word(match[1].replace("-", "_"), match[2])


def normalize_arguments(argv: Sequence[str], config_class: Any, default: Any = None) -> list[str]:
    """Return the arguments with the long form of each flag, and each switch once, without a value, where it is on.

    Of a switch that is given several times the last counts, as of any flag. What is no flag of the program stays.

    Args:
        argv: the arguments.
        config_class: what the parser makes of them.
        default: a `config_class` that has the defaults; None: its own.

    Raises:
        FlagError: a switch has a value that is neither true nor false.
    """
    options = list_options(config_class, default)
    found: list[str | tuple[Option, bool]] = []
    place = 0
    while place < len(argv):
        argument, following = argv[place], argv[place + 1 : place + 2]
        word, place = split_word(argument), place + 1
        option, is_negated = (None, False) if word is None else find_option(word.name, options)
        if word is None or option is None:
            found.append(argument)
        elif option.default is None:
            found.append(option.flag if word.value is None else f"{option.flag}={word.value}")
        else:
            state, taken = read_switch(argument, word.value, following)
            place += taken
            found.append((option, state != is_negated))
    last = {entry[0].flag: place for place, entry in enumerate(found) if isinstance(entry, tuple)}
    result = []
    for place, entry in enumerate(found):
        if isinstance(entry, str):
            result.append(entry)
        elif last[entry[0].flag] == place and entry[1] != entry[0].default:
            result.append(entry[0].flag if entry[1] else f"--no_{entry[0].flag.removeprefix('--')}")
    return result


def read_switch(argument: str, value: str | None, following: Sequence[str]) -> tuple[bool, int]:
    """Return what a switch is set to, and how many of the arguments behind it say so.

    Args:
        argument: the switch as it was written, for an error.
        value: what stands behind its `=`.
        following: the next argument, if there is one.

    Raises:
        FlagError: the value is neither true nor false.
    """
    if value is None:
        stands_alone = not following or following[0].lower() not in ("true", "false")
        return (True, 0) if stands_alone else (following[0].lower() == "true", 1)
    if value.lower() not in (*_TRUE, *_FALSE):
        raise FlagError(f"{argument}: must be true or false", flag=argument.partition("=")[0])
    return value.lower() in _TRUE, 0


def is_switch_on(argv: Sequence[str], name: str) -> bool:
    """Return whether a switch is on, before the arguments are found to be good."""
    for place in reversed(range(len(argv))):
        word = split_word(argv[place])
        if word is not None and word.name == name:
            with contextlib.suppress(FlagError):  # which the parser raises again
                return read_switch(argv[place], word.value, argv[place + 1 : place + 2])[0]
    return False


def list_options(config_class: Any, default: Any = None) -> dict[str, Option]:
    """Return the flags of a dataclass, or of a union of them, by all their names.

    A name that is that of different flags in different subcommands is left out.
    """
    found: dict[str, Option] = {}
    ambiguous: set[str] = set()
    for names, option in _walk(config_class, default):
        for name in names:
            if found.setdefault(name, option) != option:
                ambiguous.add(name)
    return {name: option for name, option in found.items() if name not in ambiguous}


def find_option(name: str, options: Mapping[str, Option]) -> tuple[Option | None, bool]:
    """Return the flag of a name, and whether the name says that a switch is off, as `noclean` and `no_clean` do."""
    if name in options:
        return options[name], False
    for prefix in ("no_", "no"):
        option = options.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if option is not None and option.default is not None:
            return option, True
    return None, False


def _walk(annotation: Any, default: Any) -> Iterator[tuple[list[str], Option]]:
    """Yield every flag with its names."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (Union, types.UnionType):
        for each in typing.get_args(annotation):
            yield from _walk(each, None)
    if not (isinstance(annotation, type) and is_dataclass(annotation)):
        return
    hints = typing.get_type_hints(annotation, include_extras=True)
    for field in fields(annotation):
        value = field.default if default is None else getattr(default, field.name)
        inner = [*_walk(hints[field.name], None if default is None else value)]
        yield from inner or [_describe(field.name, value, hints[field.name])]


def _describe(name: str, default: Any, hint: Any) -> tuple[list[str], Option]:
    base, *metadata = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    for entry in metadata:  # what tyro.conf.arg gives
        name = getattr(entry, "name", None) or name
    aliases = [alias for entry in metadata for alias in getattr(entry, "aliases", None) or ()]
    option = Option(f"--{name}", default if base is bool and isinstance(default, bool) else None)
    return [name, *(alias.lstrip("-").replace("-", "_") for alias in aliases)], option


ON, OFF = "on", "off"

Replace: TypeAlias = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class FormerFlag:
    """A flag of an earlier program.

    Attributes:
        name: as it was written, with its dashes; without dashes an argument that was told by its place.
        answer: what to give in its place, or why there is nothing to give.
        short: its short form, with its dash; empty: it had none.
        default: as documents write it: `on` and `off` of a switch, `none`, `required`.
        meant: values that ask for what is done in any case; with one of them the flag is taken.
        replace: makes other arguments of its values.
    """

    name: str
    answer: str
    short: str = ""
    default: str = OFF
    meant: tuple[str, ...] = ()
    replace: Replace | None = None

    @property
    def is_switch(self) -> bool:
        """Return True for a flag that took no value."""
        return self.default in (ON, OFF)


class FormerFlagError(FlagError):
    """A flag of an earlier program; `answer` says what to give in its place."""

    def __init__(self, given: str, flag: FormerFlag) -> None:
        super().__init__(f"{given}: this flag of the original program is gone: {flag.answer}", flag=flag.name)
        self.answer = flag.answer


def rename(flag: str) -> Replace:
    """Return what gives the values to another flag."""
    return lambda values: [flag, *values]


def replace_former_flags(argv: Sequence[str], table: Sequence[FormerFlag]) -> list[str]:
    """Return the arguments without the flags of the table that were taken.

    Raises:
        FormerFlagError: a flag of the table asks for something that is not done.
    """
    flags = {flag.name: flag for flag in table}
    options: dict[str, Option] = {}
    for flag in table:
        for word in filter(None, map(split_word, (flag.name, flag.short))):
            options[word.name] = Option(flag.name, False if flag.is_switch else None)
    kept: list[str] = []
    place = 0
    while place < len(argv):
        argument, place = argv[place], place + 1
        found = split_word(argument)
        option, is_negated = (None, False) if found is None else find_option(found.name, options)
        if found is None or option is None:
            kept.append(argument)
            continue
        flag, following = flags[option.flag], argv[place:]
        if flag.is_switch:
            state, taken = read_switch(argument, found.value, following[:1])
            values: Sequence[str] = (ON if state != is_negated else OFF,)
        else:
            values = _read_values(found, following)
            taken = 0 if found.value is not None else len(values)
        place += taken
        kept += _take(flag, values, " ".join([argument, *following[:taken]]))
    return kept


def _read_values(word: Word, following: Sequence[str]) -> Sequence[str]:
    """Return what stands behind `=`, else the following arguments up to the next flag."""
    if word.value is not None:
        return [word.value]
    return [*itertools.takewhile(lambda each: split_word(each) is None, following)]


def _take(flag: FormerFlag, values: Sequence[str], given: str) -> Sequence[str]:
    if flag.replace is not None:
        return flag.replace(values)
    if any(_is_same(" ".join(values), each) for each in flag.meant):
        return ()
    raise FormerFlagError(given, flag)


def _is_same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one.casefold() == other.casefold()
