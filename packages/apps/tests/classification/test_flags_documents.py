"""docs/resnet_flags.md and docs/resnext_flags.md tell the truth about every flag of the original programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.classification.resnet_config import ResNetConfig
from gaudi_apps.classification.resnext_config import ResNeXtConfig
from gaudi_apps.config_file import list_flags
from gaudi_datasets.flags import parse_flags

DOCS = Path(__file__).parents[2] / "docs"
ALIASES = {"--global_seed": "--seed"}

# Name, short form and default of each flag of the originals, in their order.
RESNET = """
--data_dir -dd /data/tensorflow/imagenet/tf_records/; --jpeg_data_dir -jpdd none; --model_dir -md /tmp/resnet;
--clean off; --train_epochs -te 1; --epochs_between_evals -ebe 1; --batch_size -bs 32; --num_gpus -ng 1;
--run_eagerly off; --distribution_strategy -ds off; --use_synthetic_data -synth off; --dtype -dt fp32;
--loss_scale -ls none; --fp16_implementation keras; --all_reduce_alg -ara none; --num_packs 1;
--tf_gpu_thread_mode -gt_mode none; --per_gpu_thread_count -pgtc 0; --datasets_num_private_threads none;
--training_dataset_cache off; --tf_data_experimental_slack off; --enable_xla off; --log_steps 100;
--benchmark_logger_type BaseBenchmarkLogger; --benchmark_test_id -bti none; --benchmark_log_dir -bld none;
--gcp_project -gp none; --bigquery_data_set -bds test_benchmark; --bigquery_run_table -brt benchmark_run;
--bigquery_run_status_table -brst benchmark_run_status; --bigquery_metric_table -bmt benchmark_metric;
--worker_hosts none; --task_index -1; --data_format -df channels_last; --enable_eager off; --skip_eval off;
--set_learning_phase_to_train on; --explicit_gpu_placement off; --use_trivial_model off; --report_accuracy_metrics on;
--use_tensor_lr on; --lr_schedule piecewise; --enable_tensorboard off; --train_steps none; --profile_steps none;
--batchnorm_spatial_persistent on; --enable_get_next_as_optional off; --enable_checkpoint_and_export off; --tpu none;
--steps_per_loop 200; --use_tf_while_loop on; --optimizer SGD; --label_smoothing 0.0; --enable_scoped_allocator off;
--model resnet50_v1.5; --initial_learning_rate_per_sample 7e-05; --lr_decay_factor 0.94; --num_epochs_per_decay 2.5;
--pretrained_filepath none; --pruning_method none; --pruning_initial_sparsity 0.0; --pruning_final_sparsity 0.5;
--pruning_begin_step 0; --pruning_end_step 100000; --pruning_frequency 100; --bf16_config_path none;
--global_seed none; --use_tf_function on; --single_l2_loss_op off; --cache_decoded_image off;
--base_learning_rate 0.1; --data_loader_image_type -dlit fp32; --experimental_preloading on; --use_horovod off;
--use_distributed_eval off; --use_keras_mixed_precision off; --horovod_hierarchical_allreduce off;
--weight_decay 0.0001; --end_learning_rate none; --lars_epsilon 0.0; --warmup_epochs none; --momentum 0.9;
--shuffle_seed none; --sample_distorted_bounding_box_seed 0; --random_flip_left_right_seed none;
--dataset_parallel_calls AUTOTUNE; --interleave_cycle_length 10; --dump_config none
"""
RESNEXT = """
--data_dir -dd /data/tensorflow/imagenet/tf_records/; --jpeg_data_dir -jpdd none; --model_dir -md /tmp/resnet;
--clean off; --train_epochs -te 10; --epochs_between_evals -ebe 1; --stop_threshold -st none; --batch_size -bs 32;
--num_gpus -ng 1; --hooks -hk LoggingTensorHook; --export_dir -ed none; --distribution_strategy -ds off;
--display_steps -dis 100; --disable_checkpoints off; --save_checkpoint_steps -cs none; --no_hpu off;
--dummy_epoch off; --inter_op_parallelism_threads -inter 0; --intra_op_parallelism_threads -intra 0;
--use_synthetic_data -synth off; --max_train_steps -mts none; --max_eval_steps -mes none;
--data_loader_image_type -dlit fp32; --dtype -dt fp32; --bf16_config_path none; --loss_scale -ls none;
--all_reduce_alg -ara none; --num_packs 1; --tf_gpu_thread_mode -gt_mode none; --per_gpu_thread_count -pgtc 0;
--datasets_num_private_threads none; --tf_data_experimental_slack off; --benchmark_logger_type BaseBenchmarkLogger;
--benchmark_test_id -bti none; --log_steps 100; --benchmark_log_dir -bld none; --gcp_project -gp none;
--bigquery_data_set -bds test_benchmark; --bigquery_run_table -brt benchmark_run;
--bigquery_run_status_table -brst benchmark_run_status; --bigquery_metric_table -bmt benchmark_metric;
--worker_hosts none; --task_index -1; --data_format -df channels_last; --experimental_preloading on; --train_offset 0;
--resnet_version -rv 1; --return_before_eval -rbv off; --disable_eval off; --fine_tune -ft off;
--pretrained_model_checkpoint_path -pmcp none; --eval_only off; --image_bytes_as_serving_input off;
--use_train_and_evaluate off; --enable_lars off; --label_smoothing 0.1; --epochs_for_lars 38; --warmup_epochs 8.0;
--start_learning_rate 9.5; --weight_decay 6.103515625e-05; --disable_warmup off; --use_cosine_lr on; --momentum 0.875;
--model_type resnext; --save_summary_steps 100; --enable_scoped_allocator off; --resnet_size -rs 101;
--profile_steps 7,10; --use_horovod -hvd off; --mini_imagenet off; --max_cpus -mc 16; --shuffle_seed none;
--sample_distorted_bounding_box_seed 0; --random_flip_left_right_seed none; --dataset_parallel_calls AUTOTUNE;
--interleave_cycle_length 10
"""


@dataclass(frozen=True)
class Row:
    """What a document says of a flag."""

    name: str
    short: str
    original_default: str
    became: str
    default: str
    why: str


def read_rows(name: str) -> list[Row]:
    lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return [Row(*row) for line, row in zip(lines, cells, strict=True) if line.startswith("| `--")]


def list_original(text: str) -> list[tuple[str, str, str]]:
    words = [flag.split() for flag in text.split(";")]
    return [(flag[0], flag[1] if len(flag) == 3 else "", flag[-1]) for flag in words]


def show(default: object) -> str:
    """A default as the document writes it."""
    if default in (None, (), ""):
        return "none"
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


PROGRAMS: dict[str, tuple[Any, str]] = {"resnet": (ResNetConfig, RESNET), "resnext": (ResNeXtConfig, RESNEXT)}
ROWS = [(name, row) for name in PROGRAMS for row in read_rows(f"{name}_flags.md")]
IDS = [f"{name}{row.name}" for name, row in ROWS]


@pytest.mark.parametrize(("name", "count"), [("resnet", 88), ("resnext", 76)])
def test_every_flag_of_the_original_is_there(name: str, count: int) -> None:
    rows, flags = read_rows(f"{name}_flags.md"), list_original(PROGRAMS[name][1])
    assert len(flags) == count
    assert [(row.name, row.short, row.original_default) for row in rows] == flags
    for row in rows:
        assert row.became in ("kept", "gone")
        assert row.why or (row.became == "kept" and row.default == row.original_default), row.name


@pytest.mark.parametrize(("name", "row"), ROWS, ids=IDS)
def test_the_program_has_what_is_kept_and_nothing_else(name: str, row: Row) -> None:
    flags = {f"--{flag}": value for flag, value in list_flags(PROGRAMS[name][0]())}
    own = ALIASES.get(row.name, row.name)
    assert (own in flags) == (row.became == "kept")
    assert row.default == (show(flags[own]) if row.became == "kept" else "")


@pytest.mark.parametrize(("name", "row"), [one for one in ROWS if one[1].became == "kept"])
def test_names_and_short_forms_are_taken(name: str, row: Row) -> None:
    config_class = PROGRAMS[name][0]
    default = dict(list_flags(config_class())).get(row.name[2:])
    choices = {"dtype": "bf16", "data_loader_image_type": "bf16", "resnet_size": "50", "model_type": "resnet"}
    choices |= {"optimizer": "LARS", "lr_schedule": "cosine", "pruning_method": "polynomial_decay"}
    choices |= {"distribution_strategy": "hpu"}
    value = [] if isinstance(default, bool) else [choices.get(row.name[2:], "7")]
    flag = "--no_use_cosine_lr" if row.name == "--use_cosine_lr" else row.name
    by_name = parse_flags(config_class, [flag, *value], prog=name)
    assert by_name != config_class()
    if row.short:
        assert parse_flags(config_class, [row.short, *value], prog=name) == by_name
