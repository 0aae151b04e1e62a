"""Wrong paths are found before the framework is imported, by each program in each mode."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.training.checkpoint import CheckpointFolder

DETECTORS, CLASSIFIERS = ("ssd_train", "ssd_mxnet_train"), ("resnet_train", "resnext_train")
TAKE_DATA = ("ssd_train", "resnet_train")
MODES = ("train", "eval", "predict", "export")

Run = Callable[..., tuple[Any, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a program where no framework can be imported; return its status and its errors."""
    for name in ("tensorflow", "mxnet", "tf_keras"):
        monkeypatch.setitem(importlib.import_module("sys").modules, name, None)
    monkeypatch.chdir(tmp_path)

    def run_program(program: str, *flags: Any) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"gaudi_apps.{program}").main([str(flag) for flag in flags])
        return ended.value.code, capsys.readouterr().err

    return run_program


@pytest.fixture(scope="session")
def classes(image_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make folders of two classes, with splits."""
    folder = tmp_path_factory.mktemp("classes")
    for split in ("train", "validation"):
        for name in ("red", "blue"):
            (folder / split / name).mkdir(parents=True)
            for path in image_dir.iterdir():
                (folder / split / name / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def data(records: Path, classes: Path) -> dict[str, Path]:
    """Return data of the right kind by program."""
    return {**dict.fromkeys(DETECTORS, records), **dict.fromkeys(CLASSIFIERS, classes)}


def list_wrong(program: str, mode: str, image: Path, good: Path) -> list[list[Any]]:
    """List command lines with a wrong path each."""
    exports_unchecked = program == "ssd_mxnet_train" and mode == "export"
    inference = ["--inference", image] if mode in ("predict", "export") and not exports_unchecked else []
    wrong: list[list[Any]] = [["--data_dir", good, "--model_dir", "own", *inference]]
    if mode == "predict":
        wrong += [["--inference", "own.jpg"], ["--inference", "own/*.jpg"], ["--inference", image]]
    else:
        wrong += [["--data_dir", "own"]]
    if program in TAKE_DATA and mode != "predict":
        wrong += [["--data", "own"], ["--data", "own", "--recipe", "original"]]
    if program in TAKE_DATA:
        wrong += [["--data", good, "--model_dir", "own", *inference]]
    if mode == "train":  # to which a new folder is none
        takes = ("--data_dir", "--data") if program in TAKE_DATA else ("--data_dir",)
        wrong = [each for each in wrong if "own" in each[:2]]
        wrong += [[take, good, "--weights", "nowhere"] for take in takes]
    return wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", [*DETECTORS, *CLASSIFIERS])
def test_a_wrong_path_is_found_before_the_framework(
    run: Run, data: dict[str, Path], image_dir: Path, program: str, mode: str, tmp_path: Path
) -> None:
    for flags in list_wrong(program, mode, image_dir / "1.png", data[program]):
        status, error = run(program, "--mode", mode, *flags)
        assert status == 66, f"{flags}: {error}"
        assert any(word in error for word in ("own", "nowhere", f"runs/{program}")), error
    assert not [*tmp_path.glob("own*"), *tmp_path.glob("runs")]


@pytest.mark.parametrize("program", [*DETECTORS, *CLASSIFIERS])
def test_an_empty_folder_is_no_data(run: Run, tmp_path: Path, program: str) -> None:
    (tmp_path / "empty").mkdir()
    for flag in ("--data_dir", "--data") if program in TAKE_DATA else ("--data_dir",):
        status, error = run(program, flag, "empty")
        assert status in (65, 66), error
        assert "empty" in error


@pytest.mark.parametrize("program", [*DETECTORS, *CLASSIFIERS])
def test_the_checkpoint_of_a_flag_is_looked_for_before_the_framework(
    run: Run, data: dict[str, Path], image_dir: Path, program: str, tmp_path: Path
) -> None:
    CheckpointFolder(tmp_path / "a" / "checkpoints").save(7, {}, {})
    flags = ("--mode", "eval", "--data_dir", data[program], "--model_dir", "a", "--checkpoint")
    status, error = run(program, *flags, "best")
    assert (status, "--eval_epochs" in error) == (66, True)
    status, error = run(program, *flags, "5")
    assert (status, "7" in error) == (66, True)
    assert run(program, *flags, "newest")[0] == 78  # found, so the framework is next


@pytest.mark.parametrize("program", ["ssd_train", *CLASSIFIERS])
def test_an_export_without_images_is_refused(run: Run, program: str, tmp_path: Path) -> None:
    CheckpointFolder(tmp_path / "a" / "checkpoints").save(7, {}, {})
    status, error = run(program, "--mode", "export", "--model_dir", "a")
    assert (status, "--inference" in error) == (64, True)
