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


def test_weights_are_exported_to_mxnet_without_images(run: Run, tmp_path: Path) -> None:
    CheckpointFolder(tmp_path / "a" / "checkpoints").save(7, {}, {})
    assert run("ssd_mxnet_train", "--mode", "export", "--model_dir", "a")[0] == 78  # the framework is next
    assert run("ssd_mxnet_train", "--mode", "export", "--model_dir", "own")[0] == 66


@pytest.mark.parametrize("program", ["ssd_train", *CLASSIFIERS])
def test_an_export_without_images_is_refused(run: Run, program: str, tmp_path: Path) -> None:
    CheckpointFolder(tmp_path / "a" / "checkpoints").save(7, {}, {})
    status, error = run(program, "--mode", "export", "--model_dir", "a")
    assert (status, "--inference" in error) == (64, True)


def write_yolo(folder: Path, images: Path, document: str, labels: str = "0 .5 .5 .2 .2\n") -> None:
    """Write a YOLO data set of images with one box each."""
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for path in images.iterdir():
        (folder / "images" / path.name).write_bytes(path.read_bytes())
        if labels:
            (folder / "labels" / f"{path.stem}.txt").write_text(labels)
    (folder / "data.yaml").write_text(document)


HOSTILE = {
    "unclosed": "train: [images\nnames: {0: a",
    "object": '!!python/object/apply:os.system ["touch touched"]',
    "list": "- a\n- b\n",
    "nameless": "train: images\nval: images\n",
    "reference": "train: &a images\nval: *a\nnames: [a]\n",
    "nowhere": "train: /nowhere/images\nval: /nowhere/images\nnames: [a]\n",
    "outside": "path: ../..\ntrain: ../../../etc\nnames: [a]\n",
    "count": "train: images\nnames: [a]\nnc: 7\n",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("program", TAKE_DATA)
def test_a_hostile_yaml_file_ends_in_an_error_and_nothing_is_written(
    run: Run, image_dir: Path, tmp_path: Path, program: str, name: str
) -> None:
    write_yolo(tmp_path / "a", image_dir, HOSTILE[name])
    before = sorted(tmp_path.rglob("*"))
    for path in ("a", "a/data.yaml", tmp_path / "a" / "data.yaml"):
        status, error = run(program, "--data", path, "--model_dir", "out")
        assert status in (65, 66), error
        assert len(error.splitlines()) <= 3
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_data_of_boxes_ends_in_an_error(run: Run, image_dir: Path, tmp_path: Path) -> None:
    write_yolo(tmp_path / "unlabelled", image_dir, "train: images\nnames: [a]\n", labels="")
    write_yolo(tmp_path / "wrong", image_dir, "train: images\nnames: [a]\n", labels="7 .5 .5 .1 .1\n")
    write_yolo(tmp_path / "two", image_dir, "train: images\nnames: [a]\n")
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>20</xmax><ymax>20</ymax></bndbox>"
    text = f"<annotation><object><name>cat</name>{box}</object></annotation>"
    (tmp_path / "two" / "images" / "1.xml").write_text(text)
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "loop").symlink_to("loop")
    for path, status in (
        *(("unlabelled", 66), ("wrong", 65), ("two", 65), ("empty.json", 65), ("text.txt", 65)),
        *(("loop", 66), ("", 64), (image_dir, 65), (image_dir / "1.png", 65), ("/dev/null", 65)),
    ):
        assert run("ssd_train", "--data", path, "--model_dir", "out")[0] == status, path
    assert not (tmp_path / "out").exists()


def test_no_script_of_a_yaml_file_runs(run: Run, image_dir: Path, tmp_path: Path) -> None:
    script = "download: |\n  import os\n  os.system('touch touched')\n"
    write_yolo(tmp_path / "a", image_dir, f"train: images\nval: images\nnames: [a]\n{script}")
    assert run("ssd_train", "--data", "a")[0] == 78  # good data, so the framework is next
    assert not [*tmp_path.rglob("touched")]
