"""Command-line flags from a dataclass, by tyro, with errors of one line instead of boxes.

Nothing heavy is imported here, so that `--help` and a wrong flag are answered at once.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import re
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from gaudi_datasets.arguments import (
    FormerFlag,
    FormerFlagError,
    list_options,
    list_typed,
    name_as_typed,
    normalize_arguments,
    replace_former_flags,
    walk_groups,
)
from gaudi_datasets.errors import FlagError
from gaudi_datasets.fetching.stores import is_url, refuse_url, require_plain_url
from gaudi_ops.files import read_text

Config = TypeVar("Config")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OF_CLASS = re.compile(r"^Error parsing (_?[A-Z]\w*|[\w.]*__tyro_\w*): ")
_TOLD_BY_PLACE = re.compile(r"(\w+) \(required\)")
_STRAY = re.compile(r"unknown argument '(.*?)'")
_LONG_FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
# That take URLs of stores.
_OF_STORES = frozenset({"--annotations", "--export", "--model_dir", "--output_dir", "--url", "--val_annotations"})
_UNKNOWN_FLAG = re.compile(r"unknown flag (-+[\w-]+)")
# Names that the flags of other libraries have, each with ours; the first that a program has is suggested.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("imgsz", "img_size", "img", "resize", "train_crop_size", "input_size"), ("image_size",)),
    **dict.fromkeys(("lr", "lr0", "learning_rate", "base_learning_rate"), ("base_lr",)),
    **dict.fromkeys(("batch", "bs", "train_batch_size", "per_device_train_batch_size"), ("batch_size",)),
    **dict.fromkeys(("max_epochs", "num_epochs", "train_epochs", "num_train_epochs"), ("epochs",)),
    **dict.fromkeys(("max_steps", "train_steps", "num_steps", "iterations"), ("steps",)),
    **dict.fromkeys(("data_path", "data", "dataset_path", "dataset_dir", "root"), ("data", "data_dir")),
    **dict.fromkeys(("pretrained", "ckpt", "ckpt_path", "init_weights", "weights_path"), ("weights",)),
    **dict.fromkeys(
        ("project", "name", "save_dir", "logdir", "log_dir", "work_dir", "run_dir"), ("model_dir", "output_dir")
    ),
    **dict.fromkeys(("workers", "num_workers", "nw"), ("threadpool_size", "processes")),
    **dict.fromkeys(("wd", "l2"), ("weight_decay",)),
    **dict.fromkeys(("cos_lr", "lr_scheduler", "scheduler"), ("lr_schedule", "use_cosine_lr")),
    **dict.fromkeys(("lr_warmup_epochs", "warmup"), ("warmup_epochs",)),
    **dict.fromkeys(("model_ema", "ema", "model_ema_decay"), ("ema_decay",)),
    **dict.fromkeys(("fliplr", "hflip_prob", "hflip"), ("flip_probability",)),
    **dict.fromkeys(("amp", "half", "precision"), ("dtype", "precision")),
    **dict.fromkeys(("conf", "conf_thres", "confidence", "threshold"), ("score_threshold",)),
    **dict.fromkeys(("source", "input", "images"), ("inference", "images")),
    **dict.fromkeys(("print_freq", "log_every", "log_interval"), ("log_steps",)),
    **dict.fromkeys(("save_period",), ("save_checkpoints_epochs", "save_checkpoints_steps")),
    **dict.fromkeys(("test_only", "task"), ("mode",)),
    **dict.fromkeys(("exist_ok", "overwrite_output_dir"), ("clean", "overwrite")),
    **dict.fromkeys(("arch", "net", "encoder", "model"), ("model", "backbone")),
    **dict.fromkeys(("opt",), ("optimizer",)),
    **dict.fromkeys(("val_split", "validation_split"), ("val_share",)),
    **dict.fromkeys(("iou", "iou_thres", "nms"), ("nms_overlap_thresh",)),
    **dict.fromkeys(("max_det",), ("max_boxes",)),
    **dict.fromkeys(("cache",), ("training_dataset_cache",)),
    **dict.fromkeys(("save_txt", "save_crop", "save_conf", "nosave"), ("save",)),
    **dict.fromkeys(("val", "noval"), ("no_evaluate",)),
    **dict.fromkeys(("optimizer", "resume"), ()),
}
# What is to be said where a program has no flag for one of them, and a flag by which such a program is known.
_ANSWERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("arch", "net", "encoder", "model"), ("model_type", "give --model_type and --resnet_size")),
    "resume": ("model_dir", "the same command goes on with the run in --model_dir"),
    **dict.fromkeys(("optimizer", "opt"), ("model_dir", "SGD with momentum is the one optimizer")),
    **dict.fromkeys(
        ("iou", "iou_thres", "nms"), ("score_threshold", "boxes of a class that overlap by half or more are one object")
    ),
}
_CHOICE = re.compile(r"invalid choice '(.*?)' for argument '--[\w-]+'\. Expected one of \((.*)\)")
# Values of other libraries by what they begin with, each with ours.
_OTHER_VALUES: Mapping[str, str] = {**dict.fromkeys("0123456789", "gpu"), "cuda": "gpu", "ram": "auto", "disk": "auto"}


def parse_flags(
    config_class: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    former_flags: Sequence[FormerFlag] = (),
) -> Config:
    """Make a `config_class` from command-line arguments.

    Every field is a flag by its own name, with underscores or hyphens; fields of a dataclass within form a group of the
    help text and have no prefix; `tyro.conf.arg(aliases=["-b"])` gives a short form. A union of dataclasses annotated
    with `tyro.conf.subcommand` gives subcommands. A ValueError of `__post_init__` is an error of the flags.
    `gaudi_datasets.arguments` says how they may be written.

    Args:
        config_class: a dataclass, or a union of them, which type checkers must be told is of type Any.
        argv: the arguments, without the program's name.
        prog: the program's name for usage and errors.
        description: what stands at the top of the help text; the docstring of `config_class` when None.
        former_flags: of the program that this one replaces; see `gaudi_datasets.arguments`.

    Raises:
        FlagError: for an unknown flag (naming the nearest there is), a missing one, or a value that is not taken.
        FormerFlagError: for one of the former flags, with what to give in its place.
        SystemExit: with status 0 after `--help`.
    """
    box = io.StringIO()
    arguments = normalize_arguments(replace_former_flags(argv, former_flags, config_class), config_class)
    fields = (field for _, own in walk_groups(config_class) for field, _ in own)
    may_be_empty = {f"--{field.name}" for field in fields if field.default == ""}
    _refuse_urls(arguments, config_class)
    for long_form, word, values in list_typed(arguments, config_class):
        if "" in values and long_form not in may_be_empty:  # a path would be the current folder
            raise FlagError(f"{word}: is empty", flag=long_form, remedy="give a value, or leave it out")
    if "--help" in arguments or "-h" in arguments:
        for group, _ in walk_groups(config_class):
            _set_help(group)
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                config_class,
                args=arguments,
                prog=prog,
                description=description,
                use_underscores=True,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.HelptextFromCommentsOff),
            )
    except SystemExit as end:
        if not end.code:
            raise
        words, command_class = _find_command(config_class, arguments)
        names = {field.name for group, own in walk_groups(command_class) for field, _ in own}
        text = _condense(box.getvalue(), names, proposed=names if words else None)
        stray = _STRAY.match(text)
        for flag in former_flags:
            if stray is not None and not flag.name.startswith("-"):
                raise FormerFlagError(stray[1], flag) from None
        unknown = _UNKNOWN_FLAG.match(text)
        if unknown is not None:
            text = _answer_unknown(unknown[1], config_class) or text
        elif choice := _CHOICE.match(text):
            text += _suggest_value(choice[1], re.findall(r"'(.*?)'", choice[2]))
        named = _LONG_FLAG.search(text)
        command = " ".join([prog, *words])
        error = FlagError(f"{text} (see {command} --help)", flag=None if named is None else named[0])
        name_as_typed(error, argv, config_class)
        raise error from None


def _refuse_urls(arguments: Sequence[str], config_class: Any) -> None:
    """Refuse URLs for flags of the command whose types are paths of this machine, and credentials in others."""
    of_files = set()
    for _, own in walk_groups(_find_command(config_class, arguments)[1]):
        for field, hint in own:
            kinds = [hint]
            for each in kinds:  # which grows meanwhile
                kinds += typing.get_args(each)
            of_files |= {f"--{field.name}"} if Path in kinds else set()
    for long_form, _, values in list_typed(arguments, config_class):
        for value in values:
            if long_form in of_files:
                refuse_url(value, long_form)
            elif long_form in _OF_STORES and is_url(value):
                require_plain_url(value, long_form)


def suggest_flag(flag: str, config_class: Any) -> str | None:
    """Return the flag of a program that is named otherwise in ultralytics, torchvision or Lightning; None for none."""
    options = list_options(config_class)
    return next((options[name].flag for name in OTHER_NAMES.get(_plain(flag), ()) if name in options), None)


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").lower()


def _answer_unknown(flag: str, config_class: Any) -> str | None:
    """Return what to say of a flag that other libraries have; None for one that they have not."""
    name = _plain(flag)
    mark, answer = _ANSWERS.get(name, ("", ""))
    if better := suggest_flag(flag, config_class):
        return f"unknown flag {flag}; did you mean {better}?"
    if mark in list_options(config_class):
        return f"unknown flag {flag}; {answer}"
    return f"unknown flag {flag}" if name in OTHER_NAMES else None


def _suggest_value(value: str, choices: Sequence[str]) -> str:
    """Return the question for a choice that is written otherwise, or named so in other libraries; else nothing."""
    by_folded = {choice.casefold(): choice for choice in choices}
    others = [ours for begin, ours in _OTHER_VALUES.items() if value.lower().startswith(begin) and ours in choices]
    nearest = difflib.get_close_matches(value.casefold(), by_folded, n=1)
    found = [*others, *(by_folded[each] for each in nearest)]
    return f"; did you mean {found[0]}?" if found else ""


def _find_command(annotation: Any, arguments: Sequence[str]) -> tuple[list[str], Any]:
    """Return the subcommands that arguments begin with, and the annotation of the last one."""
    words = []
    for word in arguments:
        known = dict(_list_subcommands(annotation))
        if word not in known:
            break
        words.append(word)
        annotation = known[word]
    return words, annotation


def _list_subcommands(annotation: Any) -> Iterator[tuple[str, Any]]:
    inner, *metadata = typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else (annotation,)
    name = next((entry.name for entry in metadata if type(entry).__name__ == "_SubcommandConfig"), None)
    if name is not None:
        yield name, inner
    elif typing.get_origin(inner) in (typing.Union, types.UnionType):
        for each in typing.get_args(inner):
            yield from _list_subcommands(each)


def _set_help(group: Any) -> None:
    """Set the help of each flag of a dataclass from the string below its field, which tyro would read itself.

    tyro parses the whole source file once for each class in it, which took a third of the time of `--help`.
    """
    for field in dataclasses.fields(group):
        texts = (_read_field_texts(base.__module__).get((base.__qualname__, field.name)) for base in group.__mro__)
        text = next(filter(None, texts), None)
        if text is not None and "help" not in field.metadata:
            field.metadata = types.MappingProxyType({**field.metadata, "help": text})


@functools.cache
def _read_field_texts(module: str) -> Mapping[tuple[str, str], str]:
    """Return the strings below the fields of a module's classes by class and field, each paragraph one line."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return {}
    texts = {}
    for node in ast.parse(read_text(Path(path))).body:
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                text = below.value if isinstance(below, ast.Expr) else None
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Constant)
                    and isinstance(text.value, str)
                ):
                    line = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text.value))
                    texts[node.name, field.target.id] = line
    return texts


