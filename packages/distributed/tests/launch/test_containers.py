"""The images that gaudi-run takes where none is named, and as whom Docker runs them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from gaudi_distributed.launch.containers import choose_image
from gaudi_distributed.launch.flags import ContainerKind, parse_flags
from gaudi_distributed.launch.presets import Accelerator

Plan = Callable[..., str]


@pytest.mark.parametrize(
    ("kind", "accelerator", "program", "image"),
    [
        ("docker", "none", "ssd_train", "gaudi-vision:default"),
        ("docker", "hpu", "ssd_train", "gaudi-vision:gaudi"),
        ("docker", "none", "own_train", "gaudi-vision:own"),
        ("docker", "none", "/opt/bin/own_train", "gaudi-vision:own"),
        ("docker", "none", "python -m own.programs.own_train", "gaudi-vision:own"),
        ("docker", "none", "/usr/bin/python3.11 -u -m own_train", "gaudi-vision:own"),
        ("docker", "none", "python run.py -m own_train", "gaudi-vision:default"),
        ("docker", "hpu", "own_train", "gaudi-vision:gaudi"),
        ("singularity", "none", "resnet_train", "gaudi-vision-default.sif"),
        ("singularity", "hpu", "ssd_train", "gaudi-vision-gaudi.sif"),
        ("singularity", "none", "own_train", "gaudi-vision-own.sif"),
    ],
)
def test_an_image_for_device_and_program(
    kind: ContainerKind,
    accelerator: Accelerator,
    program: str,
    image: str,
    plan: Plan,
    register: Callable[[str], None],
) -> None:
    register("own_presets:PRESETS")
    assert choose_image(kind, accelerator, (*program.split(), "--x")) == image
    text = plan(f"--np 2 --{kind} --accelerator {accelerator} --dry_run {program}")
    assert f"    {image}\n" in text


@pytest.mark.parametrize("kind", ["docker", "singularity"])
def test_a_short_way_to_write_it(kind: str) -> None:
    short, long = parse_flags(["--np", "2", f"--{kind}", "x"]), parse_flags(["--np", "2", "--container", kind, "x"])
    assert short.container == long.container == kind


def test_the_launcher_inside_gets_no_flag_of_the_outside(plan: Plan) -> None:
    words = plan("--np 2 --docker --mount /a:/b --workdir /w --tag_output ssd_train --steps 5").splitlines()
    inner = [word.strip() for word in words[words.index("    gaudi-run") :]]
    assert inner[: inner.index("variables forwarded")] == [
        *("gaudi-run", "--np", "2", "--tag_output", "ssd_train", "--steps", "5")
    ]


def test_files_that_docker_writes_are_the_users(plan: Plan) -> None:
    text = plan("--np 2 --docker ssd_train")
    assert re.findall(r"    --user\n    (.*)\n    --env\n    (.*)\n", text) == [("1000:100", "HOME=/tmp")]
