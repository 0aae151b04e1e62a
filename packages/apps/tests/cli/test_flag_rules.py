from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import docstring_parser
import pytest
from tyro.conf import arg

from gaudi_apps import resnet_train, resnext_train, ssd_mxnet_train, ssd_train
from gaudi_apps.cli.flag_rules import (
    Flag,
    check_bounds,
    find_aliases,
    find_rules,
    fixed,
    list_flags,
    make_short_run,
    per_rank,
    resume_safe,
    select_flags,
)
from gaudi_apps.runtime.errors import RunChangedError
from gaudi_apps.runtime.session import list_start_metadata
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.runtime.tensorflow import TensorFlow
from gaudi_apps.training.run import list_run_settings
from gaudi_apps.training.run_dir import RunFolder
from gaudi_apps.training.trainer import TrainingData
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags
from gaudi_distributed.comm.opening import find_difference

# By name: the program, what it is given, and a rate that depends on the last step or on none.
PROGRAMS: dict[str, tuple[Any, list[str]]] = {
    "ssd_train": (ssd_train.PROGRAM, ["--use_fake_data"]),
    "ssd_train cosine": (ssd_train.PROGRAM, ["--use_fake_data", "--lr_schedule", "cosine"]),
    "resnet_train": (resnet_train.PROGRAM, ["--use_synthetic_data"]),
    "resnet_train LARS": (resnet_train.PROGRAM, ["--use_synthetic_data", "--optimizer", "LARS"]),
    "resnext_train": (resnext_train.PROGRAM, ["--use_synthetic_data"]),
    "resnext_train steps": (resnext_train.PROGRAM, ["--use_synthetic_data", "--no_use_cosine_lr"]),
    "ssd_mxnet_train": (ssd_mxnet_train.PROGRAM, ["--synthetic"]),
}
CLASSES = {name.partition(" ")[0]: program.config for name, (program, _) in PROGRAMS.items()}
NUM_IMAGES = 640
TOGETHER = ("profile_start", "profile_stop")
# Other values of flags that are text, where the plan reads them.
WORDS = {
    "profile": "3,4",
    "profile_steps": "3,4",
    "model": "resnet18",
    "hooks": "ProfilerHook",
    "mode": "val",
    "dataset": "plain",
    "precision": "amp",
    "data_layout": "NHWC",
    "system": "C4140",
}


def parse(name: str) -> Any:
    program, words = PROGRAMS[name]
    return parse_flags(program.config, words, prog=program.prog)


def list_hints(config_class: Any) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(config_class).items():
        if is_dataclass(hint):
            yield from list_hints(hint)
        else:
            yield name, hint


def change(config: Any, name: str) -> Any:
    """Return the configuration with another value of one flag, and of those that do not go without it."""
    if name in TOGETHER:
        others = (flag for flag in TOGETHER if flag != name)
        config = functools.reduce(change_one, others, config)
    return change_one(config, name)


def change_one(config: Any, name: str) -> Any:
    group = next(one for one in fields(config) if name in {entry.name for entry in fields(getattr(config, one.name))})
    flags = getattr(config, group.name)
    hint = typing.get_type_hints(type(flags))[name]
    return replace(config, **{group.name: replace(flags, **{name: make_other(name, getattr(flags, name), hint)})})


def make_other(name: str, value: Any, hint: Any) -> Any:
    """Return another value of a type."""
    choices = [*typing.get_args(hint)] if typing.get_origin(hint) is not Literal else [hint]
    for choice in choices:
        others = [one for one in typing.get_args(choice) if typing.get_origin(choice) is Literal and one != value]
        if others:
            return others[0]
    if hint is bool:
        return not value
    if isinstance(value, (int, float)):
        return value + 1 if hint is int else value / 2 + 0.125
    if isinstance(value, tuple):
        return (*value, "other") if "str" in str(hint) or not value else tuple(2 * one for one in value)
    kinds = {int: 3, float: 0.5, str: WORDS.get(name, "other")}
    return next(kinds[kind] for kind in (hint, *choices) if kind in kinds)


def list_settings_of(name: str, config: Any) -> dict[str, Any]:
    """Return what a run of one process is recognized by."""
    app = PROGRAMS[name][0].open(config, Distribution())
    data = TrainingData({}, NUM_IMAGES, "fingerprint", lambda step: iter(()))
    return list_run_settings(app, data, app.make_plan(NUM_IMAGES))


