"""Rewrite command-line arguments to the form that the parser takes, and replace the flags of earlier programs.

The programs that ours replace read their flags by argparse or by absl. The forms of both are taken: a switch with a
value (`--clean=True`, `--clean false`, `--noclean`), one dash or two before any name (`-batch_size`, `--bs`), and a
value that is glued to a short form of one letter (`-b4`).
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar, Union

from gaudi_datasets.errors import FlagError, GaudiError

_NAME = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_GLUED = re.compile(r"-([A-Za-z])([^=].*)", re.DOTALL)
_TRUE, _FALSE = ("true", "t", "1"), ("false", "f", "0")


@dataclass(frozen=True)
class Option:
    """A flag that a program has.

    Attributes:
        flag: its long form.
        default: of a switch; None: it takes values.
        read: what the program makes of the words of its value; None: as its type says.
    """

    flag: str
    default: bool | None = None
    read: Callable[[Sequence[str]], Any] | None = field(default=None, compare=False)


def split_word(argument: str) -> tuple[str, str | None] | None:
    """Return the name of a flag, without dashes and with underscores, and what stands behind `=`; None for no flag."""
    match = _NAME.fullmatch(argument)
    return None if match is None else (match[1].replace("-", "_"), match[2])


def normalize_arguments(argv: Sequence[str], config_class: Any) -> list[str]:
    """Return the arguments with the long form of each flag, and each switch once, without a value, where it is on.

    Of a switch that is given several times the last counts, as of any flag. What is no flag of the program stays.

    Args:
        argv: the arguments.
        config_class: what the parser makes of them.

    Raises:
        FlagError: a switch has a value that is neither true nor false.
    """
    options = list_options(config_class)
    argv = _unglue(argv, options)
    found: list[str | tuple[Option, bool]] = []
    place = 0
    while place < len(argv):
        argument = argv[place]
        option, value, place = _read_flag(argv, place, options)
        if option is None:
            found.append(argument)
        elif isinstance(value, bool):
            found.append((option, value))
        else:
            found.append(option.flag if value is None else f"{option.flag}={value}")
    last = {entry[0].flag: place for place, entry in enumerate(found) if isinstance(entry, tuple)}
    result = []
    for place, entry in enumerate(found):
        if isinstance(entry, str):
            result.append(entry)
        elif last[entry[0].flag] == place and entry[1] != entry[0].default:
            result.append(entry[0].flag if entry[1] else f"--no_{entry[0].flag.removeprefix('--')}")
    return result


def list_typed(argv: Sequence[str], config_class: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the flags among some arguments, in their order.

    Each is its long form, the word as it was written with its dashes, and its values, of which a switch has none.
    """
    options, place = list_options(config_class), 0
    argv = _unglue(argv, options)
    while place < len(argv):
        begin = place
        option, value, place = _read_flag(argv, begin, options)
        if option is None:
            continue
        values: Iterable[str] = ()
        if isinstance(value, str):
            values = [value]
        elif value is None:
            values = itertools.takewhile(lambda each: split_word(each) is None, argv[place:])
        yield option.flag, argv[begin].partition("=")[0], tuple(values)


def list_given(argv: Sequence[str], config_class: Any) -> frozenset[str]:
    """Return the names of the flags among some arguments, by their long forms, without dashes."""
    return frozenset(flag.removeprefix("--") for flag, _, _ in list_typed(argv, config_class))


def name_as_typed(error: GaudiError, argv: Sequence[str], config_class: Any) -> None:
    """Make an error name each flag as it was written, where that is another name of it, and value likewise."""
    options = list_options(config_class)
    last = {flag: (word, values) for flag, word, values in list_typed(argv, config_class)}
    for flag, (word, values) in last.items():
        option = options.get(word.lstrip("-").replace("-", "_"))
        if option is None:  # a switch that is turned off
            continue
        known = {flag, *(f"--{name}" for name, other in options.items() if other == option)}
        if error.flag in known:
            error.flag = word
        if error.args:
            error.args = (_rename(str(error.args[0]), word, values, option), *error.args[1:])
        error.remedy = error.remedy and _rename(error.remedy, word, values, option)


def _rename(text: str, word: str, values: Sequence[str], option: Option) -> str:
    """Return a text with a flag as it was written, but not in the commands that it quotes.

    The parser's texts have all names of a flag, with slashes between.
    """
    others = r"(?:-{1,2}[A-Za-z][\w-]*/)*", r"(?:/-{1,2}[A-Za-z][\w-]*)*"
    name = rf"(?<![\w/-]){others[0]}{re.escape(option.flag)}{others[1]}(?![\w-])"
    text = re.sub(f"`[^`]*`|{name}", lambda found: found[0] if found[0][0] == "`" else word, text)
    if option.read is not None:
        with contextlib.suppress(ValueError):  # which the parser raises
            read = option.read(values[:1])
            text = text.replace(f"{word} {read}:", f"{word} {values[0]}:")
    return text


