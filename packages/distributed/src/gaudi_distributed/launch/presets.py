"""Launches by name: the originals' command lines on Gaudis, and the systems of the MLPerf v0.7 submission in MXNet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from gaudi_distributed.devices.habana import ScaleOut
from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.processes import Backend

Accelerator = Literal["none", "gpu", "hpu"]
ACCELERATORS: tuple[Accelerator, ...] = get_args(Accelerator)


@dataclass(frozen=True)
class Preset:
    """A launch by name.

    Attributes:
        about: what it is.
        hosts: how many machines.
        slots: ranks, so devices, of each.
        accelerator: the kind of device.
        scale_out: what Gaudis of several machines talk over.
        backend: what starts the ranks; None: the default.
        command: program and arguments; empty: any program. What the user adds comes behind, and wins.
        result: what a line of results calls a run that ended well; None: there is no such line.
    """

    about: str
    hosts: int
    slots: int
    accelerator: Accelerator = "hpu"
    scale_out: ScaleOut = "gaudi"
    backend: Backend | None = None
    command: tuple[str, ...] = ()
    result: str | None = None

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.hosts * self.slots

    def complete(self, command: tuple[str, ...], name: str) -> tuple[str, ...]:
        """Return the preset's command with the user's arguments behind; FlagError where they are two programs."""
        if not self.command or not command:
            return self.command or command
        if command[0] != self.command[0]:
            raise FlagError(f"--preset {name} runs {self.command[0]}, not {command[0]}; name that program, or none")
        return self.command + command[1:]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The command lines of the originals' documents, but for the folders of data and results. A batch is that of a rank with
# Horovod and that of all ranks with tf.distribute.
_SSD = (
    "ssd_train --use_horovod --epochs 64 --batch_size 128 --dtype bf16 --save_summary_steps 10 "
    "--save_checkpoints_epochs 64"
)
# What the original's launcher adds where LARS is asked for on several devices.
_LARS = (
    "--optimizer LARS --base_learning_rate 9.5 --warmup_epochs 3 --lr_schedule polynomial --label_smoothing 0.1 "
    "--weight_decay 0.0001 --single_l2_loss_op"
)
_RESNET = f"resnet_train --dtype bf16 --data_loader_image_type bf16 --train_epochs 40 --epochs_between_evals 40 {_LARS}"
_RESNET_HOROVOD = f"{_RESNET} --batch_size 256 --use_horovod"
_RESNET_STRATEGY = f"{_RESNET} --batch_size 2048 --distribution_strategy hpu"
_RESNEXT = (
    "resnext_train --use_horovod --dtype bf16 --data_loader_image_type bf16 --batch_size 128 --train_epochs 90 "
    "--epochs_between_evals 90"
)


def _mxnet(system: str, hosts: int, slots: int) -> Preset:
    """A system of the submission; the program knows its batch size and schedule."""
    about = f"MXNet SSD as MLPerf's submission trained it on {system}"
    command = ("ssd_mxnet_train", "--system", system)
    return Preset(about, hosts, slots, "gpu", command=command, result="SINGLE_STAGE_DETECTOR")


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "habana-8": Preset("8 Gaudis of one server, any program", 1, 8),
        "habana-16": Preset("two servers of 8, over the Gaudis' own ports", 2, 8),
        "habana-16-tcp": Preset("two servers of 8, HCCL over TCP", 2, 8, scale_out="tcp"),
        "habana-16-hierarchical": Preset("two servers of 8, hierarchical allreduce", 2, 8, scale_out="hierarchical"),
        "ssd-habana-8": Preset("SSD on 8 Gaudis", 1, 8, command=_words(_SSD)),
        "resnet-habana-8": Preset("ResNet-50 with LARS on 8 Gaudis", 1, 8, command=_words(_RESNET_HOROVOD)),
        "resnet-habana-16-tcp": Preset(
            "ResNet-50 with LARS on two servers, HCCL over TCP",
            *(2, 8),
            scale_out="tcp",
            command=_words(_RESNET_HOROVOD),
        ),
        "resnet-habana-8-tf": Preset(
            "ResNet-50 with LARS on 8 Gaudis by tf.distribute",
            *(1, 8),
            backend="multi_worker",
            command=_words(_RESNET_STRATEGY),
        ),
        "resnext-habana-8": Preset("ResNeXt-101 on 8 Gaudis", 1, 8, command=_words(_RESNEXT)),
        "dss8440": _mxnet("DSS8440", 1, 8),
        "c4140": _mxnet("C4140", 1, 4),
        "2xc4140": _mxnet("2xC4140", 2, 4),
        "4xc4140": _mxnet("4xC4140", 4, 4),
    }
)


def find_preset(name: str) -> Preset:
    """Return the preset of that name; FlagError names those there are."""
    if name not in PRESETS:
        raise FlagError(f"--preset {name!r}: is none; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
