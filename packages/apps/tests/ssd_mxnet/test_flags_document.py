"""docs/ssd_mxnet_flags.md tells the truth about every flag of the submission's program and scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gaudi_apps.config_file import list_flags
from gaudi_apps.ssd_mxnet.config import SSDMXNetConfig
from gaudi_datasets.flags import parse_flags

DOCUMENT = Path(__file__).parents[2] / "docs" / "ssd_mxnet_flags.md"

# Name, short form and default of each flag of the submission, in its order.
PROGRAM = """
--mode train_val; --backbone resnet34_mlperf; --bn-group 1; --bn-fp16 off; --no-fuse-bn-add-relu off;
--no-fuse-bn-relu off; --precision fp16; --fp16-loss-scale 128.0; --dataset coco2017; --synthetic off;
--use-tfrecord off; --coco-root /datasets/coco2017; --tfrecord-root /datasets/coco2017/tfrecord/; --dataset-size none;
--eval-dataset-size none; --input-jpg-decode gpu; --hw-decoder-load 0.0; --batch-size 32; --eval-batch-size none;
--data-shape 300; --data-layout NHWC; --input-batch-multiplier 1; --dali-workers -j 6; --seed none;
--pretrained-backbone none; --epochs 80; --gradient-predivide-factor 1; --horovod-num-groups 1; --resume-from none;
--start-epoch 1; --lr none; --lr-decay-factor 0.1; --lr-decay-epochs 44,55; --lr-warmup-epochs none;
--lr-warmup-factor 0; --momentum 0.9; --weight-decay 0.0005; --save-interval none; --async-val off; --val-interval none;
--val-epochs 40,50,55,60,65,70,75,80; --target-map -t 23; --cocoapi-threads 1; --nms-valid-thresh 0.0;
--nms-overlap-thresh 0.5; --nms-topk 200; --post-nms 200; --bulk-last-wgrad off; --results none; --log-interval 100;
--log-level INFO; --log-local-ranks 0; --profile-no-horovod off; --profile-start none; --profile-stop none;
--test-initialization off; --test-anchors off
"""
SCRIPTS = """
--images-dir -i required; --annotations-file -a required; --num-shards -n 1; --output -o required; --ltrb off;
--ratio off; --skip-empty off; --size-threshold 0.0; --seed -s none; input_file required; output_file required;
--keep-keys -k off; --pretty-print -p off; input_file required; output_file required; --verbose off
"""


@dataclass(frozen=True)
class Row:
    """What the document says of a flag; for one of a script, `became` is what is there in its place."""

    name: str
    short: str
    original_default: str
    became: str
    default: str
    why: str = ""


def read_rows() -> list[Row]:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines if line[:3] == "| `"]
    return [Row(*row) for row in cells]


def list_original(text: str) -> list[tuple[str, str, str]]:
    words = [flag.split() for flag in text.split(";")]
    return [(flag[0], flag[1] if len(flag) == 3 else "", flag[-1].replace(",", " ")) for flag in words]


def show(default: object) -> str:
    """A default as the document writes it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default).replace("None", "none")


def is_equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


ROWS, ORIGINALS = read_rows(), list_original(PROGRAM)
PROGRAM_ROWS, SCRIPT_ROWS = ROWS[: len(ORIGINALS)], ROWS[len(ORIGINALS) :]


def test_every_flag_of_the_submission_is_there() -> None:
    scripts = list_original(SCRIPTS)
    assert (len(ORIGINALS), len(scripts)) == (57, 16)
    assert [(row.name, row.short, row.original_default) for row in ROWS] == ORIGINALS + scripts
    assert {row.became for row in PROGRAM_ROWS} == {"kept", "gone"}
    for row in PROGRAM_ROWS:
        assert row.why or (row.became == "kept" and is_equal(row.default, row.original_default)), row.name


@pytest.mark.parametrize("row", PROGRAM_ROWS, ids=lambda row: row.name)
def test_the_program_has_what_is_kept_and_nothing_else(row: Row) -> None:
    flags = dict(list_flags(SSDMXNetConfig()))
    name = row.name.removeprefix("--").replace("-", "_")
    assert (name in flags) == (row.became == "kept")
    assert row.default == (show(flags[name]) if row.became == "kept" else "")


def test_short_forms_are_kept() -> None:
    for row in (row for row in PROGRAM_ROWS if row.short):
        by_short, by_name = (
            parse_flags(SSDMXNetConfig, [flag, "7"], prog="ssd_mxnet_train") for flag in (row.short, row.name)
        )
        assert by_short == by_name != SSDMXNetConfig()


def test_what_replaces_the_scripts_is_there() -> None:
    command = [sys.executable, "-m", "gaudi_datasets", "convert", "coco", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    replaced = [row.became for row in SCRIPT_ROWS if row.became != "gone"]
    assert len(replaced) == 5
    for flag in replaced:
        assert flag.split()[0] in done.stdout
