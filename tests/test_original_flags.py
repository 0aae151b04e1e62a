"""Each of the originals' 286 flags is taken or answered, and documented as what it is.

tests/data/original_flags.tsv lists them as the originals' sources define them.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps import resnet_train, resnext_train, ssd_mxnet_train, ssd_train
from gaudi_apps.cli.flag_rules import find_aliases, list_flags, parse_config
from gaudi_apps.runtime.errors import ConfigFileError
from gaudi_datasets.arguments import OFF, ON, FormerFlag, FormerFlagError, normalize_arguments, replace_former_flags
from gaudi_datasets.cli import find_former_flags, parse_arguments
from gaudi_models.weights.__main__ import make_parser

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "data" / "original_flags.tsv"
PROGRAMS = {
    "ssd_train": ssd_train.PROGRAM,
    "resnet_train": resnet_train.PROGRAM,
    "resnext_train": resnext_train.PROGRAM,
    "ssd_mxnet_train": ssd_mxnet_train.PROGRAM,
}


@dataclass(frozen=True)
class Location:
    """Where flags of an original are documented, and what takes them now.

    Attributes:
        document: its name, without `_flags.md`.
        heading: of the section.
        command: the program, with its subcommands.
        required: what it does not go without.
    """

    document: str
    heading: str
    command: str
    required: tuple[str, ...] = ()


def load_tool() -> Any:
    """Load tools/flag_documents.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("tools_flag_documents", ROOT / "tools" / "flag_documents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


flag_documents = load_tool()
WEIGHTS = Location("ssd_mxnet", "`torch_to_numpy.py`", "weights")
# By system and by the last part of the original's file; "" is for all other files.
PLACES = {
    ("ssd-tf", "generate_static_dataset.py"): Location(
        "ssd",
        "`gaudi-datasets make-static-batches`",
        "gaudi-datasets make-static-batches",
        ("--input_pattern=a", "--output_dir=b", "--batch_size=3", "--steps=3"),
    ),
    ("ssd-tf", ""): Location("ssd", "`ssd_train`", "ssd_train"),
    ("resnet50-keras", ""): Location("resnet", "`resnet_train`", "resnet_train"),
    ("resnet50-keras:tools", "preprocess_imagenet.py"): Location(
        "resnet", "`preprocess_imagenet.py`", "gaudi-datasets imagenet", ("--raw_data_dir=a", "--local_scratch_dir=b")
    ),
    ("resnet50-keras:tools", ""): Location(
        "resnet", "`tfhub_export.py` and `transfer_learning_demo.py`", "resnet_train"
    ),
    ("resnext101", ""): Location("resnext", "`resnext_train`", "resnext_train"),
    ("ssd-mxnet", "ssd_main.py"): Location("ssd_mxnet", "`ssd_mxnet_train`", "ssd_mxnet_train"),
    ("ssd-mxnet", "create_tfrecord.py"): Location(
        "ssd_mxnet",
        "`create_tfrecord.py`",
        "gaudi-datasets convert coco",
        ("--images-dir=a", "--annotations-file=b", "--output=c", "--split=train"),
    ),
    ("ssd-mxnet", "prepare-json.py"): Location(
        "ssd_mxnet",
        "`prepare-json.py`",
        "gaudi-datasets convert coco",
        ("--images=a", "--annotations=b", "--output_dir=c", "--split=train"),
    ),
    ("ssd-mxnet", "torch_to_numpy.py"): WEIGHTS,
}


@dataclass(frozen=True)
class OriginalFlag:
    """A flag of an original: its name and short form with their dashes, its default as documents write it."""

    place: Location
    name: str
    short: str
    default: str
    type: str

    @property
    def is_switch(self) -> bool:
        """Tell if it took no value."""
        return self.default in (ON, OFF) and self.type != "string"


def read_original_flags() -> list[OriginalFlag]:
    """Return all flags, in the order of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [_read(row) for row in rows]


def _read(row: dict[str, str]) -> OriginalFlag:
    name, short = row["flag"], row["short"]
    place = PLACES.get((row["system"], row["file"].rpartition("/")[2])) or PLACES[row["system"], ""]
    if short and not short.startswith("-") and name.startswith("-"):
        short = f"-{short}"
    is_tool = "generate_static" in row["file"] or place.heading not in [f"`{name}`" for name in PROGRAMS]
    return OriginalFlag(place, name, short if name.startswith("-") else "", _show(row["default"], is_tool), row["type"])


def _show(default: str, is_tool: bool) -> str:
    """Return a default as the documents write it."""
    text = default.removesuffix("(store_true)").partition(" -> ")
    value = (text[2].partition(" ")[0] or text[0]).strip("'").rpartition("experimental.")[2]
    known = {"False": "off", "True": "on", "None": "none", "": "none", "-": "required" if is_tool else "none"}
    return known.get(value, value.strip("[]").replace(", ", " "))


def parse(command: str, arguments: list[str]) -> Any:
    """Return what a program makes of its arguments, without looking at what they mean together."""
    name, _, subcommands = command.partition(" ")
    if name == "gaudi-datasets":
        return parse_arguments([*subcommands.split(), *arguments])
    if name == "weights":
        return make_parser().parse_args(arguments)
    program = PROGRAMS[name]
    return parse_config(
        program.config,
        arguments,
        prog=name,
        description="",
        former_flags=program.former_flags,
    )


@dataclass(frozen=True)
class Row:
    """The row of a document about a flag."""

    name: str
    short: str
    original_default: str
    became: str
    default: str
    why: str


def read_rows(document: str, heading: str) -> list[Row]:
    """Return the rows of a section."""
    text = (ROOT / "packages" / "apps" / "docs" / f"{document}_flags.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [Row(*(cell.strip().strip("`") for cell in line.strip("|").split("|"))) for line in lines]


FLAGS = read_original_flags()
IDS = [f"{flag.place.command} {flag.name}" for flag in FLAGS]
ROWS = {place: {row.name: row for row in read_rows(place.document, place.heading)} for place in PLACES.values()}
# A value that is not the default, where 7 is no value.
VALUES = {
    "--dtype": "-",
    "--data_loader_image_type": "bf16",
    "--resnet_size": "50",
    "--model_type": "resnet",
    "--optimizer": "LARS",
    "--lr_schedule": "cosine",
    "--pruning_method": "polynomial_decay",
    "--distribution_strategy": "hpu",
    "--mode": "plan",
    "--precision": "fp32",
    "--data-layout": "NCHW",
    "--dataset": "plain",
    "--bn-group": "8",
    "--hooks": "ProfilerHook",
}


def list_former(flag: OriginalFlag) -> dict[str, FormerFlag]:
    """Return the declarations that the program of a flag goes by."""
    name, _, subcommands = flag.place.command.partition(" ")
    table = PROGRAMS[name].former_flags if name in PROGRAMS else find_former_flags(subcommands.split())
    return {former.name: former for former in table}


def list_forms(flag: OriginalFlag, value: str) -> list[list[str]]:
    """Return the forms in which a flag may be written, all of the same meaning."""
    body = flag.name[2:]
    other = "--" + (body.replace("_", "-") if "_" in body else body.replace("-", "_"))
    names = [flag.name, other, *([flag.short] if flag.short else [])]
    if flag.is_switch:
        state = value == ON
        return [[f"{name}={state}"] for name in names] + [[flag.name, f"{state}"], [f"{flag.name}={int(state)}"]]
    glued = [[f"{flag.short}{value}"]] if len(flag.short) == 2 else []  # argparse takes it, and absl does not
    return [[name, value] for name in names] + [[f"{name}={value}"] for name in names] + glued


def choose_form(flag: OriginalFlag) -> list[str]:
    """Return a flag with a value that is not its default."""
    if flag.is_switch:
        return list_forms(flag, ON if flag.default == OFF else OFF)[0]
    value = VALUES.get(flag.name, "7")
    return [flag.name, {"bf16": "fp32", "fp32": "bf16"}[flag.default] if value == "-" else value]


def simplify(flag: OriginalFlag, argv: list[str]) -> list[str]:
    """Return what the parser of flags gets in the end."""
    table = tuple(list_former(flag).values())
    return normalize_arguments(replace_former_flags(argv, table), PROGRAMS[flag.place.command].config)


def list_values(config: Any) -> dict[str, Any]:
    """Return the flags by name, as the originals call them."""
    values = dict(list_flags(config))
    return values | {name: values[ours] for name, ours in find_aliases(type(config)).items()}


@functools.cache
def parse_all(command: str) -> dict[str, Any]:
    """Return the values of a program that is given all flags that it keeps, each with a value that is not the default.

    One parser for all of them, because it takes long.
    """
    kept = [flag for flag in FLAGS if flag.place.command == command and flag.name not in list_former(flag)]
    return list_values(parse(command, [word for flag in kept for word in choose_form(flag)]))


def test_there_are_all() -> None:
    assert Counter(flag.place.document for flag in FLAGS) == {"ssd": 39, "resnet": 98, "resnext": 76, "ssd_mxnet": 73}
    assert len(FLAGS) == 286
    for place, rows in ROWS.items():
        flags = [flag for flag in FLAGS if flag.place == place]
        # More rows are of flags that the originals' sources define elsewhere.
        names = {flag.name for flag in flags}
        found = [(row.name, row.short) for row in rows.values() if row.name in names]
        assert found == [(flag.name, flag.short) for flag in flags]
        assert all(is_equal(rows[flag.name].original_default, flag.default) for flag in flags)


@pytest.mark.parametrize("name", flag_documents.DOCUMENTS)
def test_documents_are_as_the_declarations(name: str) -> None:
    """Else run tools/flag_documents.py."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert flag_documents.render(text, flag_documents.DOCUMENTS[name]) == text


@pytest.mark.parametrize("flag", FLAGS, ids=IDS)
def test_a_flag_is_taken_or_answered(flag: OriginalFlag) -> None:
    row, former = ROWS[flag.place][flag.name], list_former(flag).get(flag.name) if flag.place != WEIGHTS else None
    if flag.place == WEIGHTS:
        check_weights(flag, row)
    elif former is not None and former.replace is None:
        assert (row.became, row.default) == ("gone", "")
        check_answered(flag, former)
    elif flag.place.command in PROGRAMS:
        assert row.became == ("kept" if former is None else "taken")
        check_taken(flag, row)
    else:
        assert row.became == ("kept" if former is None else "taken")
        check_command(flag)


def check_taken(flag: OriginalFlag, row: Row) -> None:
    """All forms have one meaning, which is not that of leaving the flag out, and the default is the documented one."""
    chosen = choose_form(flag)
    value = (ON if flag.default == OFF else OFF) if flag.is_switch else chosen[1]
    simple = simplify(flag, list_forms(flag, value)[0])
    for form in list_forms(flag, value):
        assert " ".join(simplify(flag, form)).replace("=", " ") == " ".join(simple).replace("=", " ")
    if row.became == "kept":
        name, plain = flag.name[2:].replace("-", "_"), list_values(PROGRAMS[flag.place.command].config())
        assert parse_all(flag.place.command)[name] != plain[name]
        assert show(plain[name]) == row.default
        assert row.why or is_equal(row.default, flag.default)
    else:
        assert parse(flag.place.command, chosen) != PROGRAMS[flag.place.command].config()


def check_command(flag: OriginalFlag) -> None:
    """Do the same for a command of gaudi-datasets."""
    required = [each for each in flag.place.required if not each.startswith(f"{flag.name}=")]
    found = [parse(flag.place.command, [*required, *form]) for form in list_forms(flag, "9")]
    assert all(each == found[0] for each in found)
    assert found[0] != parse(flag.place.command, list(flag.place.required))


def check_answered(flag: OriginalFlag, former: FormerFlag) -> None:
    """With a value that asks for what is done anyway it is taken, with any other it is answered, not unknown."""
    table = tuple(list_former(flag).values())
    assert (former.short, former.default) == (flag.short, flag.default)
    for value in former.meant:
        for form in list_forms(flag, value):
            assert replace_former_flags(form, table) == []
    if {ON, OFF} <= {*former.meant}:  # neither value is answered
        return
    forms = list_forms(flag, (OFF if ON in former.meant else ON) if flag.is_switch else "7")
    for form in forms if flag.name.startswith("-") else [["some.json"]]:
        with pytest.raises(FormerFlagError) as caught:
            parse(flag.place.command, [*flag.place.required, *form])
        assert (caught.value.exit_status, caught.value.answer) == (64, former.answer)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("resnet_train", "--num_packs 1 --per_gpu_thread_count 0 --fp16_implementation keras"),
        ("resnet_train", "--bigquery_run_table benchmark_run --batchnorm_spatial_persistent"),
        ("resnet_train", "--batchnorm_spatial_persistent=False --lr_decay_factor .94"),
        ("resnext_train", "--num_packs 1 -pgtc 0 -brt benchmark_run"),
        ("ssd_mxnet_train", "--cocoapi-threads 1"),
    ],
)
def test_defaults_of_the_originals_ask_for_nothing(program: str, text: str) -> None:
    assert parse(program, text.split()) == PROGRAMS[program].config()


