"""The parts of a recipe that follow from flags which both programs have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gaudi_apps.classification.recipe import DataRecipe, ModelRecipe, PruningRecipe, RateRecipe, UseRecipe
from gaudi_apps.distribution import Distribution, share_batch
from gaudi_apps.parity.flags import PARITY_FLAGS
from gaudi_apps.profiling import parse_step_range
from gaudi_apps.settings import RunSettings, make_device_settings

# Flags of both programs that may change between two starts of a run, because the weights don't depend on them.
FREE_FLAGS = frozenset(
    {
        "check_static_shapes",
        "checkpoint",
        "clean",
        "config",
        "data_dir",
        "dataset_parallel_calls",
        "datasets_num_private_threads",
        "debug",
        "device",
        "epochs_between_evals",
        "eval_samples",
        "eval_split",
        "export_features",
        "export_format",
        "grouped_convolution",
        "inference",
        "inter_op_parallelism_threads",
        "intra_op_parallelism_threads",
        "jpeg_data_dir",
        "json",
        "keep_ckpt_max",
        "kills",
        "max_cpus",
        "mode",
        "model_dir",
        "no_hpu",
        "output_dir",
        "patience",
        "profile_steps",
        "recipe_cache",
        "save_checkpoint_steps",
        "save_checkpoints_minutes",
        "stop_threshold",
        "strict",
        "top",
        "training_dataset_cache",
        "vis_dataloader",
        *PARITY_FLAGS,
    }
)
# Flags of both programs for a run that does nothing besides training.
SHORT_RUN = {
    "epochs_between_evals": 0.0,
    "stop_threshold": 0.0,
    "patience": 0,
    "save_checkpoint_steps": 1,
    "keep_ckpt_max": 2,
    "vis_dataloader": False,
    "profile_steps": "0,0",
}


def data_recipe(config: Any, distribution: Distribution, *, least_area: float, eval_steps: int = 0) -> DataRecipe:
    """Images, from the group `data`."""
    data, workers = config.data, distribution.place.size
    whole = share_batch(config.distribution, data.batch_size, workers)
    return DataRecipe(
        data_dir=data.data_dir or data.jpeg_data_dir,
        train_splits=data.train_splits,
        eval_split=data.eval_split,
        jpeg_data_dir=data.jpeg_data_dir,
        batch_size=whole // workers,
        global_batch=whole,
        image_size=data.image_size,
        least_area=data.least_crop_area or least_area,
        flip_probability=data.flip_probability,
        color_jitter=data.color_jitter,
        gray_probability=data.gray_probability,
        caches_encoded=data.training_dataset_cache,
        caches_decoded=data.cache_decoded_image,
        dtype="bfloat16" if data.data_loader_image_type == "bf16" else "float32",
        parallel_calls=data.dataset_parallel_calls,
        threads=data.datasets_num_private_threads,
        num_images=data.num_examples_per_epoch,
        eval_images=eval_steps * whole or config.evaluation.eval_samples,
    )


def run_settings(
    config: Any,
    distribution: Distribution,
    *,
    log_every: int,
    summary_every: int,
    profile_steps: str,
    weights: str | None,
    evaluates: bool,
    steps: int,
    steps_per_call: int = 1,
) -> RunSettings:
    """What the machinery has to know."""
    run, device, report = config.run, config.device, config.report
    return RunSettings(
        device=make_device_settings(
            config,
            distribution,
            intra_threads=device.intra_op_parallelism_threads,
            inter_threads=device.inter_op_parallelism_threads,
        ),
        model_dir=Path(run.model_dir),
        clean=run.clean,
        checkpoint=run.checkpoint,
        keep_checkpoints=report.keep_ckpt_max,
        checkpoint_minutes=report.save_checkpoints_minutes,
        log_every=log_every,
        summary_every=summary_every,
        traced=parse_step_range(profile_steps, "profile_steps"),
        draws_input=report.vis_dataloader,
        weights=weights,
        target=config.evaluation.stop_threshold,
        patience=config.evaluation.patience,
        scores=evaluates and not config.data.use_synthetic_data,
        reports=evaluates,
        steps=steps,
        kills=run.kills,
        steps_per_call=steps_per_call,
        distribution=distribution,
    )


def model_recipe(config: Any, name: str, weights_flag: str) -> ModelRecipe:
    """The network, from the group `weights` and its form, from `device`."""
    weights = config.weights
    return ModelRecipe(
        name=name,
        padding=weights.padding,
        zero_gamma=weights.zero_gamma,
        head_only=weights.fine_tune,
        grouped_convolution=config.device.grouped_convolution,
        weights_flag=weights_flag,
    )


def for_version(rate: RateRecipe, version: int) -> RateRecipe:
    """Return a rate as a version of the recipes has it, see `gaudi_apps.recipe_version`."""
    return rate if version > 1 else replace(rate, drop_delay=0, cycle_decay=1.0, fractional_decay=False)


def pruning_recipe(config: Any) -> PruningRecipe | None:
    """Pruning, from the group of its name; None without a method."""
    pruning = config.pruning
    if pruning.pruning_method is None:
        return None
    return PruningRecipe(
        initial_sparsity=pruning.pruning_initial_sparsity,
        final_sparsity=pruning.pruning_final_sparsity,
        begin_step=pruning.pruning_begin_step,
        end_step=pruning.pruning_end_step,
        frequency=pruning.pruning_frequency,
    )


def use_recipe(config: Any, *, export_at_end: str | None) -> UseRecipe:
    """What is done with a trained network, from the group `use`."""
    use = config.use
    return UseRecipe(
        use.inference,
        use.top,
        use.strict,
        use.output_dir,
        use.export_format,
        use.export_features,
        export_at_end,
    )