def _unglue(
    argv: Sequence[str], options: Mapping[str, Option], others: Mapping[str, Option] | None = None
) -> list[str]:
    """Return as many arguments, with `=` between a short form and a value that is glued to it.

    What is a flag itself stays, and so does what may be a misspelled one, so that it is refused as such.

    Args:
        argv: the arguments.
        options: the flags whose values may be glued to them, by their names.
        others: further flags.
    """
    known = {**(others or {}), **options}

    def split(argument: str) -> str:
        match, word = _GLUED.fullmatch(argument), split_word(argument)
        option = None if match is None else options.get(match[1])
        if match is None or option is None or option.default is not None:
            return argument
        alike = [name for name in known if name[0] == match[1] and len(name) > 1]
        is_misspelled = word is not None and difflib.get_close_matches(word[0], alike, n=1, cutoff=0.8)
        return argument if is_misspelled else f"-{match[1]}={match[2]}"

    return [split(argument) for argument in argv]


def _read_flag(
    argv: Sequence[str], place: int, options: Mapping[str, Option]
) -> tuple[Option | None, str | bool | None, int]:
    """Return the flag at a place (None: no flag), its value, and the place behind both.

    The value of a switch is a bool, that of another flag what stands behind its `=`.
    """
    if (word := split_word(argv[place])) is None:
        return None, None, place + 1
    name, value = word
    option, prefix = options.get(name), ""
    if option is None:  # a switch may be turned off as `noclean` and `no_clean` do
        prefix = "no_" if name.startswith("no_") and name[3:] in options else "no"
        option = options.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if option is None or option.default is None:
            return None, None, place + 1
    if option.default is None:
        return option, value, place + 1
    state, taken = read_switch(argv[place], value, argv[place + 1 : place + 2])
    return option, state != bool(prefix), place + 1 + taken


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
        if word is not None and word[0] == name:
            with contextlib.suppress(FlagError):  # which the parser raises again
                return read_switch(argv[place], word[1], argv[place + 1 : place + 2])[0]
    return False


@cache
def list_options(config_class: Any) -> Mapping[str, Option]:
    """Return the flags of a dataclass, or of a union of them, by all their names.

    A name that is that of different flags in different subcommands is left out.
    """
    found: dict[str, Option] = {}
    ambiguous: set[str] = set()
    for _, flags in walk_groups(config_class):
        for entry, hint in flags:
            base, *metadata = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
            names, read = [entry.name], None
            for data in metadata:  # what tyro.conf.arg and tyro's constructors give
                names[0] = getattr(data, "name", None) or names[0]
                names += [alias.lstrip("-").replace("-", "_") for alias in getattr(data, "aliases", None) or ()]
                read = getattr(data, "instance_from_str", read)
            default = entry.default if base is bool and isinstance(entry.default, bool) else None
            option = Option(f"--{names[0]}", default, read)
            ambiguous.update(each for each in names if found.setdefault(each, option) != option)
    return {name: option for name, option in found.items() if name not in ambiguous}


def walk_groups(annotation: Any) -> Iterator[tuple[type, list[tuple[Field[Any], Any]]]]:
    """Yield each dataclass of flags in an annotation, with the fields of its own flags and their types.

    Unions, fields that are dataclasses themselves, and generic dataclasses with their arguments are looked into.
    """
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (Union, types.UnionType):
        for each in typing.get_args(annotation):
            yield from walk_groups(each)
    group = typing.get_origin(annotation) or annotation
    if not (isinstance(group, type) and is_dataclass(group)):
        return
    arguments = dict(zip(getattr(group, "__parameters__", ()), typing.get_args(annotation), strict=False))
    hints = typing.get_type_hints(group, include_extras=True)
    own = []
    for entry in fields(group):
        hint = hints[entry.name]
        inner = [*walk_groups(arguments.get(hint) if isinstance(hint, TypeVar) else hint)]
        yield from inner
        if not inner:
            own.append((entry, hint))
    yield group, own


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


def replace_former_flags(argv: Sequence[str], table: Sequence[FormerFlag], config_class: Any = None) -> list[str]:
    """Return the arguments without the flags of the table that were taken.

    Args:
        argv: the arguments.
        table: the former flags.
        config_class: what the parser makes of the others; their names are no short form with its value.

    Raises:
        FormerFlagError: a flag of the table asks for something that is not done.
    """
    flags = {flag.name: flag for flag in table}
    options: dict[str, Option] = {}
    for flag in table:
        for word in filter(None, map(split_word, (flag.name, flag.short))):
            options[word[0]] = Option(flag.name, False if flag.is_switch else None)
    kept: list[str] = []
    typed, argv, place = argv, _unglue(argv, options, list_options(config_class)), 0
    while place < len(argv):
        begin = place
        option, value, place = _read_flag(argv, begin, options)
        if option is None:
            kept.append(argv[begin])
            continue
        flag = flags[option.flag]
        values: Sequence[str]
        if isinstance(value, bool):
            values = [ON if value else OFF]
        elif value is not None:
            values = [value]
        else:  # the following arguments up to the next flag
            values = [*itertools.takewhile(lambda each: split_word(each) is None, argv[place:])]
            place += len(values)
        if flag.replace is not None:
            kept += flag.replace(values)
        elif not any(_is_same(" ".join(values), each) for each in flag.meant):
            raise FormerFlagError(" ".join(typed[begin:place]), flag)
    return kept


def _is_same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one.casefold() == other.casefold()
