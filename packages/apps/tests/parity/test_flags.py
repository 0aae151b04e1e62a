from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gaudi_apps.cli.flag_rules import check_bounds
from gaudi_apps.cli.flags import ParityFlags, check_parity
from gaudi_apps.runtime.errors import OtherSideError
from gaudi_apps.training import comparisons as module
from gaudi_apps.training.comparisons import other_arguments, recorded_side
from gaudi_datasets.errors import FlagError


@pytest.mark.parametrize(
    ("flags", "mode", "flag", "named"),
    [
        (ParityFlags(), "parity", "--mode", "--parity_output FOLDER"),
        (ParityFlags(parity_output="x"), "train", "--parity_output", "--mode parity"),
        (ParityFlags(parity_steps=3), "plan", "--parity_steps", "--mode parity"),
        (ParityFlags(("dtype=fp32",), "x"), "parity", "--parity_output", "records a side"),
        (ParityFlags(("dtype",)), "parity", "--parity_against", "one of dtype=.."),
        (ParityFlags(("seed=3",)), "parity", "--parity_against", "one of dtype=.."),
        (ParityFlags(("dtype=fp32", "--dtype=bf16")), "parity", "--parity_against", "dtype is given"),
        (ParityFlags(("recorded=x", "dtype=bf16")), "parity", "--parity_against", "recorded=.."),
    ],
)
def test_faults(flags: ParityFlags, mode: str, flag: str, named: str) -> None:
    with pytest.raises(FlagError) as caught:
        check_parity(flags, mode, ["dtype", "deterministic", "weights"])
    assert caught.value.flag == flag
    assert named in str(caught.value)


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
    arguments = ("--dtype=fp32", "--model_dir=runs/a b", "--deterministic", "--weights=w.npz")
    assert other_arguments(flags, Path("x"))[:-2] == arguments


def test_a_recording_is_taken_as_it_is() -> None:
    flags = ParityFlags(("recorded=some/folder=x",))
    check_parity(flags, "parity", [])
    with recorded_side(flags, ["false"]) as folder:
        assert str(folder) == "some/folder=x"


def test_without_another_side_there_is_none() -> None:
    flags = ParityFlags(parity_output="x")
    check_parity(flags, "parity", [])
    with recorded_side(flags, ["false"]) as folder:
        assert folder is None


def test_what_the_other_side_said_last_is_told_with_its_status() -> None:
    script = "import sys; print('ssd_train: error: records: is missing\\nhint', file=sys.stderr); sys.exit(66)"
    with (
        pytest.raises(OtherSideError, match=r"\(dtype=fp32\): records: is missing$") as caught,
        recorded_side(ParityFlags(("dtype=fp32",)), [sys.executable, "-c", script]),
    ):
        pass
    assert caught.value.exit_status == 66


@pytest.mark.parametrize("start", [partial(module._record, text=""), module._run])
def test_processes_that_are_compared_are_no_ranks_of_this_run(
    start: Callable[[list[str]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is rank 0 of `gaudi-run --np 1`, and has joined; what the user has set is kept."""
    names = {"GAUDI_RUN_COORDINATOR", "GAUDI_RUN_TOKEN", "GAUDI_RUN_ENGINE", "GAUDI_RUN_WORKER", "TF_CONFIG"}
    names |= {"HOROVOD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}
    for name in (*names, "GAUDI_RUN_STALL_SECONDS"):
        monkeypatch.setenv(name, "1")
    code = (
        f"import os, sys; sys.exit({names} & {{*os.environ}} != set() or 'GAUDI_RUN_STALL_SECONDS' not in os.environ)"
    )
    start([sys.executable, "-c", code])


def test_arguments_of_the_other_side_end_the_list_of_this_one() -> None:
    arguments = other_arguments(ParityFlags(("dtype=fp32",)), Path("x"))
    assert arguments == ("--dtype=fp32", "--parity_against", "--parity_output=x")
