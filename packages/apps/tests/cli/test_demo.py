from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_apps.cli.flag_rules import parse_config
from gaudi_apps.cli.run_commands import Demo, main
from gaudi_apps.detection.config import SSDConfig, validate


def run(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["demo", *argv])
    out, err = capfd.readouterr()
    return int(end.value.code or 0), out, err


def test_commands_lead_from_nothing_to_a_trained_model() -> None:
    commands = Demo(output_dir=Path("out"), steps=100, train=30, val=7).list_commands("bf16")
    assert commands[0][:2] == ["gaudi_datasets", "make-scenes"]
    assert [command[:3] for command in commands[1:3]] == [["gaudi_datasets", "convert", "coco"]] * 2
    assert commands[0][2:] == ["--output_dir", "out/scenes", "--train", "30", "--val", "7"]
    assert [command[command.index("--split") + 1] for command in commands[1:3]] == ["train", "val"]
    assert commands[3][0] == "gaudi_apps.ssd_train"


@pytest.mark.parametrize(("steps", "dtype"), [(1, "bf16"), (4, "fp32"), (440, "bf16")])
def test_the_training_command_is_a_good_one(steps: int, dtype: str) -> None:
    command = Demo(steps=steps).list_commands(dtype)[-1]
    config = parse_config(SSDConfig, command[1:], prog="ssd_train", description="")
    validate(config)
    assert (config.run.steps, config.data.data_dir) == (steps, "runs/demo/records")
    assert config.schedule.lr_warmup_steps <= max(1, steps // 2)
    assert config.device.dtype == dtype


@pytest.mark.costly
def test_it_ends_with_the_first_command_that_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    help_text, wrong = ["gaudi_apps.ssd_train", "--help"], ["gaudi_apps.ssd_train", "--batch_sice", "8"]
    monkeypatch.setattr(Demo, "list_commands", lambda flags, dtype: [wrong, help_text])
    status, out, err = run(capfd)
    assert status == 64
    assert out == "$ python -m gaudi_apps.ssd_train --batch_sice 8\n"
    assert "did you mean --batch_size?" in err
    monkeypatch.setattr(Demo, "list_commands", lambda flags, dtype: [help_text])
    assert run(capfd)[0] == 0


@pytest.mark.parametrize("flag", ["--steps", "--train", "--val"])
def test_wrong_numbers_are_refused(capfd: pytest.CaptureFixture[str], flag: str) -> None:
    status, out, err = run(capfd, flag, "0")
    assert (status, out) == (64, "")
    assert flag in err
    assert "at least 1" in err
