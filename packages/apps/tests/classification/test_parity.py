from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.training.recording import read_recording


@pytest.mark.costly
@pytest.mark.parametrize("program", ["resnet_train", "resnext_train"])
def test_a_classifier_is_equal_to_its_recording(
    run_classifier: Callable[..., Any], folders: Path, tmp_path: Path, program: str
) -> None:
    flags = ["--mode", "parity", "--data_dir", folders, "-bs", 2, "--image_size", 32, "--model_dir", tmp_path / "run"]
    done = run_classifier(*flags, "--parity_output", tmp_path / "recording", program=program)
    assert done.status == 0, done.err
    done = run_classifier(*flags, "--parity_against", f"recorded={tmp_path / 'recording'}", program=program)
    assert (done.status, done.err) == (0, "")
    assert "tensors agree" in done.out
    settings = read_recording(tmp_path / "recording").settings
    assert settings["batch_size"] == 2
    assert not {"grouped_convolution", "dtype", "data_dir", "parity_output"} & settings.keys()


def test_weights_of_a_file_are_named_as_the_program_does(
    run_classifier: Callable[..., Any], folders: Path, tmp_path: Path
) -> None:
    flags = ["--mode", "parity", "--data_dir", folders, "-bs", 2, "--model_dir", tmp_path / "run"]
    done = run_classifier(*flags, "--parity_against", "pretrained_model_checkpoint_path=x")
    assert done.status == 64
    choices = {word.strip(" ,") for word in done.err.split(" must be one of ")[1].split(" or ")[0].split()}
    assert {"weights=..", "dtype=..", "deterministic=..", "grouped_convolution=.."} <= choices
