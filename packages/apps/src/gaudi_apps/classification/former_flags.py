"""Flags of the original ResNet-50 and ResNeXt programs that ours do not have, each with what to give in its place."""

from __future__ import annotations

from gaudi_datasets.former_flags import OFF, ON, FormerFlag, rename

_SEED = "give --seed, the one seed of a run"
_MEASUREMENTS = "history.jsonl in --model_dir and TensorBoard have all measurements; leave it out"
_INNER_SWITCH = "is an inner switch of TensorFlow that no result depends on; leave it out"
_NO_USE = "it did nothing in the original either; give --base_learning_rate, --lr_schedule and --optimizer"

_BOTH = (
    FormerFlag("--loss_scale", "bf16 and fp32 need no scaling of the loss; leave it out", "-ls", "none"),
    FormerFlag(
        "--all_reduce_alg", "TensorFlow chooses: NCCL between GPUs, a ring elsewhere; leave it out", "-ara", "none"
    ),
    FormerFlag("--num_packs", "give --fusion_threshold_mb, the MiB of gradients that travel together", default="1"),
    FormerFlag(
        "--tf_gpu_thread_mode", "set the environment variable TF_GPU_THREAD_MODE to the same value", "-gt_mode", "none"
    ),
    FormerFlag(
        "--per_gpu_thread_count", "set the environment variable TF_GPU_THREAD_COUNT to the same value", "-pgtc", "0"
    ),
    FormerFlag("--tf_data_experimental_slack", "batches are made ahead of the step; leave it out", meant=(OFF,)),
    FormerFlag("--benchmark_logger_type", _MEASUREMENTS, default="BaseBenchmarkLogger", meant=("BaseBenchmarkLogger",)),
    FormerFlag("--benchmark_test_id", _MEASUREMENTS, "-bti", "none"),
    FormerFlag("--benchmark_log_dir", _MEASUREMENTS, "-bld", "none"),
    FormerFlag("--gcp_project", _MEASUREMENTS, "-gp", "none"),
    FormerFlag("--bigquery_data_set", _MEASUREMENTS, "-bds", "test_benchmark"),
    FormerFlag("--bigquery_run_table", _MEASUREMENTS, "-brt", "benchmark_run"),
    FormerFlag("--bigquery_run_status_table", _MEASUREMENTS, "-brst", "benchmark_run_status"),
    FormerFlag("--bigquery_metric_table", _MEASUREMENTS, "-bmt", "benchmark_metric"),
    FormerFlag(
        "--data_format",
        "it is the one format that every device computes; leave it out",
        "-df",
        "channels_last",
        meant=("channels_last",),
    ),
    FormerFlag("--enable_scoped_allocator", f"it {_INNER_SWITCH}", meant=(OFF,)),
    FormerFlag(
        "--bf16_config_path",
        "`--dtype bf16` is Keras' mixed precision, which has no list of operations; leave it out",
        default="none",
    ),
    FormerFlag(
        "--experimental_preloading",
        "two batches wait in the memory of the machine, none on the device; leave it out",
        default=ON,
        meant=(OFF,),
    ),
    FormerFlag("--shuffle_seed", _SEED, default="none"),
    FormerFlag("--sample_distorted_bounding_box_seed", _SEED, default="0"),
    FormerFlag("--random_flip_left_right_seed", _SEED, default="none"),
    FormerFlag(
        "--interleave_cycle_length",
        "the order of images does not depend on files; --dataset_parallel_calls says how many are read at once",
        default="10",
    ),
    FormerFlag("--helpfull", "give --help", replace=lambda values: ["--help"]),
    FormerFlag("--helpshort", "give --help", replace=lambda values: ["--help"]),
)

