from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_models.errors import UnsafeWeightsError, WeightsError
from gaudi_models.weights import read_weights
from gaudi_models.weights.pickles import read_numpy_pickle

RNG = np.random.default_rng(0)
ARRAYS = {
    "four": RNG.normal(size=[2, 3, 1, 1]).astype(np.float32),
    "fortran": np.asfortranarray(RNG.normal(size=[3, 4])),
    "big": RNG.normal(size=[5]).astype(">f4"),
    "half": RNG.normal(size=[5]).astype(np.float16),
    "count": np.array(7),
    "none": np.zeros([0, 3], np.float32),
    "flags": np.array([True, False]),
    "bytes": np.arange(4, dtype=np.uint8),
}


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_are_read_at_every_protocol(protocol: int) -> None:
    raw = read_numpy_pickle(io.BytesIO(pickle.dumps(ARRAYS | {"note": "text"}, protocol)))
    assert raw.skipped == {"note": "no array"}
    assert raw.tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        read = raw.tensors[name]()
        assert read.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_both_places_of_numpys_functions_are_known(core: str, assembly: Any) -> None:
    """NumPy 2 moved them; protocol 2 writes bytes as text, and Python 2 wrote them as they are."""
    float32 = assembly.Call(assembly.Name("numpy", "dtype"), ("f4", False, True), (3, "<", None, None, None, -1, -1, 0))
    text = assembly.Call(assembly.Name("_codecs", "encode"), ("\x00\x00\x80\x3f", "latin1"))
    array = assembly.Call(
        assembly.Name(f"{core}.multiarray", "_reconstruct"),
        (assembly.Name("numpy", "ndarray"), (0,), b"b"),
        (1, (1,), float32, False, text),
    )
    buffer = assembly.Call(assembly.Name(f"{core}.numeric", "_frombuffer"), (b"\x00\x00\x00\x40", float32, (1,), "C"))
    raw = read_numpy_pickle(io.BytesIO(assembly({"a": array, "b": buffer})))
    assert [raw.tensors[name]().tolist() for name in "ab"] == [[1.0], [2.0]]


def make_backbone() -> dict[str, Any]:
    """Make a piece of ResNet-34 as MLPerf's conversion leaves it: without classifier, with gammas and betas."""
    return {
        "conv1.weight": RNG.normal(size=[4, 3, 7, 7]).astype(np.float32),
        "bn1.gamma": RNG.normal(size=[4]).astype(np.float32),
        "bn1.beta": RNG.normal(size=[4]).astype(np.float32),
        "bn1.running_mean": RNG.normal(size=[4]).astype(np.float32),
        "bn1.running_var": RNG.random(size=[4]).astype(np.float32),
        "layer2.0.downsample.0.weight": RNG.normal(size=[4, 3, 1, 1]).astype(np.float32),
        "layer2.0.downsample.1.gamma": RNG.normal(size=[4]).astype(np.float32),
    }


def test_the_backbone_of_the_mxnet_submission(tmp_path: Path) -> None:
    backbone = make_backbone()
    path = tmp_path / "resnet34-333f7ec4.pickle"
    path.write_bytes(pickle.dumps(backbone, 3))
    weights = read_weights(path)
    assert weights.path == str(path)
    assert "torchvision" in weights.source
    assert weights.pool_padding == "symmetric"
    expected = {
        "conv1/kernel": backbone["conv1.weight"].transpose(2, 3, 1, 0),
        "conv1_bn/gamma": backbone["bn1.gamma"],
        "conv1_bn/beta": backbone["bn1.beta"],
        "conv1_bn/moving_mean": backbone["bn1.running_mean"],
        "conv1_bn/moving_variance": backbone["bn1.running_var"],
        "stage2_block1_shortcut/kernel": backbone["layer2.0.downsample.0.weight"].transpose(2, 3, 1, 0),
        "stage2_block1_shortcut_bn/gamma": backbone["layer2.0.downsample.1.gamma"],
    }
    assert weights.tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(weights.tensors[name], values)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": np.array([{}], object)}, "objects or records"),
        ({"a": np.zeros(2, [("x", "f4")])}, "objects or records"),
        ({"a": np.array(["text"])}, "objects or records"),
        ({"a": np.zeros(2, np.complex64)}, "objects or records"),
        ({"a": np.float32(1)}, r"multiarray\.scalar"),
        ([np.zeros(2)], "holds a list"),
        ({"a": np.zeros(2).view(np.matrix)}, r"numpy\.matrix"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(value: Any, what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(UnsafeWeightsError, match=what):
        read_weights(path)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = pickle.dumps(make_backbone(), 4)
    path = tmp_path / "x.pickle"
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises((WeightsError, UnsafeWeightsError)):
            read_weights(path)


def test_a_shape_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    data = pickle.dumps({"bn1.gamma": np.zeros(5, np.float32)}, 2)
    path.write_bytes(data.replace(b"K\x05", b"K\x06"))
    with pytest.raises(WeightsError, match="not fit"):
        read_weights(path)
