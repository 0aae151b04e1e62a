"""The commands that convert images with classes, as a user types them."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_datasets.classification.sources import RecordSource

run: Callable[..., int] = runpy.run_path(str(Path(__file__).parents[1] / "run_command.py"))["run_command"]


def hash_shards(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*-of-*"))}


def test_folders_are_converted(class_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["convert", "folders", "--folder", class_tree, "--output_dir", tmp_path / "out"]
    assert run(*flags, "--split", "train", "--shards", 2, "--decode") == 0
    assert re.findall(r"\d+", capsys.readouterr().out) == ["9", "9", "3", "2"]
    assert run(*flags, "--split", "val", "--class_names", "fox", "eel", "dog", "cat") == 0
    assert RecordSource(tmp_path / "out", "val").class_names == ("fox", "eel", "dog", "cat")
    assert run(*flags, "--split", "test", "--class_names", "dog", "cat") == 65
    assert '"eel" is none of' in capsys.readouterr().err
    assert run(*flags, "--split", "test", "--class_names", "fox", "eel", "dog", "cat", "eel") == 64
    assert "--class_names" in capsys.readouterr().err
    assert run(*flags, "--split", "train") == 77


@pytest.mark.parametrize("command", [("imagenet",), ("convert", "imagenet")])
def test_imagenet_is_converted_from_tars_and_folders_alike(
    command: tuple[str, ...], imagenet_tars: Path, imagenet_folders: Path, tmp_path: Path
) -> None:
    flags = ("--shards", 5, "--processes", 1)
    for source in (imagenet_tars, imagenet_folders):
        assert run(*command, "--from", source, "--output_dir", tmp_path / f"{source.name}-out", *flags) == 0
    written = hash_shards(tmp_path / "tars-out")
    assert written == hash_shards(tmp_path / "folders-out")
    assert len(written) == 5 + 5
    assert len(RecordSource(tmp_path / "tars-out", "train")) == 9
    assert len(RecordSource(tmp_path / "tars-out", "val")) == 4


@pytest.mark.slow
def test_imagenet_has_the_originals_shards(imagenet_tars: Path, tmp_path: Path) -> None:
    assert run("imagenet", "--from", imagenet_tars, "--output_dir", tmp_path / "out", "--processes", 1) == 0
    written = hash_shards(tmp_path / "out").keys()
    assert len(written) == 1024 + 128
    assert {"train-01023-of-01024", "validation-00127-of-00128"} <= written
    assert len(RecordSource(tmp_path / "out", "train")) == 9


def test_all_splits_are_looked_through_before_any_is_written(
    imagenet_tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (imagenet_tars / "synset_labels.txt").write_text("n01440764\n")
    flags = ["imagenet", "--from", imagenet_tars, "--output_dir", tmp_path / "out"]
    assert run(*flags) == 65
    assert "has 1 labels for 4" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for nothing in (["imagenet"], ["mini-imagenet", "--images_per_class", 1]):
        assert run("convert", *nothing, *flags[1:], "--splits") == 64
        assert "--splits" in capsys.readouterr().err
    assert run(*flags, "--splits", "train", "--shards", 2) == 0


def test_a_part_of_imagenet(imagenet_tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["convert", "mini-imagenet", "--from", imagenet_tars, "--output_dir"]
    assert run(*flags, tmp_path / "two", "--images_per_class", 1) == 0
    train, validation = capsys.readouterr().out.splitlines()
    assert train.startswith("train: 3 of 9 images")
    assert re.findall(r"\d+", validation) == ["3", "4", "3", "1"]
    manifest = json.loads((tmp_path / "two" / "train.json").read_text())
    assert manifest["images"] == {"kept": 3, "of": 9}
    (tmp_path / "list.txt").write_text("n02105855/n02105855_7.JPEG\nn01440764_3.JPEG\n")
    listed = ["--splits", "train", "--train_subset", tmp_path / "list.txt"]
    assert run(*flags, tmp_path / "listed", *listed) == 0
    assert re.findall(r"\d+", capsys.readouterr().out) == ["2", "9", "2", "1"]
    source = RecordSource(tmp_path / "listed", "train")
    assert len(source.class_names) == 3
    assert {source.read(index).file_name for index in range(2)} == {"n02105855_7.JPEG", "n01440764_3.JPEG"}
    (tmp_path / "list.txt").write_text("n02105855_8.JPEG\n")
    assert run(*flags, tmp_path / "other", *listed) == 65
    assert 'list.txt: names "n02105855_8.JPEG", no image of' in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--images_per_class", -1],
        ["--train_subset", "list.txt"],
        ["--images_per_class", 3, "--train_subset", "list.txt"],
    ],
)
def test_a_part_must_be_told(flags: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", "mini-imagenet", "--from", tmp_path, "--output_dir", tmp_path / "out", *flags) == 64
    assert "--images_per_class" in capsys.readouterr().err