def check_weights(flag: OriginalFlag, row: Row) -> None:
    """Of torch_to_numpy.py, whose places are kept."""
    assert row.became == ("gone" if flag.name.startswith("-") else "kept")
    if flag.name.startswith("-"):
        with pytest.raises(SystemExit) as caught:
            parse("weights", ["a", "b", flag.name])
        assert caught.value.code == 64
    else:
        assert vars(parse("weights", ["a", "b"]))[{"input_file": "source", "output_file": "target"}[flag.name]]


def show(default: Any) -> str:
    """Return a default of ours as the documents write it."""
    if isinstance(default, bool):
        return ON if default else OFF
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return "none" if default in (None, "") else str(default)


def is_equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_declaration_is_of_a_flag_that_the_program_has(name: str) -> None:
    former, config = PROGRAMS[name].former_flags, PROGRAMS[name].config()
    ours = {f"--{flag}" for flag, _ in list_flags(config)}
    names = [each for flag in former for each in (flag.name, flag.short) if each]
    assert len(names) == len(set(names))
    assert not ours & {each.replace("-", "_").replace("__", "--", 1) for each in names}
    assert all(flag.answer and "\n" not in flag.answer for flag in former)


def test_a_program_ends_with_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        resnet_train.main(["--use_synthetic_data", "--loss_scale", "128"])
    assert end.value.code == 64
    assert re.fullmatch(r"resnet_train: error: --loss_scale 128: [^\n]*\n", capsys.readouterr().err)


