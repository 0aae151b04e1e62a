from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_models.errors import MissingWeightsError, WeightsError
from gaudi_models.weights import read_weights
from gaudi_ops.tf.keras_api import keras

RNG = np.random.default_rng(0)
BACKBONE: dict[str, Any] = {
    "conv2d/kernel": RNG.normal(size=[7, 7, 3, 4]).astype(np.float32),
    "conv2d/kernel/Momentum": np.ones([7, 7, 3, 4], np.float32),
    "batch_normalization/gamma": RNG.normal(size=[4]).astype(np.float32),
    "batch_normalization/moving_variance": RNG.random(size=[4]).astype(np.float32),
    "conv2d_7/kernel": RNG.normal(size=[1, 1, 4, 8]).astype(np.float32),
    "global_step": np.int64(28152),
}
EXPECTED = {
    "conv1/kernel": "conv2d/kernel",
    "conv1_bn/gamma": "batch_normalization/gamma",
    "conv1_bn/moving_variance": "batch_normalization/moving_variance",
    "stage2_block1_shortcut/kernel": "conv2d_7/kernel",
}


def write_checkpoint(prefix: Path, tensors: dict[str, Any]) -> Path:
    """Write a checkpoint by names as TensorFlow 1's Saver does, and the file that names the newest."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, values in tensors.items():
            tf.compat.v1.get_variable(name, initializer=values, use_resource=True)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(prefix))
    return prefix


def check(path: Path, *, name: str) -> None:
    weights = read_weights(path)
    assert weights.source == f"{path} (TensorFlow checkpoint, the original SSD's names)"
    assert weights.padding == "same_pool"
    assert weights.skipped == {
        f"{name}conv2d/kernel/Momentum": "training state",
        "global_step": "training state",
    }
    assert weights.tensors.keys() == EXPECTED.keys()
    for ours, theirs in EXPECTED.items():
        np.testing.assert_array_equal(weights.tensors[ours], BACKBONE[theirs])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("backbone") / "model.ckpt-28152", BACKBONE)


def test_prefix_folder_and_files_name_the_same(checkpoint: Path) -> None:
    for path in (checkpoint, checkpoint.parent, checkpoint.with_name(f"{checkpoint.name}.index")):
        check(path, name="")
    check(checkpoint.with_name(f"{checkpoint.name}.data-00000-of-00001"), name="")


def test_a_whole_model_has_a_prefix(tmp_path: Path) -> None:
    tensors = {name if name == "global_step" else f"resnet34/{name}": value for name, value in BACKBONE.items()}
    check(write_checkpoint(tmp_path / "model.ckpt-1", tensors), name="resnet34/")


def test_the_newest_of_a_folder_that_was_moved(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.parent.glob("model*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / path.name.replace("28152", "9")).write_bytes(b"damaged")
    with pytest.raises(WeightsError, match=r"model.ckpt-28152, model.ckpt-9") as caught:
        read_weights(tmp_path)
    assert caught.value.path == str(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/software/data/ssd/model.ckpt-28152"\n')
    check(tmp_path, name="")


def test_damage(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.parent.glob("model*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = tmp_path / f"{checkpoint.name}.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(WeightsError, match="damaged TensorFlow checkpoint") as caught:
        read_weights(tmp_path / checkpoint.name)
    assert "\n" not in str(caught.value)
    data.unlink()
    with pytest.raises(WeightsError, match="damaged TensorFlow checkpoint"):
        read_weights(tmp_path / checkpoint.name)
    (tmp_path / f"{checkpoint.name}.index").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="damaged TensorFlow checkpoint"):
        read_weights(tmp_path / checkpoint.name)
    with pytest.raises(MissingWeightsError):
        read_weights(tmp_path / "model.ckpt-1")


def test_a_checkpoint_of_objects_of_other_names(tmp_path: Path) -> None:
    prefix = tf.train.Checkpoint(kernel=tf.Variable([1.0])).save(tmp_path / "x")
    with pytest.raises(WeightsError, match="first is 'Variable'"):
        read_weights(prefix)


def test_without_tensorflow_the_error_names_the_extra(checkpoint: Path) -> None:
    code = f"""
import sys
sys.modules["tensorflow"] = None
from gaudi_models.weights import read_weights
try:
    read_weights({str(checkpoint)!r})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "pip install 'gaudi-ops[tensorflow]'" in done.stdout


def test_a_checkpoint_of_objects_says_the_names_of_its_variables(tmp_path: Path) -> None:
    """As the original ResNet-50 saves: the model and its optimizer, with momentum beside the weights."""
    images = keras.Input([32, 32, 3])
    x = keras.layers.Conv2D(4, 7, use_bias=False, name="conv1")(images)
    x = keras.layers.BatchNormalization(name="bn_conv1")(x)
    shortcut = keras.layers.Conv2D(8, 1, use_bias=False, name="res2a_branch1")(x)
    x = keras.layers.Add()([keras.layers.Conv2D(8, 1, use_bias=False, name="res2a_branch2c")(x), shortcut])
    outputs = keras.layers.Dense(1001, name="fc1000")(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(images, outputs)
    for number, variable in enumerate(model.variables):
        variable.assign(tf.random.stateless_normal(variable.shape, [0, number]))
    optimizer = keras.optimizers.legacy.SGD(0.1, momentum=0.9)
    optimizer.apply_gradients([(tf.ones_like(each), each) for each in model.trainable_variables])
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "ckpt"))
    weights = read_weights(tmp_path)
    assert weights.source.endswith("(TensorFlow checkpoint, the original ResNet-50's names)")
    expected = {"conv1": "conv1", "bn_conv1": "conv1_bn", "res2a_branch1": "stage1_block1_shortcut"}
    expected |= {"res2a_branch2c": "stage1_block1_conv3", "fc1000": "logits"}
    for variable in model.variables:
        layer, kind = variable.name.removesuffix(":0").split("/")
        values = variable.numpy()[..., :1000] if layer == "fc1000" else variable.numpy()
        np.testing.assert_array_equal(weights.tensors[f"{expected[layer]}/{kind}"], values)
    assert len(weights.tensors) == len(model.variables)
    assert set(weights.skipped.values()) == {"training state", "background output"}
