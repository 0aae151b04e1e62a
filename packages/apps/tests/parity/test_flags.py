from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gaudi_apps.cli.flag_rules import check_bounds
from gaudi_apps.cli.flags import ParityFlags, check_parity, find_other_side
from gaudi_apps.errors import OtherSideError
from gaudi_apps.training.parity.mode import other_arguments, recorded_side
from gaudi_datasets.errors import FlagError


@pytest.mark.parametrize(
    ("flags", "mode", "fault"),
    [
        (ParityFlags(), "parity", "--mode parity: needs --parity_against, as device=cpu, or --parity_output FOLDER"),
        (ParityFlags(parity_output="x"), "train", "--parity_output: is for --mode parity; mode is train"),
        (ParityFlags(parity_steps=3), "plan", "--parity_steps: is for --mode parity; mode is plan"),
        (ParityFlags(("dtype=fp32",), "x"), "parity", "--parity_output: records a side by itself, so leave out"),
        (ParityFlags(("dtype",)), "parity", "--parity_against dtype: must be one of dtype=.., deterministic=.."),
        (ParityFlags(("seed=3",)), "parity", "--parity_against seed=3: must be one of dtype=.."),
        (ParityFlags(("dtype=fp32", "--dtype=bf16")), "parity", "--dtype=bf16: dtype is given twice"),
        (ParityFlags(("recorded=x", "dtype=bf16")), "parity", "recorded=..: what is recorded does not change"),
    ],
)
def test_faults(flags: ParityFlags, mode: str, fault: str) -> None:
    with pytest.raises(FlagError, match=re.escape(fault)):
        check_parity(flags, mode, ["dtype", "deterministic", "weights"])


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (ParityFlags(("dtype=fp32",), parity_steps=0), "--parity_steps"),
        (ParityFlags(("dtype=fp32",), parity_steps=101), "--parity_steps"),
        (ParityFlags(("dtype=fp32",), parity_rtol=-1.0), "--parity_rtol"),
        (ParityFlags(("dtype=fp32",), parity_atol=float("inf")), "--parity_atol"),
    ],
)
def test_numbers_out_of_bounds(flags: ParityFlags, flag: str) -> None:
    with pytest.raises(FlagError) as caught:
        check_bounds(flags)
    assert caught.value.flag == flag


def test_the_other_side_is_this_side_with_other_flags() -> None:
    flags = ParityFlags(("dtype=fp32", "--model-dir=runs/a b", "deterministic=true", "weights=w.npz"))
    check_parity(flags, "parity", ["dtype", "deterministic", "weights", "model_dir"])
    other = find_other_side(flags)
    assert other is not None
    assert other.recorded is None
    assert other.arguments == ("--dtype=fp32", "--model_dir=runs/a b", "--deterministic", "--weights=w.npz")


def test_a_recording_is_taken_as_it_is() -> None:
    flags = ParityFlags(("recorded=some/folder=x",))
    check_parity(flags, "parity", [])
    with recorded_side(flags, ["false"]) as folder:
        assert str(folder) == "some/folder=x"


def test_without_another_side_there_is_none() -> None:
    flags = ParityFlags(parity_output="x")
    check_parity(flags, "parity", [])
    assert find_other_side(flags) is None
    with recorded_side(flags, ["false"]) as folder:
        assert folder is None


def test_what_the_other_side_said_last_is_told_with_its_status() -> None:
    script = "import sys; print('ssd_train: error: records: no such folder\\nhint', file=sys.stderr); sys.exit(66)"
    with (
        pytest.raises(OtherSideError, match=r"the other side \(dtype=fp32\): records: no such folder$") as caught,
        recorded_side(ParityFlags(("dtype=fp32",)), [sys.executable, "-c", script]),
    ):
        pass
    assert caught.value.exit_status == 66


def test_arguments_of_the_other_side_end_the_list_of_this_one() -> None:
    arguments = other_arguments(ParityFlags(("dtype=fp32",)), Path("x"))
    assert arguments == ("--dtype=fp32", "--parity_against", "--parity_output=x")
