"""The forms in which argparse and absl take flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

import pytest
import tyro

from gaudi_datasets.arguments import is_switch_on, list_given, list_options, normalize_arguments
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags

Switch = tyro.conf.FlagCreatePairsOff[bool]
Data = TypeVar("Data")


@dataclass(frozen=True)
class Group:
    """A group of flags."""

    skip_eval: Annotated[Switch, tyro.conf.arg(aliases=["-se"])] = False
    """off by default"""
    use_cosine_lr: bool = True
    """on by default"""
    no_hpu: Switch = False
    """a name that begins as a negation does"""


@dataclass(frozen=True)
class Flags:
    """Some flags."""

    group: Group = field(default_factory=Group)
    clean: Switch = False
    """off by default"""
    train_epochs: Annotated[float, tyro.conf.arg(aliases=["-te"])] = 1.0
    """a number"""
    source: Annotated[str, tyro.conf.arg(name="from")] = ""
    """of another name"""
    inference: tuple[str, ...] = ()
    """some names"""


def parse(*argv: str) -> Flags:
    return parse_flags(Flags, argv, prog="prog")


ON = ["--clean", "--clean=True", "--clean=true", "--clean=t", "--clean=1", "--clean True", "--clean true", "-clean"]
OFF = ["", "--clean=False", "--clean=f", "--clean=0", "--clean False", "--noclean", "--no_clean", "--no-clean"]


@pytest.mark.parametrize(("text", "state"), [*((each, True) for each in ON), *((each, False) for each in OFF)])
def test_a_switch_is_written_as_argparse_and_absl_take_it(text: str, state: bool) -> None:
    assert parse(*text.split(), "--from", "x") == Flags(clean=state, source="x")


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("--nouse_cosine_lr", False),
        ("--use_cosine_lr=False", False),
        ("--use-cosine-lr false", False),
        ("", True),
        ("--use_cosine_lr", True),
        ("--no_use_cosine_lr --use_cosine_lr=True", True),
    ],
)
def test_a_switch_that_is_on_can_be_turned_off(text: str, state: bool) -> None:
    assert parse(*text.split()).group.use_cosine_lr is state


@pytest.mark.parametrize(("text", "state"), [("--no_hpu", True), ("--no_hpu=False", False), ("--nono_hpu", False)])
def test_a_name_that_begins_as_a_negation_is_none(text: str, state: bool) -> None:
    assert parse(text).group.no_hpu is state


@pytest.mark.parametrize(
    ("text", "state"), [("--clean --clean=False", False), ("--clean=False --noclean --clean", True)]
)
def test_the_last_one_counts(text: str, state: bool) -> None:
    assert parse(*text.split()).clean is state


@pytest.mark.parametrize("text", ["-te 3", "--te 3", "-train_epochs 3", "--train-epochs=3", "-te=3", "--te=3"])
def test_one_dash_and_two_are_alike(text: str) -> None:
    assert parse(*text.split()).train_epochs == 3


def test_values_are_left_as_they_are() -> None:
    given = parse("--inference", "True", "no_such", "a b", "--from=--clean", "-te", "-3", "-se", "true")
    expected = Flags(
        group=Group(skip_eval=True), source="--clean", train_epochs=-3, inference=("True", "no_such", "a b")
    )
    assert given == expected


@pytest.mark.parametrize("text", ["--clean=yes", "-se=", "--noclean=2"])
def test_a_switch_takes_no_other_value(text: str) -> None:
    with pytest.raises(FlagError, match=re.escape(text)):
        parse(text)


def test_a_switch_is_given_only_where_it_differs_from_its_default() -> None:
    assert normalize_arguments(["--use_cosine_lr"], Flags) == []
    assert normalize_arguments(["--use_cosine_lr=False"], Flags) == ["--no_use_cosine_lr"]


def test_a_name_of_two_flags_is_neither() -> None:
    @dataclass(frozen=True)
    class Other:
        to: Annotated[str, tyro.conf.arg(aliases=["-te"])] = ""

    options = list_options(Flags | Other)
    assert "te" not in options
    assert options["to"].flag == "--to"
    assert normalize_arguments(["-te", "3"], Flags | Other) == ["-te", "3"]


@pytest.mark.parametrize(
    ("text", "state"),
    [("--debug", True), ("--debug=False", False), ("--debug False", False), ("x", False), ("--debug --debug=x", True)],
)
def test_one_switch_is_read_before_all_are_found_good(text: str, state: bool) -> None:
    assert is_switch_on(text.split(), "debug") is state


@dataclass(frozen=True)
class Short:
    """Flags with short forms of one letter."""

    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])] = 32
    """a number"""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = ""
    """a folder"""
    clean: Annotated[Switch, tyro.conf.arg(aliases=["-c"])] = False
    """a switch"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-b4", Short(4)),
        ("-b4 -o/tmp/a=b", Short(4, "/tmp/a=b")),
        ("-b-4", Short(-4)),
        ("-oDIR -c", Short(output="DIR", clean=True)),
        ("-output DIR", Short(output="DIR")),
    ],
)
def test_a_value_may_be_glued_to_a_short_form(text: str, expected: Short) -> None:
    assert parse_flags(Short, text.split(), prog="prog") == expected
    assert ("batch_size" in list_given(text.split(), Short)) == (expected.batch_size != 32)


def test_a_misspelled_name_is_no_short_form() -> None:
    assert normalize_arguments(["-outptu", "DIR"], Short) == ["-outptu", "DIR"]


@dataclass(frozen=True)
class Files:
    """Some files."""

    recursive: Switch = False
    """in folders, too"""


@dataclass(frozen=True)
class Show(Generic[Data]):
    """Show data of any kind."""

    data: Data
    count: Annotated[int, tyro.conf.arg(aliases=["-c"])] = 1
    """a number"""


def test_flags_of_the_argument_of_a_generic_class_are_known() -> None:
    command: Any = Annotated[Show[Files], tyro.conf.subcommand("files")] | Annotated[Flags, tyro.conf.subcommand("all")]
    given = parse_flags(command, ["files", "--recursive=True", "-c=3"], prog="prog")
    assert given == Show(Files(recursive=True), 3)
