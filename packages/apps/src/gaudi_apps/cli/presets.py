"""Register the original command lines on Gaudis as presets of `gaudi-run`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gaudi_distributed.launch.presets import Preset

# The command lines of the originals' documents, without folders of data and results. A batch is that of a rank
# with Horovod and that of all ranks with tf.distribute.
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

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "ssd-habana-8": Preset("SSD on 8 Gaudis", 1, 8, command=tuple(_SSD.split())),
        "resnet-habana-8": Preset("ResNet-50 with LARS on 8 Gaudis", 1, 8, command=tuple(_RESNET_HOROVOD.split())),
        "resnet-habana-16-tcp": Preset(
            "ResNet-50 with LARS on two servers, HCCL over TCP",
            *(2, 8),
            scale_out="tcp",
            command=tuple(_RESNET_HOROVOD.split()),
        ),
        "resnet-habana-8-tf": Preset(
            "ResNet-50 with LARS on 8 Gaudis by tf.distribute",
            *(1, 8),
            backend="multi_worker",
            command=tuple(_RESNET_STRATEGY.split()),
        ),
        "resnext-habana-8": Preset("ResNeXt-101 on 8 Gaudis", 1, 8, command=tuple(_RESNEXT.split())),
    }
)