def _condense(box: str, names: Collection[str], *, proposed: Collection[str] | None = None) -> str:
    """Return the one line that matters of tyro's box: a title, then parts divided by rules.

    Args:
        box: what tyro printed.
        names: of all flags that there are.
        proposed: names of the flags that may be proposed; tyro mentions those of other commands, too. None: all.
    """
    rows = [_COLOUR.sub("", row).strip("│|╭╮╰╯ \t") for row in box.splitlines()]
    parts: list[list[str]] = [[]]
    for row in rows[1:]:
        if re.fullmatch(r"[─-]{3,}", row):
            parts.append([])
        elif row:
            parts[-1].append(row)
    # Where the terminal is ASCII, the title has a rule of its own below it.
    parts = [part for part in parts if part]
    texts = [" ".join(part) for part in parts]
    for text in texts:
        if re.match(r"Unrecognized (or misplaced )?options: ", text):
            return _unknown(text.partition(": ")[2], [other for other in texts if other is not text], proposed)
    if texts[0].startswith("Missing from "):
        flags = [found[-1] for found in map(_LONG_FLAG.findall, parts[0][1:]) if found]
        told_by_place = (match[1] for match in map(_TOLD_BY_PLACE.fullmatch, parts[0][1:]) if match)
        flags += [name for name in told_by_place if name in names and f"--{name}" not in flags]
        return f"required and not given: {', '.join(flags)}"
    text = _OF_CLASS.sub("", texts[0]) or "the arguments cannot be understood"
    return re.sub(r"^Error parsing ", "", text).rstrip(".")


def _unknown(tokens: str, others: Sequence[str], proposed: Collection[str] | None) -> str:
    """Name what is unknown, and the nearest flag that tyro's other texts mention, or the subcommands there are."""
    words = tokens.replace(",", " ").split()
    unknown = next((word for word in words if word.startswith("-")), words[0])
    if not unknown.startswith("-"):
        choices = next((text for text in others if text.startswith("Available subcommands: ")), "")
        return f"unknown argument {unknown!r}" + (f"; {choices[0].lower()}{choices[1:]}" if choices else "")
    known = [flag for text in others for flag in _LONG_FLAG.findall(text) if flag not in ("--help", unknown)]
    if proposed is not None:
        known = [flag for flag in known if _plain(flag).removeprefix("no_") in proposed]
    nearest = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
    return f"unknown flag {unknown}" + (f"; did you mean {nearest[0]}?" if nearest else "")
