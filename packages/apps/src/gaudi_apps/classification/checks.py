"""Rules about the values of flags that both programs have, and how those of one kind are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gaudi_apps.classification import flags
from gaudi_apps.classification.recipe import LISTED, SIDE_FLAGS
from gaudi_apps.distribution_flags import check_distribution
from gaudi_apps.parity.flags import check_parity
from gaudi_apps.profiling import parse_step_range
from gaudi_datasets.errors import FlagError


def check_above(bound: float, values: Mapping[str, float]) -> None:
    """Raise FlagError for the first of the flags that is no finite number above the bound."""
    for flag, value in values.items():
        if not (math.isfinite(value) and value > bound):
            raise FlagError(f"--{flag} {value:g}: must be a finite number above {bound:g}")


def check_least(least: float, values: Mapping[str, float]) -> None:
    """Raise FlagError for the first of the flags that is no finite number of at least so much."""
    for flag, value in values.items():
        if not (math.isfinite(value) and value >= least):
            raise FlagError(f"--{flag} {value:g}: must be at least {least:g}")


def check_share(values: Mapping[str, float], *, below_one: bool = False) -> None:
    """Raise FlagError for the first of the flags that is not in 0..1, or not below 1."""
    for flag, value in values.items():
        if not (0 <= value < 1 if below_one else 0 <= value <= 1):
            raise FlagError(f"--{flag} {value:g}: must be in 0..1" + ", and below 1" * below_one)


def check_common(config: Any, *, steps: int, mode: str, skips_evaluation: str | None, weights_flag: str) -> None:
    """Check the groups of flags that both programs have.

    Args:
        config: of either program.
        steps: that the run has in all; 0 where epochs decide.
        mode: what is done.
        skips_evaluation: the flag that is given to evaluate nothing, if it is.
        weights_flag: the flag that names a file of weights.

    Raises:
        FlagError: for the first value that breaks a rule of its own or of another flag.
    """
    data, evaluation, device = config.data, config.evaluation, config.device
    check_least(1, {"batch_size": data.batch_size, "dataset_parallel_calls": data.dataset_parallel_calls})
    check_least(1, {"keep_ckpt_max": config.report.keep_ckpt_max, "top": config.use.top})
    if config.use.top > LISTED:
        raise FlagError(f"--top {config.use.top}: must be at most {LISTED}")
    check_least(32, {"image_size": data.image_size})
    threads = {
        "intra_op_parallelism_threads": device.intra_op_parallelism_threads,
        "inter_op_parallelism_threads": device.inter_op_parallelism_threads,
    }
    at_least_zero = {
        "seed": config.run.seed,
        "num_examples_per_epoch": data.num_examples_per_epoch,
        "datasets_num_private_threads": data.datasets_num_private_threads,
        "mixup_alpha": config.weights.mixup_alpha,
        "epochs_between_evals": evaluation.epochs_between_evals,
        "eval_samples": evaluation.eval_samples,
        "patience": evaluation.patience,
        "max_cpus": device.max_cpus,
        **{name: 0 if value == "auto" else value for name, value in threads.items()},
        "save_checkpoint_steps": config.report.save_checkpoint_steps,
        "save_checkpoints_minutes": config.report.save_checkpoints_minutes,
    }
    check_least(0, at_least_zero)
    check_above(0, {"least_crop_area": 1.0 if data.least_crop_area is None else data.least_crop_area})
    check_share({"least_crop_area": data.least_crop_area or 0.0})
    check_share({name: getattr(data, name) for name in ("flip_probability", "color_jitter", "gray_probability")})
    check_share({"stop_threshold": evaluation.stop_threshold})
    check_share({"ema_decay": config.weights.ema_decay, "dropout": config.weights.dropout or 0.0}, below_one=True)
    _check_pruning(config.pruning)
    if config.pruning.pruning_method and config.weights.ema_decay:
        raise FlagError("--pruning_method: the average of --ema_decay would keep what is pruned; leave one of them out")
    _check_inputs(mode, config.run, data, config.use)
    _check_checkpoint(mode, config.run, steps)
    _check_stopping(evaluation, "use_synthetic_data" if data.use_synthetic_data else skips_evaluation)
    check_distribution(config.distribution)
    check_parity(config.parity, mode, (weights_flag, *SIDE_FLAGS))
    if device.no_hpu and device.device == "hpu":
        raise FlagError("--no_hpu: contradicts --device hpu; leave one of them out")
    parse_step_range(config.report.profile_steps, "profile_steps")


def _check_stopping(evaluation: flags.EvaluationFlags, skips: str | None) -> None:
    if not (evaluation.stop_threshold or evaluation.patience):
        return
    if evaluation.epochs_between_evals == 0:
        raise FlagError("--stop_threshold and --patience: need evaluations; give --epochs_between_evals above 0")
    if skips is not None:
        raise FlagError(f"--stop_threshold and --patience: need evaluations; leave out --{skips}")


def _check_pruning(pruning: flags.PruningFlags) -> None:
    sparsities = {
        "pruning_initial_sparsity": pruning.pruning_initial_sparsity,
        "pruning_final_sparsity": pruning.pruning_final_sparsity,
    }
    check_share(sparsities, below_one=True)
    check_least(1, {"pruning_frequency": pruning.pruning_frequency})
    check_least(0, {"pruning_begin_step": pruning.pruning_begin_step})
    if pruning.pruning_end_step <= pruning.pruning_begin_step:
        raise FlagError(f"--pruning_end_step {pruning.pruning_end_step}: must be above --pruning_begin_step")


def _check_inputs(mode: str, run: flags.RunFlags, data: flags.DataFlags, use: flags.UseFlags) -> None:
    """What each mode needs to read, and what only some modes read."""
    folders = {"data_dir": data.data_dir, "jpeg_data_dir": data.jpeg_data_dir}
    given = next((f"--{flag} {folder}" for flag, folder in folders.items() if folder is not None), "")
    if data.use_synthetic_data and given:
        raise FlagError(f"--use_synthetic_data: contradicts {given}; leave one of them out")
    if not data.train_splits:
        raise FlagError("--train_splits: names nothing; give one or more, as train")
    if mode == "predict" and not use.inference:
        raise FlagError("--mode predict: needs --inference with pictures, videos or a folder")
    if mode not in ("predict", "export") and use.inference:
        raise FlagError(f"--inference {use.inference[0]}: is for --mode predict and export; mode is {mode}")
    if run.json and mode not in ("plan", "parity"):
        raise FlagError(f"--json: is for --mode plan and parity; mode is {mode}")
    if mode == "eval" and data.use_synthetic_data:
        raise FlagError("--mode eval: random images have no truth; give --data_dir, not --use_synthetic_data")
    sized = mode == "plan" and data.num_examples_per_epoch > 0
    if mode not in ("predict", "export") and not (given or data.use_synthetic_data or sized):
        raise FlagError(f"--mode {mode}: needs --data_dir, with records or folders of classes")


def _check_checkpoint(mode: str, run: flags.RunFlags, steps: int) -> None:
    if mode == "verify-resume" and not 1 <= run.kills < (steps or math.inf):
        raise FlagError(f"--kills {run.kills}: must be at least 1, and below the steps of the run")
    named = ("newest", "best", "all") if mode == "eval" else ("newest", "best")
    if run.checkpoint not in named and not run.checkpoint.isdecimal():
        raise FlagError(f"--checkpoint {run.checkpoint}: must be {', '.join(named)} or a step, with --mode {mode}")
    if run.checkpoint != "newest" and mode not in ("eval", "predict", "export", "parity"):
        which = "eval, predict, export and parity"
        raise FlagError(f"--checkpoint {run.checkpoint}: is for --mode {which}; mode is {mode}")
    if run.clean and mode != "train":
        raise FlagError(f"--clean: is for --mode train; mode is {mode}")