def test_a_file_of_flags_is_answered_alike(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("loss_scale: 128\n")
    with pytest.raises(ConfigFileError, match=r"run\.yaml: --loss_scale=128: .* leave it out"):
        parse("resnet_train", [f"--config={path}"])
    path.write_text("enable_tensorboard: true\nkeras_applications_model: ResNet50V2\nuse_horovod: false\n")
    expected = parse("resnet_train", ["--model", "resnet50v2_keras", f"--config={path}", "--noenable_xla"])
    assert parse("resnet_train", [f"--config={path}"]) == expected


@pytest.mark.parametrize("model", ["ResNet50", "ResNet101", "ResNet152", "ResNet50V2", "ResNet101V2", "ResNet152V2"])
def test_networks_of_keras_applications_are_found(model: str) -> None:
    config: Any = parse("resnet_train", ["--keras_applications_model", model, "--use_synthetic_data"])
    PROGRAMS["resnet_train"].validate(config)
    assert config.training.model == f"{model.lower()}_keras"


@pytest.mark.parametrize("name", ["resnet_train", "resnext_train"])
@pytest.mark.parametrize("flag", ["--help", "--helpfull", "--helpshort", "-h"])
def test_help_is_what_absl_calls_it(capsys: pytest.CaptureFixture[str], name: str, flag: str) -> None:
    with pytest.raises(SystemExit) as end:
        parse(name, [flag])
    assert not end.value.code
    assert "--train_epochs" in capsys.readouterr().out
