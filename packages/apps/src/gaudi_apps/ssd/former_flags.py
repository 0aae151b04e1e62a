"""Flags of the original SSD program that ssd_train does not have, each with what to give in its place."""

from __future__ import annotations

from gaudi_datasets.former_flags import ON, FormerFlag

FORMER_FLAGS = (
    FormerFlag(
        "--use_cocoeval_cc",
        "the scorer is always a fast one, with pycocotools' figures; leave it out",
        meant=(ON,),
    ),
)