@pytest.fixture(scope="module", params=PROGRAMS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunFolder]:
    """Make a run's folder, with its run.json."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.begin(list_settings_of(request.param, parse(request.param)), files=(), folders=())
    return request.param, folder


def find_change(folder: RunFolder, settings: dict[str, Any]) -> str | None:
    """Return why a run of these settings may not go on; None: it may."""
    try:
        folder.validate(settings, files=(), folders=())
    except RunChangedError as error:
        return str(error)
    return None


def test_a_resumed_run_may_change_the_flags_that_are_declared_so(run: tuple[str, RunFolder]) -> None:
    name, folder = run
    config, rules = parse(name), find_rules(PROGRAMS[name][0].config)
    rate_needs_length = name in ("ssd_train cosine", "resnet_train LARS", "resnext_train")
    changes = {flag: find_change(folder, list_settings_of(name, change(config, flag))) for flag in rules}
    assert {flag: found is None for flag, found in changes.items()} == {
        flag: rule.resume_safe and not (rule.length and rate_needs_length) for flag, rule in rules.items()
    }
    # The error names the flag, or the batch that it sets.
    assert all(
        "batch_size" in found if rules[flag].sets_batch else flag in found for flag, found in changes.items() if found
    )


def test_a_run_goes_on_where_a_release_has_added_a_flag(tmp_path: Path) -> None:
    name = "ssd_train cosine"
    config, folder = parse(name), RunFolder(tmp_path)
    settings, defaults = list_settings_of(name, config), dict(list_flags(type(config)()))
    folder.begin({key: value for key, value in settings.items() if key != "weight_decay"}, files=(), folders=())
    assert folder.validate(settings, files=(), folders=(), defaults=defaults)
    with pytest.raises(RunChangedError) as refused:
        folder.validate(settings | {"weight_decay": 0.9}, files=(), folders=(), defaults=defaults)
    assert refused.value.field == "weight_decay"


@pytest.mark.parametrize("name", CLASSES)
def test_ranks_may_differ_in_the_flags_that_are_declared_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither depends on flags, and both take a while.
    monkeypatch.setattr("gaudi_apps.runtime.session.hash_code", lambda: "one code")
    monkeypatch.setattr("gaudi_apps.runtime.session.find_version", lambda package: "1.0")

    def describe_rank(config: Any) -> dict[str, Any]:
        app: Any = SimpleNamespace(config=config, framework=TensorFlow())
        return list_start_metadata(app, "fingerprint")

    rules = find_rules(CLASSES[name])
    config = parse(name)
    first = describe_rank(config)
    faults = {flag: find_difference([first, describe_rank(change_one(config, flag))]) for flag in rules}
    assert {flag: fault is None for flag, fault in faults.items()} == {
        flag: rule.per_rank for flag, rule in rules.items()
    }
    assert {fault.field: flag for flag, fault in faults.items() if fault is not None} == {
        f"configuration.{flag}": flag for flag, rule in rules.items() if not rule.per_rank
    }


@pytest.mark.parametrize("name", CLASSES)
def test_every_flag_declares_its_rules(name: str) -> None:
    rules = find_rules(CLASSES[name])
    assert [*rules] == [flag for flag, _ in list_flags(CLASSES[name]())]
    assert {*select_flags(CLASSES[name], "per_rank")} >= {"config", "debug"}
    assert {"device", "model_dir", "checkpoint"} <= {*select_flags(CLASSES[name], "per_side")}
    assert {*select_flags(CLASSES[name], "per_command")} >= {"config", "clean", "debug", "json", "mode"}
    # What belongs to a rank or to a command cannot decide the weights.
    assert all(rule.resume_safe for rule in rules.values() if rule.per_rank or rule.per_command)
    assert [rule.length for rule in rules.values() if rule.length] in (["epochs", "steps"], ["steps", "epochs"])


@pytest.mark.parametrize("name", CLASSES)
def test_bounds_are_those_of_numbers_and_defaults_keep_them(name: str) -> None:
    hints = dict(list_hints(CLASSES[name]))
    for flag, rule in find_rules(CLASSES[name]).items():
        # So that the numbers of steps that follow can be computed with.
        assert "epochs" not in flag or rule.maximum == 1e6, flag
        if (rule.minimum, rule.above, rule.maximum, rule.below) != (None, None, None, None):
            assert any(kind in str(hints[flag]) for kind in ("int", "float")), flag
    check_bounds(parse(name))


def test_flags_without_rules_are_an_error_of_the_program() -> None:
    @dataclass(frozen=True)
    class Bare:
        size: int = 1

    bare: Any = Bare
    with pytest.raises(TypeError, match="size"):
        find_rules(bare)


@dataclass(frozen=True)
class Group:
    """Shared flags."""

    size: Annotated[int, resume_safe(minimum=1)] = 1
    """Number of things."""


@dataclass(frozen=True)
class Special(Group):
    """Shared flags, with another default and a short form."""

    size: Annotated[int, arg(aliases=["-s"])] = 7


def test_a_flag_that_is_declared_again_inherits_its_rules_and_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_rules(Special) == find_rules(Group)
    assert parse_flags(Special, ["-s", "3"], prog="x") == Special(3)
    with pytest.raises(SystemExit):
        parse_flags(Special, ["--help"], prog="x")
    assert "Number of things" in capsys.readouterr().out


def test_no_help_is_written_twice() -> None:
    owners: dict[str, set[tuple[str, str]]] = {}
    for config in CLASSES.values():
        hints = typing.get_type_hints(config)
        for group in (hints[field.name] for field in fields(config)):
            for entry in fields(group):
                described = (
                    (f"{base.__module__}.{base.__name__}", helps[entry.name])
                    for base in group.__mro__
                    if entry.name in (helps := list_helps(base))
                )
                owner, text = next(described, ("", ""))  # else by the type, which programs share
                owners.setdefault(text, set()).add((owner, entry.name))
    # Apart from flags that are named after the same thing in programs of different words.
    repeated = {text: found for text, found in owners.items() if len({name for _, name in found}) < len(found)}
    assert repeated == {}


@functools.cache
def list_helps(group: type[Any]) -> dict[str, str]:
    """Return the help of the flags that a class itself describes."""
    if not is_dataclass(group):
        return {}
    found = {param.args[1]: param.description or "" for param in docstring_parser.parse_from_object(group).params}
    return {name: " ".join(text.split()) for name, text in found.items()}


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (fixed(minimum=1), [1, 7, "auto", None, True], [0, -1, 10**400]),
        (fixed(minimum=0), [0.0, 1e300], [-0.1, float("nan"), float("inf")]),
        (resume_safe(above=0), [1e-9], [0, float("nan"), float("inf"), float("-inf")]),
        (resume_safe(above=0, finite=False), [float("inf")], [0.0, float("nan")]),
        (per_rank(minimum=0, maximum=1), [0, 0.5, 1], [-1e-9, 1.1]),
        (fixed(minimum=0, below=1), [0, 0.999], [1, -1]),
        (fixed(above=0, maximum=1), [0.1, 1], [0, 2]),
        (fixed(), [float("nan"), -1, "text"], []),
    ],
)
def test_bounds(rule: Flag, good: list[Any], bad: list[Any]) -> None:
    assert [rule.find_fault(value) for value in good] == [None] * len(good)
    assert None not in [rule.find_fault(value) for value in bad]


@dataclass(frozen=True)
class Small:
    """One flag with bounds."""

    share: Annotated[float, fixed(minimum=0, below=1)] = 0.5


@pytest.mark.parametrize(
    ("value", "bounds"),
    [(1.0, ["at least 0", "below 1"]), (float("inf"), ["at least 0", "below 1", "finite"])],
)
def test_a_flag_out_of_bounds_is_named_with_its_bounds(value: float, bounds: list[str]) -> None:
    with pytest.raises(FlagError) as caught:
        check_bounds(Small(value))
    assert (caught.value.flag, caught.value.exit_status) == ("--share", 64)
    assert str(caught.value).startswith(f"--share {value:g}: ")
    assert [bound for bound in ("at least 0", "below 1", "finite") if bound in str(caught.value)] == bounds


@pytest.mark.parametrize(
    ("name", "flag", "values"),
    [
        *((name, flag, ["1e306"]) for name in CLASSES for flag in ("--epochs", "--warmup_epochs")),
        *((name, "--train_epochs", ["1e306"]) for name in ("resnet_train", "resnext_train")),
        ("ssd_train", "--lr_drop_epochs", ["1", "1e306"]),
        ("resnet_train", "--eval_epochs", ["1e306"]),
        ("ssd_mxnet_train", "--lr_drop_epochs", ["1", "1" + 400 * "0"]),
        ("ssd_mxnet_train", "--val_epochs", ["1", "1" + 400 * "0"]),
        ("ssd_mxnet_train", "--lr_decay_factor", ["1e200"]),
    ],
)
def test_a_flag_of_a_size_that_nothing_can_be_computed_with_is_refused(name: str, flag: str, values: list[str]) -> None:
    program, words = PROGRAMS[name]
    with pytest.raises(FlagError) as caught:
        program.parse([*words, flag, *values])
    named = flag.removeprefix("--")
    named = find_aliases(program.config).get(named, named)
    assert (caught.value.flag, caught.value.exit_status) == (f"--{named}", 64)


@pytest.mark.parametrize("name", CLASSES)
def test_a_plan_of_the_most_epochs_can_be_made(name: str) -> None:
    program, words = PROGRAMS[name]
    config = program.parse([*words, "--epochs", "1e6", "--warmup_epochs", "1e6"])
    assert program.open(config, Distribution()).make_plan(NUM_IMAGES).total_steps >= 1e6


def test_an_integer_that_is_too_long_to_print_is_refused() -> None:
    """Python prints none of more than 4300 digits, which a hexadecimal one of a configuration may have."""
    with pytest.raises(FlagError) as caught:
        check_bounds(Small(16**4000))
    assert caught.value.flag == "--share"


@pytest.mark.parametrize("name", ["ssd_train", "resnet_train", "resnext_train"])
def test_a_short_run_saves_each_step_and_scores_nothing(name: str) -> None:
    config = parse(name)
    short = make_short_run(config, 5)
    names = {flag for flag, _ in list_flags(config)}
    assert names - short.keys() == {*select_flags(type(config), "per_command")}
    changed = {flag: value for flag, value in list_flags(config) if short.get(flag, value) != value}
    assert short["deterministic"]
    assert 5 in [short[flag] for flag, rule in find_rules(type(config)).items() if rule.length == "steps"]
    assert {"deterministic", "keep_ckpt_max"} <= changed.keys()


def test_a_file_of_flags_may_give_each_of_them(tmp_path: Path) -> None:
    import yaml

    from gaudi_apps.cli.flag_rules import parse_config

    for name in ("ssd_train", "resnet_train", "resnext_train"):
        config = parse(name)
        path = tmp_path / f"{name}.yaml"
        values = {flag: [*value] if isinstance(value, tuple) else value for flag, value in list_flags(config)}
        del values["config"]
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        read = parse_config(type(config), ["--config", str(path)], prog=name, description="")
        assert replace(read, run=replace(read.run, config=None)) == config


# What is the same in all programs, with the original's name in each; None: the program has no such flag.
SAME_NAMES = {
    "epochs": ("epochs", "train_epochs", "train_epochs", "epochs"),
    "steps": ("steps", "train_steps", "max_train_steps", "steps"),
    "weights": ("resnet_checkpoint", "pretrained_filepath", "pretrained_model_checkpoint_path", "pretrained_backbone"),
    "data_dir": ("data_dir", "data_dir", "data_dir", "tfrecord_root"),
    "use_fake_data": ("use_fake_data", "use_synthetic_data", "use_synthetic_data", "synthetic"),
    "num_examples_per_epoch": (*("num_examples_per_epoch",) * 3, "dataset_size"),
    "eval_samples": ("eval_samples", "eval_samples", "eval_samples", "eval_dataset_size"),
    "eval_epochs": ("eval_epochs", "epochs_between_evals", "epochs_between_evals", "val_interval"),
    "target": ("target_ap", "stop_threshold", "stop_threshold", None),
    "no_evaluate": ("no_evaluate", "skip_eval", "disable_eval", None),
    "base_lr": ("base_lr", "base_learning_rate", "base_learning_rate", "lr"),
    "warmup_epochs": ("lr_warmup_epoch", "warmup_epochs", "warmup_epochs", "lr_warmup_epochs"),
    "log_steps": ("log_step_count_steps", "log_steps", "display_steps", "log_interval"),
    "save_checkpoints_steps": ("save_checkpoints_steps", *("save_checkpoint_steps",) * 2, "save_checkpoints_steps"),
    "threadpool_size": ("threadpool_size", *("datasets_num_private_threads",) * 2, "dali_workers"),
    "profile": ("profile", "profile_steps", "profile_steps", "profile"),
}


def test_programs_call_the_same_by_the_same_name_and_take_the_originals() -> None:
    for place, config in enumerate(CLASSES.values()):
        flags, aliases = dict(list_flags(config())), find_aliases(config)
        for name, formers in SAME_NAMES.items():
            former = formers[place]
            assert (name in flags) == (former is not None)
            assert former in (None, name) or aliases[former] == name


@pytest.mark.costly
@pytest.mark.parametrize("module", [ssd_train, resnet_train, resnext_train, ssd_mxnet_train])
def test_suggestions_for_flags_of_other_libraries_are_taken(module: Any, tmp_path: Path) -> None:
    """The flag that an error suggests, with the same value."""
    common = ["--data_dir", str(tmp_path)]
    given = {"lr0": ".01", "batch": "8", "workers": "4", "project": "x", "name": "x", "imgsz": "300", "conf": ".3"}
    given |= {"iou": ".5", "num_epochs": "30.5", "wd": "1e-4", "device": "cuda:0", "device_": "0"}
    suggested = 0
    for name, value in given.items():
        flag = f"--{name.rstrip('_')}"
        with pytest.raises(FlagError) as caught:
            module.PROGRAM.parse([*common, flag, value])
        _, asked, found = str(caught.value).partition("did you mean ")
        better = found.partition("?")[0]
        if asked:
            suggested += 1
            use = ["--mode", "predict", "--inference", "x"] if better == "--score_threshold" else []
            module.PROGRAM.parse([*common, *use, *([better, value] if better.startswith("--") else [flag, better])])
    assert suggested >= 9
    assert module.PROGRAM.parse([*common, "--epochs", "30.5"]).run.epochs == 30.5
