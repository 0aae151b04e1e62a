"""Flags of the MXNet submission's program that ssd_mxnet_train does not have, each with what to give in its place."""

from __future__ import annotations

from gaudi_datasets.former_flags import OFF, ON, FormerFlag

_DALI = "it was of DALI, in whose place OpenCV decodes on the CPU; leave it out"
_NOT_FUSED = "MXNet 1.9.1 has no fused operator, so nothing is fused; leave it out"

FORMER_FLAGS = (
    FormerFlag(
        "--backbone",
        "ResNet-34 up to its third stage is the one backbone; leave it out",
        default="resnet34_mlperf",
        meant=("resnet34_mlperf",),
    ),
    FormerFlag("--bn-fp16", "the statistics of batch norm are float32 in every precision; leave it out", meant=(OFF,)),
    FormerFlag("--no-fuse-bn-add-relu", _NOT_FUSED, meant=(ON,)),
    FormerFlag("--no-fuse-bn-relu", _NOT_FUSED, meant=(ON,)),
    FormerFlag("--input-jpg-decode", _DALI, default="gpu", meant=("cpu",)),
    FormerFlag("--hw-decoder-load", _DALI, default="0.0", meant=("0",)),
    FormerFlag("--data-shape", "300 is the one size of this network; leave it out", default="300", meant=("300",)),
    FormerFlag("--input-batch-multiplier", _DALI, default="1", meant=("1",)),
    FormerFlag(
        "--resume-from",
        "the same command with the same --model_dir goes on from its newest checkpoint; --pretrained-backbone begins a "
        "new run with a checkpoint's weights, and --checkpoint names one for `--mode val`",
        default="none",
    ),
    FormerFlag("--start-epoch", "a checkpoint knows its step; leave it out", default="1", meant=("1",)),
    FormerFlag("--cocoapi-threads", "scoring takes the threads that it needs; leave it out", default="1"),
    FormerFlag("--bulk-last-wgrad", "it was of the submission's own build of MXNet; leave it out", meant=(OFF,)),
    FormerFlag(
        "--results", "each validation at the end leaves detections.json in --model_dir; leave it out", default="none"
    ),
    FormerFlag("--log-level", "there is one level; --debug shows tracebacks", default="INFO", meant=("INFO",)),
    FormerFlag(
        "--log-local-ranks",
        "rank 0 shows, and others write `worker_R/log.txt` in --model_dir; leave it out",
        default="0",
        meant=("0",),
    ),
    FormerFlag("--profile-no-horovod", "MXNet's profiler traces each process by itself; leave it out", meant=(ON,)),
    FormerFlag(
        "--test-initialization", "give --dry_run, which does all up to the first step, and this step", meant=(OFF,)
    ),
    FormerFlag("--test-anchors", "the default boxes are tested in gaudi-ops; leave it out", meant=(OFF,)),
)
