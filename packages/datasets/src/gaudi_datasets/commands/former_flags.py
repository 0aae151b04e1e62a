"""Flags of the tools that commands of gaudi-datasets replace, each with what to give in its place."""

from __future__ import annotations

from collections.abc import Sequence

from gaudi_datasets.former_flags import OFF, ON, FormerFlag, rename

_UPLOAD = "copy the records by your cloud's own program"
_CORNERS = "boxes are always corners, as fractions of the image; leave it out"
_AS_THEY_ARE = "annotations are read as they are, without a preparation"

PREPROCESS_IMAGENET = (
    FormerFlag("--raw_data_dir", "give --from", default="none", replace=rename("--from")),
    FormerFlag("--local_scratch_dir", "give --output_dir", default="none", replace=rename("--output_dir")),
    FormerFlag("--gcs_upload", _UPLOAD, default=ON, meant=(OFF,)),
    FormerFlag("--project", _UPLOAD, default="none"),
    FormerFlag("--gcs_output_path", _UPLOAD, default="none"),
)
CREATE_TFRECORD = (
    FormerFlag("--images-dir", "give --images", "-i", "required", replace=rename("--images")),
    FormerFlag("--annotations-file", "give --annotations", "-a", "required", replace=rename("--annotations")),
    FormerFlag("--num-shards", "give --shards", "-n", "1", replace=rename("--shards")),
    FormerFlag("--output", "give --output_dir", "-o", "required", replace=rename("--output_dir")),
    FormerFlag("--ltrb", _CORNERS, meant=(ON,)),
    FormerFlag("--ratio", _CORNERS, meant=(ON,)),
    FormerFlag("--skip-empty", "give `--split train`, which leaves out images without boxes; `--split val` keeps them"),
    FormerFlag(
        "--size-threshold", "boxes of no size are left out and counted; leave it out", default="0.0", meant=("0",)
    ),
    FormerFlag(
        "--seed",
        "records are in the order of the annotations, and a training draws its own; leave it out",
        "-s",
        "none",
    ),
)
PREPARE_JSON = (
    FormerFlag("input_file", _AS_THEY_ARE, default="required"),
    FormerFlag("output_file", _AS_THEY_ARE, default="required"),
    FormerFlag("--keep-keys", _AS_THEY_ARE, "-k"),
    FormerFlag("--pretty-print", _AS_THEY_ARE, "-p"),
)
_PROFILE = "profile a training by `resnext_train --profile_steps 5,8`"
BENCHMARK_DATALOADER = (
    FormerFlag("--max_train_steps", "give --seconds, how long to measure", "-s", "none"),
    FormerFlag("--enable_profiling", _PROFILE, "-p"),
    FormerFlag("--profiling_iter_cnt", _PROFILE, "-c", "20"),
    FormerFlag("--profiling_warmup_steps", _PROFILE, "-w", "20"),
    FormerFlag(
        "--experimental_preloading",
        "what is measured ends before the device; leave it out",
        "-e",
        "1",
        meant=("0", "1"),
    ),
)
_BY_COMMAND = {
    ("imagenet",): PREPROCESS_IMAGENET,
    ("convert", "imagenet"): PREPROCESS_IMAGENET,
    ("convert", "coco"): (*CREATE_TFRECORD, *PREPARE_JSON),
    ("bench",): BENCHMARK_DATALOADER,
}


def find_former_flags(argv: Sequence[str]) -> Sequence[FormerFlag]:
    """Return the flags of the tool that the command of these arguments replaces."""
    return next((table for words, table in _BY_COMMAND.items() if tuple(argv[: len(words)]) == words), ())
