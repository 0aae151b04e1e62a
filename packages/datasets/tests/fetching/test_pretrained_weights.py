from __future__ import annotations

import hashlib
import json
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import pytest
import tensorflow as tf

from gaudi_datasets.fetching.weights_table import BACKBONE, BACKBONE_URL, WEIGHTS, Weights, WeightsFile

run: Callable[..., int] = runpy.run_path(str(Path(__file__).parents[1] / "run_command.py"))["run_command"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Write the files of a small checkpoint by the names of the original's backbone."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("conv2d/kernel", initializer=np.ones([7, 7, 3, 4], np.float32), use_resource=True)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(folder / BACKBONE))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch, content: bytes, checkpoint: dict[str, bytes]) -> None:
    """Return the table of weights with the checksums of the contents that a test serves."""
    sha256 = hashlib.sha256(content).hexdigest()
    torch = WeightsFile("https://download.pytorch.org/models/resnet34-333f7ec4.pth", sha256, len(content))
    original = WEIGHTS["resnet34-tensorflow"]
    files = tuple(
        WeightsFile(file.url, md5=hashlib.md5(checkpoint[file.name]).hexdigest() if file.name != "checkpoint" else "0")
        for file in original.files
    )
    table = cast(dict[str, Weights], WEIGHTS)
    monkeypatch.setitem(table, "resnet34", replace(WEIGHTS["resnet34"], files=(torch,)))
    monkeypatch.setitem(table, "resnet34-tensorflow", replace(original, files=files))


def serve_checkpoint(server: Any, checkpoint: dict[str, bytes]) -> str:
    folder = urlsplit(BACKBONE_URL).path
    for name, content in checkpoint.items():
        server.add(f"{folder}/{name}", content)
    return folder


def test_what_is_published_is_in_the_table() -> None:
    for name, weights in WEIGHTS.items():
        for file in weights.files:
            assert urlsplit(file.url).scheme == "https"
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256) or re.fullmatch(r"[0-9a-f]{32}", file.md5)
            if file.sha256:
                assert file.name == f"{name}-{file.sha256[:8]}.pth"
    assert [file.name for file in WEIGHTS["resnet34"].files] == ["resnet34-333f7ec4.pth"]
    assert sorted(file.name for file in WEIGHTS["resnet34-tensorflow"].files) == [
        "checkpoint",
        *(f"{BACKBONE}.{part}" for part in ("data-00000-of-00001", "index", "meta")),
    ]


def test_a_file_is_resumed_verified_and_written_down(
    server: Any, faults: Any, content: bytes, small_weights: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.add("/models/resnet34-333f7ec4.pth", content, faults.cut(100_000))
    flags = ["fetch", "weights", "resnet34", "--output_dir", tmp_path, "--mirror", f"{server.url}/"]
    for state in ("fetched", "there already"):
        assert run(*flags) == 0
        first, last = capsys.readouterr().out.splitlines()
        assert first == f"{tmp_path}/resnet34-333f7ec4.pth: {state}, 300000 bytes, SHA-256 verified"
        assert last.endswith(f"ssd_mxnet_train --pretrained_backbone {tmp_path}/resnet34-333f7ec4.pth")
    ranges = [asked for _, asked, _ in server.requests]
    assert len(ranges) == 2
    assert re.fullmatch(r"bytes=\d+-", ranges[1])
    (file,) = json.loads((tmp_path / "resnet34.fetched.json").read_text())["files"]
    assert file == {
        "path": "resnet34-333f7ec4.pth",
        "url": f"{server.url}/models/resnet34-333f7ec4.pth",
        "bytes": 300_000,
        "sha256": hashlib.sha256(content).hexdigest(),
        "md5": hashlib.md5(content).hexdigest(),
        "verified_by": "SHA-256",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resnet34-333f7ec4.pth", "resnet34.fetched.json"]


def test_another_file_is_refused_and_leaves_nothing(
    server: Any, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.add("/models/resnet34-333f7ec4.pth", content)
    assert run("fetch", "weights", "resnet34", "--output_dir", tmp_path / "out", "--mirror", server.url) == 65
    error = capsys.readouterr().err
    assert "87306240 are expected" in error
    assert error.count("\n") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_checkpoint_is_verified_by_its_own_checksums(
    server: Any, checkpoint: dict[str, bytes], small_weights: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_checkpoint(server, checkpoint)
    flags = ["fetch", "weights", "resnet34-tensorflow", "--output_dir", tmp_path, "--mirror", server.url]
    for _ in range(2):
        assert run(*flags) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith(f"--resnet_checkpoint {tmp_path}/resnet34-tensorflow")
    assert len(server.requests) == 4
    folder = tmp_path / "resnet34-tensorflow"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == checkpoint
    reader = tf.train.load_checkpoint(str(folder))
    assert reader.get_tensor("conv2d/kernel").shape == (7, 7, 3, 4)
    files = json.loads((tmp_path / "resnet34-tensorflow.fetched.json").read_text())["files"]
    assert {file["verified_by"] for file in files} == {"content"}
    assert {Path(file["path"]).name: file["md5_is_published"] for file in files} == {
        name: name != "checkpoint" for name in checkpoint
    }


@pytest.mark.parametrize("part", [f"{BACKBONE}.index", f"{BACKBONE}.data-00000-of-00001", "checkpoint"])
def test_a_part_of_a_checkpoint_that_is_cut_off_is_refused(
    server: Any, checkpoint: dict[str, bytes], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_checkpoint(server, checkpoint | {part: checkpoint[part][: len(checkpoint[part]) // 3]})
    flags = ["fetch", "weights", "resnet34-tensorflow", "--output_dir", tmp_path, "--mirror", server.url]
    assert run(*flags) == 65
    assert part in capsys.readouterr().err
    assert not (tmp_path / "resnet34-tensorflow" / part).exists()
    serve_checkpoint(server, checkpoint)
    assert run(*flags) == 0


def test_unknown_weights_and_none_are_wrong_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for names in (["resnet35"], []):
        assert run("fetch", "weights", *names) == 64
        assert "resnet34-tensorflow" in capsys.readouterr().err


def test_the_list_has_all_that_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fetch", "list", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == {"coco", *WEIGHTS}
    assert [file["bytes"] for file in rows["coco"]["files"]] == [252907541, 19336861798, 815585330]
    assert rows["resnet34"]["files"] == [
        {
            "url": "https://download.pytorch.org/models/resnet34-333f7ec4.pth",
            "bytes": 87306240,
            "sha256": "333f7ec4c6338da2cbed37f1fc0445f9624f1355633fa1d7eab79a91084c6cef",
        }
    ]
    assert all(row["purpose"] and row["licence"] for row in rows.values())
    assert run("fetch", "list") == 0
    table = capsys.readouterr().out
    assert all(row["command"].removeprefix("gaudi-datasets fetch ") in table for row in rows.values())
