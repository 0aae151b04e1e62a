"""Each preset trains by the numbers of the original command line that it stands for.

The numbers are of the originals' documents and code, computed apart from ours: an epoch is so many steps, warm-up and
drops are at these steps, the rate is at most this.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from gaudi_distributed.launch.presets import load_presets

PRESETS = load_presets()


@dataclass(frozen=True)
class ExpectedPlan:
    """The numbers of an original run; `decay_steps` is for a polynomial."""

    global_batch: int
    rate: float
    steps_per_epoch: int
    warmup_steps: int
    total_steps: int
    weight_decay: float
    drop_steps: tuple[int, ...] = ()
    decay_steps: int | None = None
    schedule: str = "piecewise"


COCO, IMAGENET = 117266, 1281167
# 25000 = 40 x 625 steps, of which 1875 = 3 x 625 warm up.
LARS = ExpectedPlan(2048, 9.5, 625, 1875, 25000, 1e-4, decay_steps=23126, schedule="polynomial")
NUMBERS = {
    # 64 epochs of ceil(117266 / 1024) steps; .003 for each 32 images; drops at epochs 40 and 50.
    "ssd-habana-8": ExpectedPlan(1024, 0.096, 115, 575, 7360, 5e-4, (4600, 5750)),
    "resnet-habana-8": LARS,
    "resnet-habana-8-tf": LARS,
    # The rate of several devices is one, whatever their number; an epoch is 312 steps of 4096 images.
    "resnet-habana-16-tcp": ExpectedPlan(4096, 9.5, 312, 936, 12480, 1e-4, decay_steps=11545, schedule="polynomial"),
    # .256 for 256 images; all steps and those of the warm-up over 8 epochs are cut off once.
    "resnext-habana-8": ExpectedPlan(1024, 1.024, 1251, 10009, 112602, 6.103515625e-05, schedule="cosine"),
    # Whole multiples of .0025; epochs 80, and drops at 44 and 55, each with the step that sees its last image.
    "dss8440": ExpectedPlan(1024, 0.1875, 115, 572, 9162, 1.6e-4, (5039, 6299)),
    "c4140": ExpectedPlan(512, 0.0475, 229, 1202, 18323, 1.6e-4, (10078, 12597)),
    "2xc4140": ExpectedPlan(1024, 0.1875, 115, 601, 9162, 1.6e-4, (5039, 6299)),
    "4xc4140": ExpectedPlan(896, 0.09, 131, 654, 10471, 1.3e-4, (5759, 7199)),
}
# Flags of the originals' command lines that no number of the plan shows.
CLASSIFIER = ("--dtype bf16", "--data_loader_image_type bf16", "--epochs_between_evals 40", "--label_smoothing 0.1")
FLAGS = {
    "ssd-habana-8": ("--dtype bf16", "--save_summary_steps 10", "--save_checkpoints_epochs 64"),
    "resnet-habana-8": (*CLASSIFIER, "--optimizer LARS", "--single_l2_loss_op"),
    "resnet-habana-8-tf": (*CLASSIFIER, "--optimizer LARS", "--single_l2_loss_op", "--distribution_strategy hpu"),
    "resnet-habana-16-tcp": (*CLASSIFIER, "--optimizer LARS", "--single_l2_loss_op"),
    "resnext-habana-8": ("--dtype bf16", "--data_loader_image_type bf16", "--epochs_between_evals 90"),
}
# What stands for data that is not here.
IMAGES = {
    "ssd_train": ("--num_examples_per_epoch", str(COCO)),
    "ssd_mxnet_train": ("--dataset_size", str(COCO)),
    "resnet_train": ("--use_synthetic_data",),
    "resnext_train": ("--use_synthetic_data",),
}
EPOCHS = {"ssd": 64, "resnet": 40, "resnext": 90}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_preset_plans_the_original_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preset, expected = PRESETS[name], NUMBERS[name]
    plan = plan_on(preset.command, preset.ranks, preset.slots, monkeypatch, capsys)
    assert plan["images"] == (COCO if preset.command[0].startswith("ssd") else IMAGENET)
    assert (plan["workers"], plan["global_batch"]) == (preset.ranks, expected.global_batch)
    assert plan["lr_schedule"] == expected.schedule
    assert plan["peak_learning_rate"] == pytest.approx(expected.rate, rel=1e-9)
    assert plan["weight_decay"] == pytest.approx(expected.weight_decay, rel=1e-9)
    steps = (plan["steps_per_epoch"], plan["warmup_steps"], plan["total_steps"], tuple(plan["drop_steps"]))
    assert steps == (expected.steps_per_epoch, expected.warmup_steps, expected.total_steps, expected.drop_steps)
    assert plan.get("decay_steps") == expected.decay_steps


def test_every_preset_with_a_program_has_its_numbers() -> None:
    assert set(NUMBERS) == {name for name, preset in PRESETS.items() if preset.command}


@pytest.mark.parametrize("name", FLAGS)
def test_a_preset_gives_the_flags_of_the_original(name: str) -> None:
    command = " ".join(PRESETS[name].command)
    assert [flag for flag in FLAGS[name] if f" {flag} " not in f"{command} "] == []


def test_the_batch_is_that_of_a_rank_with_horovod_and_of_all_with_a_strategy() -> None:
    batches = {}
    for name, preset in PRESETS.items():
        if "--batch_size" in preset.command:
            batches[name] = int(preset.command[preset.command.index("--batch_size") + 1])
    assert batches == {
        "ssd-habana-8": 128,
        "resnet-habana-8": 256,
        "resnet-habana-16-tcp": 256,
        "resnet-habana-8-tf": 2048,
        "resnext-habana-8": 128,
    }


def test_the_numbers_are_those_of_the_rules() -> None:
    """The table above agrees with the rules in words, so that a slip in it is no pin."""
    for name in ("ssd-habana-8", "resnet-habana-8", "resnet-habana-16-tcp", "resnext-habana-8"):
        numbers, batch = NUMBERS[name], NUMBERS[name].global_batch
        exact = (COCO if name.startswith("ssd") else IMAGENET) / batch
        epoch = math.ceil(exact) if name.startswith("ssd") else math.floor(exact)
        assert numbers.steps_per_epoch == epoch
        epochs = EPOCHS[name.partition("-")[0]]
        assert numbers.total_steps == int(epochs * (exact if name.startswith("resnext") else epoch))
    for name in ("dss8440", "c4140", "2xc4140", "4xc4140"):
        numbers = NUMBERS[name]
        exact = COCO / numbers.global_batch
        assert (numbers.total_steps, *numbers.drop_steps) == tuple(math.ceil(epoch * exact) for epoch in (80, 44, 55))


def plan_on(
    command: tuple[str, ...],
    ranks: int,
    slots: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> dict[str, Any]:
    """Return what the program plans as rank 0 of a launch."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    for name, value in zip(names, (0, ranks, 0, slots), strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    program, *arguments = command
    with pytest.raises(SystemExit) as ended:
        import_module(f"gaudi_apps.{program}").main([*arguments, *IMAGES[program], "--mode", "plan", "--json"])
    captured = capsys.readouterr()
    assert not ended.value.code, captured.err
    plan: dict[str, Any] = json.loads(captured.out)
    return plan
