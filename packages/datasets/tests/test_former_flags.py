"""Flags of earlier programs are taken where they ask for what is done, and else answered."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gaudi_datasets.arguments import OFF, ON, FormerFlag, FormerFlagError, rename, replace_former_flags
from gaudi_datasets.cli import find_former_flags
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags

TABLE = (
    FormerFlag("--loss-scale", "leave it out", "-ls", "none", meant=("1", "dynamic")),
    FormerFlag("--enable_xla", "set TF_XLA_FLAGS", meant=(OFF,)),
    FormerFlag("--use_function", "leave it out", default=ON, meant=(ON,)),
    FormerFlag("--raw_dir", "give --folder", "-r", "required", replace=rename("--folder")),
    FormerFlag("input_file", "give --folder", default="required"),
)


@dataclass(frozen=True)
class Flags:
    """Flags of the present program."""

    folder: str = ""
    """a folder"""


@pytest.mark.parametrize(
    "text",
    [
        "--loss-scale 1",
        "--loss_scale=1.0",
        "-ls Dynamic",
        "--ls=1",
        "--enable_xla=False",
        "--noenable_xla",
        "--enable_xla false",
        "--use_function",
        "--use_function=True",
        "--use_function --enable_xla=0 -ls 1",
    ],
)
def test_what_is_done_in_any_case_may_be_asked_for(text: str) -> None:
    assert replace_former_flags(["--a", *text.split(), "-b"], TABLE) == ["--a", "-b"]


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("--loss_scale 128", "--loss-scale"),
        ("-ls=2", "--loss-scale"),
        ("-ls", "--loss-scale"),
        ("--loss_scale 1 2", "--loss-scale"),
        ("--enable_xla", "--enable_xla"),
        ("--nouse_function", "--use_function"),
    ],
)
def test_what_is_not_done_is_answered(text: str, flag: str) -> None:
    with pytest.raises(FormerFlagError) as error:
        parse_flags(Flags, ["--folder", "x", *text.split()], prog="prog", former_flags=TABLE)
    answer = next(each.answer for each in TABLE if each.name == flag)
    assert (error.value.flag, error.value.answer, error.value.exit_status) == (flag, answer, 64)
    assert str(error.value).startswith(f"{text}: ")
    assert str(error.value).endswith(answer)


@pytest.mark.parametrize("argv", [["--raw_dir", "a b"], ["-r", "a b"], ["--raw-dir=a b"], ["-ra b"]])
def test_values_may_go_to_another_flag(argv: list[str]) -> None:
    assert parse_flags(Flags, argv, prog="prog", former_flags=TABLE) == Flags("a b")


def test_an_error_names_what_was_glued_as_it_was_typed() -> None:
    with pytest.raises(FormerFlagError) as error:
        replace_former_flags(["bench", "-d/data", "-s5"], find_former_flags(["bench"]))
    assert (error.value.flag, str(error.value).partition(":")[0]) == ("--max_train_steps", "-s5")


def test_what_was_told_by_its_place_is_answered() -> None:
    with pytest.raises(FormerFlagError) as error:
        parse_flags(Flags, ["--folder", "x", "in.json"], prog="prog", former_flags=TABLE)
    assert error.value.flag == "input_file"


def test_what_no_program_had_is_unknown() -> None:
    with pytest.raises(FlagError, match="unknown flag --raw_folder"):
        parse_flags(Flags, ["--raw_folder", "x"], prog="prog", former_flags=TABLE)


def test_each_command_answers_for_the_tool_it_replaces() -> None:
    assert [flag.name for flag in find_former_flags(["imagenet", "--from", "x"])][:1] == ["--raw_data_dir"]
    assert find_former_flags(["convert", "imagenet"]) == find_former_flags(["imagenet"])
    assert "--ltrb" in [flag.name for flag in find_former_flags(["convert", "coco"])]
    assert find_former_flags(["convert", "voc"]) == find_former_flags([]) == ()