RESNET = (
    *_BOTH,
    FormerFlag("--run_eagerly", "it was for debugging the original in TensorFlow; leave it out", meant=(OFF,)),
    FormerFlag(
        "--fp16_implementation",
        "there is no fp16, for bf16 has the range of fp32; give `--dtype bf16`",
        default="keras",
    ),
    FormerFlag("--enable_xla", "set the environment variable TF_XLA_FLAGS=--tf_xla_auto_jit=2", meant=(OFF,)),
    FormerFlag("--enable_eager", "TensorFlow 2 is eager wherever it is not compiled; leave it out", meant=(ON,)),
    FormerFlag(
        "--set_learning_phase_to_train",
        "training and evaluation tell the network which they are; leave it out",
        default=ON,
        meant=(ON,),
    ),
    FormerFlag("--explicit_gpu_placement", "give `--device gpu`", meant=(OFF,)),
    FormerFlag("--use_trivial_model", "it measured the loader, which `gaudi-datasets bench` does", meant=(OFF,)),
    FormerFlag("--report_accuracy_metrics", "accuracy is always reported; leave it out", default=ON, meant=(ON,)),
    FormerFlag("--use_tensor_lr", "the rate is given to each step as a tensor; leave it out", default=ON, meant=(ON,)),
    FormerFlag(
        "--enable_tensorboard",
        "its files are always written, into `summaries/` of --model_dir; leave it out",
        meant=(ON,),
    ),
    FormerFlag(
        "--batchnorm_spatial_persistent",
        "set the environment variable TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1",
        default=ON,
    ),
    FormerFlag("--enable_get_next_as_optional", f"it {_INNER_SWITCH}", meant=(OFF,)),
    FormerFlag("--tpu", "there is no TPU; give --device", default="none", meant=("",)),
    FormerFlag(
        "--use_tf_while_loop",
        "steps of one call are always a loop in TensorFlow; `--steps_per_loop 1` makes each step a call",
        default=ON,
        meant=(ON,),
    ),
    FormerFlag("--initial_learning_rate_per_sample", _NO_USE, default="7e-05"),
    FormerFlag("--lr_decay_factor", _NO_USE, default="0.94"),
    FormerFlag("--num_epochs_per_decay", _NO_USE, default="2.5"),
    FormerFlag("--use_tf_function", "steps are always compiled; leave it out", default=ON, meant=(ON,)),
    FormerFlag("--use_distributed_eval", "each process always scores its part; leave it out", meant=(ON,)),
    FormerFlag(
        "--use_keras_mixed_precision", "`--dtype bf16` is always Keras' mixed precision; leave it out", meant=(ON,)
    ),
    FormerFlag("--dump_config", "config.yaml in --model_dir has all flags of a run; leave it out", default="none"),
    # Of the launcher demo_resnet_keras.py.
    FormerFlag(
        "--keras_applications_model",
        "give --model with the name in small letters and _keras behind it, as `--model resnet50v2_keras`",
        default="none",
        replace=lambda values: ["--model", *(f"{name.lower()}_keras" for name in values)],
    ),
    # Of tfhub_export.py and transfer_learning_demo.py.
    FormerFlag("--model_path", "give --model_dir with `--mode export`", default="none"),
    FormerFlag("--export_path", "give --output_dir with `--mode export`", default="none"),
    FormerFlag("--checkpoint_path", "give --pretrained_filepath with --fine_tune", default="none"),
    FormerFlag("--do_data_augmentation", "training images are always augmented; leave it out", meant=(ON,)),
    FormerFlag("--new_batch_size", "give --batch_size", "-nbs", "16", replace=rename("--batch_size")),
)

RESNEXT = (
    *_BOTH,
    FormerFlag("--dummy_epoch", "it ran two steps before the training was timed; leave it out", meant=(OFF,)),
    FormerFlag("--log_steps", "give --display_steps", default="100"),
    FormerFlag("--train_offset", "a run that goes on knows its step; leave it out", default="0", meant=("0",)),
    FormerFlag(
        "--resnet_version", "version 1 is the recipe's, and the one there is; leave it out", "-rv", "1", meant=("1",)
    ),
    FormerFlag("--return_before_eval", "give --disable_eval", "-rbv", meant=(OFF,)),
    FormerFlag(
        "--image_bytes_as_serving_input",
        "a SavedModel has a signature for encoded images and one for pixels; leave it out",
        meant=(ON,),
    ),
    FormerFlag(
        "--use_train_and_evaluate", "it was of Estimator; --epochs_between_evals says when to evaluate", meant=(OFF,)
    ),
    FormerFlag(
        "--mini_imagenet",
        "make such records by `gaudi-datasets convert mini-imagenet`, and name their folder by --data_dir",
        meant=(OFF,),
    ),
)
