"""Wrap a launch in Docker or Singularity; the default images are those that containers/ builds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.flags import ContainerKind, Options
from gaudi_distributed.launch.presets import Accelerator, load_presets
from gaudi_distributed.launch.processes import LaunchPlan, Process

# What names files of this machine, and would be wrong inside; Singularity sets the first two anew by itself.
_OUTER = frozenset({"LD_LIBRARY_PATH", "PATH"})
_OUTSIDE = frozenset({"LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV"})

# Images of containers/ by their lane, as its documents name them.
_IMAGES = {"docker": "gaudi-vision:{}", "singularity": "gaudi-vision-{}.sif"}

_IMAGE = re.compile(r"(?:[a-z]{2,12}://)?[A-Za-z0-9./_][A-Za-z0-9./_:@+-]{0,254}", re.ASCII)
_MOUNT = re.compile(r"/[^:,\n\r]*:/[^:,\n\r]*(?::r[ow])?")


def check_image(image: str) -> None:
    """Raise FlagError for what does not look like the name of an image, or its file."""
    if _IMAGE.fullmatch(image) is None:
        raise FlagError(
            f"--image {image!r}: is not an image",
            flag="--image",
            remedy="write one like registry/name:tag, or a file's path",
        )


def check_container(image: str, options: Options) -> None:
    """Raise FlagError for an image, a mount or a working folder that does not look like one."""
    check_image(image)
    for mount in options.mount:
        if _MOUNT.fullmatch(mount) is None or not mount.isprintable():
            raise FlagError(
                f"--mount {mount!r}: is not a mount",
                flag="--mount",
                remedy="write it like /here:/inside or /here:/inside:ro",
            )
    if options.workdir is not None and not options.workdir.startswith("/"):
        raise FlagError(
            f"--workdir {options.workdir!r}: is not an absolute path",
            flag="--workdir",
            remedy="give the path inside the image",
        )


def choose_image(kind: ContainerKind, accelerator: Accelerator, command: Sequence[str]) -> str:
    """Return the image of containers/ that has what a program needs on a device.

    The presets of a program name the lane of its image.

    Raises:
        FlagError: there is none, for GPUs.
    """
    if accelerator == "gpu":
        raise FlagError(
            f"--container {kind}: there is no default image for GPUs", flag="--container", remedy="name one by --image"
        )
    if accelerator == "hpu":
        return _IMAGES[kind].format("gaudi")
    lanes = {preset.command[0]: preset.lane for preset in load_presets().values() if preset.command}
    return _IMAGES[kind].format(lanes.get(_name_program(command), "default"))


def _name_program(command: Sequence[str]) -> str:
    """Return the name of the program that a command runs, also as a module of Python's or by its path."""
    program, *arguments = command
    name = Path(program).name
    if re.fullmatch(r"python[\d.]*", name):
        options = [*itertools.takewhile(lambda word: word.startswith("-"), arguments)]
        if options[-1:] == ["-m"] and len(arguments) > len(options):
            return arguments[len(options)].rpartition(".")[2]
    return name


def lane_of(image: str) -> str:
    """Return the lane of an image's file of ours."""
    return image.removeprefix("gaudi-vision-").removesuffix(".sif")


def choose_inside(kind: ContainerKind, forwarded: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the forwarded variables that have a meaning inside."""
    outside = {"none": frozenset[str](), "singularity": _OUTSIDE, "docker": _OUTSIDE | _OUTER}[kind]
    return tuple(name for name in forwarded if name not in outside)


def wrap_singularity(image: str, options: Options, accelerator: Accelerator, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command inside Singularity, as each rank starts it."""
    return (
        *("singularity", "exec"),
        *(("--nv",) if accelerator == "gpu" else ()),
        *(("--bind", "/dev,/sys") if accelerator == "hpu" else ()),
        *(word for mount in options.mount for word in ("--bind", mount)),
        *(() if options.workdir is None else ("--pwd", options.workdir)),
        image,
        *command,
    )


def plan_docker(
    image: str, options: Options, accelerator: Accelerator, plan: LaunchPlan, inner: Sequence[str], user: str
) -> list[Process]:
    """Return the `docker run` whose container runs `inner`, gaudi-run with all the ranks of this machine.

    It runs as `user`, like "1000:1000": what it writes into a mounted folder is the user's, and nobody's else.
    """
    devices = {
        "none": (),
        "gpu": ("--gpus", "all"),
        "hpu": ("--runtime", "habana", "--env", "HABANA_VISIBLE_DEVICES=all", "--cap-add", "sys_nice"),
    }[accelerator]
    argv = (
        *("docker", "run", "--rm", "--init", "--network", "host", "--ipc", "host"),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        # A user whom the image does not know has no home there.
        *("--user", user, "--env", "HOME=/tmp"),
        *devices,
        *(word for name in plan.forwarded for word in ("--env", name)),
        *(word for mount in options.mount for word in ("--volume", mount)),
        *(() if options.workdir is None else ("--workdir", options.workdir)),
        image,
        *inner,
    )
    name = f"ranks 0 to {plan.cluster.size - 1} in {image}"
    return [Process(name, argv, {}, plan.list_forwarded(is_here=True))]
