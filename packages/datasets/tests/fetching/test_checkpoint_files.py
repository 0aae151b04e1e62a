from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_datasets.errors import DataError
from gaudi_datasets.fetching.checkpoint_files import check_meta_graph, check_shard, check_state_file, read_index

NAME = "model.ckpt-28152"
TENSORS: dict[str, Any] = {
    "conv2d/kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "conv2d_1/kernel": np.ones([3], np.float32),
    "global_step": np.int64(28152),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint as TensorFlow 1's Saver writes it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, values in TENSORS.items():
            tf.compat.v1.get_variable(name, initializer=values, use_resource=True)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(folder / NAME))
    return folder


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_the_index_says_what_tensorflow_saved(checkpoint: Path) -> None:
    tensors = read_index(checkpoint / f"{NAME}.index")
    data = (checkpoint / f"{NAME}.data-00000-of-00001").read_bytes()
    assert {tensor.name for tensor in tensors} == TENSORS.keys()
    for tensor in tensors:
        values = np.asarray(TENSORS[tensor.name])
        assert data[tensor.offset : tensor.offset + tensor.size] == values.tobytes()
    check_shard(checkpoint / f"{NAME}.data-00000-of-00001", tensors)
    check_meta_graph(checkpoint / f"{NAME}.meta")
    check_state_file(checkpoint / "checkpoint", NAME)


def test_strings_of_newer_checkpoints_are_passed_over(tmp_path: Path) -> None:
    prefix = tf.train.Checkpoint(values=tf.Variable([1.0, 2.0])).write(str(tmp_path / NAME))
    tensors = read_index(Path(f"{prefix}.index"))
    assert len(tensors) == 2
    check_shard(Path(f"{prefix}.data-00000-of-00001"), tensors)


def test_a_changed_byte_of_the_values_is_found(copied: Path) -> None:
    path, tensors = copied / f"{NAME}.data-00000-of-00001", read_index(copied / f"{NAME}.index")
    for position in range(0, path.stat().st_size, 4):
        flip(path, position)
        with pytest.raises(DataError, match="is damaged"):
            check_shard(path, tensors)
        flip(path, position)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="ends before the"):
        check_shard(path, tensors)
    with pytest.raises(DataError, match="no tensor in"):
        check_shard(path, tensors, shard=1)


def test_a_changed_byte_of_the_index_is_found(copied: Path) -> None:
    path = copied / f"{NAME}.index"
    size = path.stat().st_size
    handles = 5  # bytes; the rest of the footer is filled up with zeros that nobody reads
    for position in [*range(0, size - 48, 4), *range(size - 48, size - 48 + handles), *range(size - 8, size)]:
        flip(path, position)
        with pytest.raises(DataError, match="damaged"):
            read_index(path)
        flip(path, position)
    content = path.read_bytes()
    for length in (0, 47, 60, size - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match="index"):
            read_index(path)


def test_other_files_are_no_graph_and_no_state(copied: Path) -> None:
    meta, state = copied / f"{NAME}.meta", copied / "checkpoint"
    for content in (b"", b"<html>", meta.read_bytes()[:-1], b"\x7a\x01x"):
        meta.write_bytes(content)
        with pytest.raises(DataError, match="no graph"):
            check_meta_graph(meta)
    for text in ("", 'model_checkpoint_path: "model.ckpt-1"\n', f"<html>{NAME}</html>"):
        state.write_text(text)
        with pytest.raises(DataError, match="newest checkpoint"):
            check_state_file(state, NAME)
    state.write_text(f'model_checkpoint_path: "/software/data/{NAME}"\n')
    check_state_file(state, NAME)
