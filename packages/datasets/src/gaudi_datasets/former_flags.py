"""Flags of earlier programs that the programs in their place do not have, each with what to give instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gaudi_datasets.arguments import Option, Word, find_option, read_switch, split_word
from gaudi_datasets.errors import FlagError

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
        """Whether it took no value."""
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
