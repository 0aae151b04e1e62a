"""docs/ssd_flags.md tells the truth about every flag of the original program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gaudi_apps.config_file import list_flags
from gaudi_apps.ssd.config import SSDConfig
from gaudi_datasets.flags import parse_flags

DOCUMENT = Path(__file__).parents[1] / "docs" / "ssd_flags.md"

# Name, short form and default of each flag of the original, in its order.
TRAINER = """
--dtype -d bf16; --batch_size -b 128; --epochs -e 50.0; --mode train; --max_cpus 16; --num_parallel_calls 64;
--threadpool_size 0; --hvd_workers 1; --num_workers_per_hls 8; --kubernetes_run off; --use_horovod off;
--inference none; --no_hpu off; --distributed_bn off; --vis_dataloader off; --profile 0,0; --use_cocoeval_cc off;
--use_fake_data -f off; --lr_warmup_epoch 5.0; --base_lr 0.003; --weight_decay 0.0005; --k 0; --model_dir /tmp/ssd;
--resnet_checkpoint /data/ssd_r34-mlperf; --data_dir /data/coco2017/ssd_tf_records; --eval_samples 5000;
--num_examples_per_epoch 117266; --steps -s 0; --log_step_count_steps -v 1; --save_checkpoints_epochs -c 5.0;
--keep_ckpt_max 20; --save_summary_steps 1; --static off; --recipe_cache /tmp/ssd_recipe_cache/
"""
STATIC = """
--input_pattern -i required; --output_dir -o required; --batch_size -b required; --steps -s required; --workers -w 1
"""


@dataclass(frozen=True)
class Row:
    """What the document says of a flag."""

    name: str
    short: str
    original_default: str
    became: str
    default: str
    why: str


def read_tables() -> list[list[Row]]:
    tables: list[list[Row]] = []
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if line.startswith("| flag"):
            tables.append([])
        elif line.startswith("| `--"):
            tables[-1].append(Row(*cells))
    return tables


def list_original(text: str) -> list[tuple[str, str, str]]:
    words = [flag.split() for flag in text.split(";")]
    return [(flag[0], flag[1] if len(flag) == 3 else "", flag[-1]) for flag in words]


def show(default: object) -> str:
    """A default as the document writes it."""
    if default in (None, (), ""):
        return "none"
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


TRAINER_ROWS, STATIC_ROWS = read_tables()


def test_every_flag_of_the_original_is_there() -> None:
    originals = [list_original(TRAINER), list_original(STATIC)]
    assert [len(flags) for flags in originals] == [34, 5]
    for rows, flags in zip([TRAINER_ROWS, STATIC_ROWS], originals, strict=True):
        assert [(row.name, row.short, row.original_default) for row in rows] == flags
    assert {row.became for row in TRAINER_ROWS + STATIC_ROWS} == {"kept", "gone"}
    for row in TRAINER_ROWS:
        assert row.why or (row.became == "kept" and row.default == row.original_default), row.name


@pytest.mark.parametrize("row", TRAINER_ROWS, ids=lambda row: row.name)
def test_the_program_has_what_is_kept_and_nothing_else(row: Row) -> None:
    flags = {f"--{name}": value for name, value in list_flags(SSDConfig())}
    assert (row.name in flags) == (row.became == "kept")
    if row.became == "kept":
        assert show(flags[row.name]) == row.default
    else:
        assert row.default == ""


@pytest.mark.parametrize("row", [row for row in TRAINER_ROWS if row.short], ids=lambda row: row.name)
def test_short_forms_are_kept(row: Row) -> None:
    value = {"off": [], "bf16": ["fp32"]}.get(row.default, ["7"])
    by_short, by_name = (parse_flags(SSDConfig, [flag, *value], prog="ssd_train") for flag in (row.short, row.name))
    assert by_short == by_name != SSDConfig()


def test_the_tool_for_static_batches_has_its_flags() -> None:
    command = [sys.executable, "-m", "gaudi_datasets", "make-static-batches", "--help"]
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"}
    ).stdout
    for row in STATIC_ROWS:
        default = r"\(required\)" if row.default == "required" else rf"\(default: {row.default}\)"
        assert re.search(rf"{row.short}\b[^\n]* {row.name}\b[^\n]*\n?[^\n]*{default}", text), row.name
