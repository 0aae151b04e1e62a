from __future__ import annotations

import contextlib
import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_models.errors import UnsafeWeightsError, WeightsError
from gaudi_models.weights import read_weights
from gaudi_models.weights.reading import convert_weights

Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=[4, 3, 2, 2]).astype(np.float32)
GAMMA = RNG.normal(size=[4]).astype(np.float32)
STATE = {"conv1.weight": KERNEL, "bn1.weight": GAMMA, "bn1.num_batches_tracked": np.array(7)}
CLASSES = {"float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage", "int64": "LongStorage"}


def describe_tensor(
    assembly: Any,
    array: Array,
    key: str,
    *,
    view: tuple[Any, ...] = (),
    function: str = "_rebuild_tensor_v2",
    **fields: Any,
) -> Any:
    """Describe a tensor as PyTorch pickles it: its storage by an id, its place in it, if it wants a gradient."""
    module, name = fields.get("storage") or ("torch", CLASSES[array.dtype.name])
    size = fields.get("size", array.size)
    identity = ("storage", assembly.Name(module, name), key, "cpu", size, *view)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    place = (fields.get("offset", 0), fields.get("shape", array.shape), fields.get("strides", strides))
    rest: tuple[Any, ...] = () if function == "_rebuild_tensor" else (False, OrderedDict())
    return assembly.Call(assembly.Name("torch._utils", function), (assembly.Persistent(identity), *place, *rest))


def write_archive(path: Path, pickled: bytes, storages: dict[str, bytes], *, order: str | None = "little") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights/data.pkl", pickled)
        if order is not None:
            archive.writestr("weights/byteorder", order)
        for key, data in storages.items():
            archive.writestr(f"weights/data/{key}", data)
        archive.writestr("weights/version", "3\n")
    return path


def write_state(path: Path, assembly: Any, state: dict[str, Array]) -> Path:
    tensors = {name: describe_tensor(assembly, array, str(n)) for n, (name, array) in enumerate(state.items())}
    return write_archive(path, assembly(tensors), {str(n): a.tobytes() for n, a in enumerate(state.values())})


def write_old(path: Path, assembly: Any, tensors: Any, keys: list[str], storages: dict[str, Array]) -> Path:
    file = io.BytesIO()
    file.write(assembly(0x1950A86A20F9469CFC6C))
    file.write(assembly(1001))
    file.write(assembly({"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}))
    file.write(assembly(tensors))
    file.write(assembly(keys))
    for key in keys:
        file.write(storages[key].size.to_bytes(8, "little") + storages[key].tobytes())
    path.write_bytes(file.getvalue())
    return path


def test_many_tensors_that_share_a_storage_are_refused(tmp_path: Path, assembly: Any) -> None:
    names = [
        f"layer{stage}.{block}.conv{number}.weight" for stage in (1, 2) for block in (0, 1) for number in (1, 2, 3)
    ]
    tensors = {name: describe_tensor(assembly, KERNEL, "0") for name in names[:9]}
    few = dict(list(tensors.items())[:8])
    assert len(read_weights(write_archive(tmp_path / "b.pth", assembly(few), {"0": KERNEL.tobytes()})).tensors) == 8
    with pytest.raises(WeightsError, match="share"):
        read_weights(write_archive(tmp_path / "a.pth", assembly(tensors), {"0": KERNEL.tobytes()}))


def check(path: Path, kind: str) -> None:
    weights = read_weights(path)
    assert weights.source == f"{path} ({kind}, torchvision's names)"
    assert weights.pool_padding == "symmetric"
    assert weights.skipped == {"bn1.num_batches_tracked": "batch count"}
    assert list(weights.tensors) == ["conv1/kernel", "conv1_bn/gamma"]
    np.testing.assert_array_equal(weights.tensors["conv1/kernel"], KERNEL.transpose(2, 3, 1, 0))
    np.testing.assert_array_equal(weights.tensors["conv1_bn/gamma"], GAMMA)
    assert all(tensor.dtype == np.float32 and tensor.flags.c_contiguous for tensor in weights.tensors.values())


@pytest.mark.parametrize("name", ["resnet34.pth", "resnet34", "resnet34.npz"])
def test_the_zip_format_whatever_its_name(name: str, assembly: Any, tmp_path: Path) -> None:
    check(write_state(tmp_path / name, assembly, STATE), "PyTorch file")


def test_it_becomes_the_safe_format(assembly: Any, tmp_path: Path) -> None:
    target = tmp_path / "resnet34.safetensors"
    convert_weights(write_state(tmp_path / "resnet34.pth", assembly, STATE), target)
    weights = read_weights(target)
    assert (weights.padding, list(weights.tensors)) == ("symmetric", ["conv1/kernel", "conv1_bn/gamma"])
    np.testing.assert_array_equal(weights.tensors["conv1/kernel"], KERNEL.transpose(2, 3, 1, 0))


def test_the_format_before_it(assembly: Any, tmp_path: Path) -> None:
    tensors = {name: describe_tensor(assembly, array, name, view=(None,)) for name, array in STATE.items()}
    path = write_old(tmp_path / "old.pth", assembly, tensors, sorted(STATE), STATE)
    check(path, "PyTorch file of the old format")


def test_parameters_and_views_of_the_first_versions(assembly: Any, tmp_path: Path) -> None:
    """Models were once saved with their parameters, and storages as views of a larger one."""
    both = np.concatenate([KERNEL.ravel(), GAMMA])
    kernel = describe_tensor(
        assembly, KERNEL, "all", view=(("k", 0, KERNEL.size),), size=both.size, function="_rebuild_tensor"
    )
    gamma = describe_tensor(assembly, GAMMA, "all", view=(("g", KERNEL.size, 4),), size=both.size)
    parameter = assembly.Call(assembly.Name("torch.nn.parameter", "Parameter"), (kernel,), (True, False, OrderedDict()))
    rebuilt = assembly.Call(assembly.Name("torch._utils", "_rebuild_parameter"), (gamma, True, OrderedDict()))
    count = describe_tensor(assembly, np.array(7), "count", view=(None,))
    state = {"conv1.weight": parameter, "bn1.weight": rebuilt, "bn1.num_batches_tracked": count}
    path = write_old(tmp_path / "x.pth", assembly, state, ["all", "count"], {"all": both, "count": np.array(7)})
    check(path, "PyTorch file of the old format")


def test_views_with_strides_and_offsets(assembly: Any, tmp_path: Path) -> None:
    storage = np.arange(40, dtype=np.float32)
    tensor = describe_tensor(assembly, storage, "0", offset=3, shape=(2, 3, 1, 2), strides=(12, 2, 5, 1))
    path = write_archive(tmp_path / "x.pth", assembly({"conv1.weight": tensor}), {"0": storage.tobytes()})
    o, i, _, w = np.indices([2, 3, 1, 2])
    np.testing.assert_array_equal(
        read_weights(path).tensors["conv1/kernel"], (3 + 12 * o + 2 * i + w).transpose(2, 3, 1, 0)
    )


@pytest.mark.parametrize(("dtype", "module"), [("float64", "torch"), ("float16", "torch"), ("float32", "torch.cuda")])
def test_types_become_float32(dtype: str, module: str, assembly: Any, tmp_path: Path) -> None:
    values = GAMMA.astype(dtype)
    tensor = describe_tensor(assembly, values, "0", storage=(module, CLASSES[dtype]))
    path = write_archive(tmp_path / "x.pth", assembly({"bn1.bias": tensor}), {"0": values.tobytes()}, order=None)
    read = read_weights(path).tensors["conv1_bn/beta"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, values.astype(np.float32))


def test_bfloat16(assembly: Any, tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC049, 0x0000], np.uint16)  # 1, -3.140625, 0
    tensor = describe_tensor(assembly, bits, "0", storage=("torch", "BFloat16Storage"))
    path = write_archive(tmp_path / "x.pth", assembly({"bn1.bias": tensor}), {"0": bits.tobytes()})
    assert read_weights(path).tensors["conv1_bn/beta"].tolist() == [1.0, -3.140625, 0.0]


def test_bytes_of_the_other_order(assembly: Any, tmp_path: Path) -> None:
    tensor = describe_tensor(assembly, GAMMA, "0")
    data = {"0": GAMMA.astype(">f4").tobytes()}
    path = write_archive(tmp_path / "x.pth", assembly({"bn1.bias": tensor}), data, order="big")
    np.testing.assert_array_equal(read_weights(path).tensors["conv1_bn/beta"], GAMMA)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"shape": (5,)}, "storage of 4"),
        ({"offset": 1}, "than its storage"),
        ({"strides": (2,)}, "than its storage"),
        ({"shape": (1 << 39,), "strides": (0,)}, "than its storage"),
        ({"shape": (1 << 50,), "strides": (0,)}, "no sizes"),
        ({"strides": (-1,)}, "no sizes"),
        ({"offset": -1}, "no sizes"),
        ({"offset": 0.5}, "no sizes"),
        ({"strides": (1, 1)}, "a storage, a"),
        ({"size": 400}, "has 16 bytes"),
        ({"size": -1}, "no size"),
    ],
)
def test_a_tensor_outside_of_its_storage_is_damage(
    fields: dict[str, Any], what: str, assembly: Any, tmp_path: Path
) -> None:
    tensor = describe_tensor(assembly, GAMMA, "0", **fields)
    path = write_archive(tmp_path / "x.pth", assembly({"bn1.bias": tensor}), {"0": GAMMA.tobytes()})
    with pytest.raises(WeightsError, match=what):
        read_weights(path)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("torch.nn.modules.conv", "Conv2d"),
        ("__torch__.torch.nn", "Module"),
        ("builtins", "getattr"),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_whole_models_and_other_names_are_refused(
    module: str, name: str, is_old: bool, assembly: Any, tmp_path: Path
) -> None:
    payload = {"bn1.bias": assembly.Call(assembly.Name(module, name), ("x",))}
    path = tmp_path / "x.pth"
    if is_old:
        write_old(path, assembly, payload, [], {})
    else:
        write_archive(path, assembly(payload), {})
    with pytest.raises(UnsafeWeightsError) as caught:
        read_weights(path)
    assert (caught.value.path, caught.value.field) == (str(path), f"{module}.{name}")
    assert caught.value.exit_status == 77


def test_a_dict_of_dicts_says_what_it_holds(assembly: Any, tmp_path: Path) -> None:
    tensor = describe_tensor(assembly, GAMMA, "0")
    path = write_archive(tmp_path / "x.pth", assembly({"teacher": {"bn1.bias": tensor}, "epoch": 3}), {})
    with pytest.raises(WeightsError, match="'epoch', 'teacher'"):
        read_weights(path)


@pytest.mark.parametrize(
    ("wrappers", "prefix", "said"),
    [
        (["state_dict"], "", "state_dict"),
        (["model"], "", "model"),
        (["state_dict"], "module.", "state_dict module.*"),
        ([], "module.", "module.*"),
        (["state_dict"], "module._orig_mod.", "state_dict module.* _orig_mod.*"),
        (["model", "state_dict"], "model.", "model state_dict model.*"),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_the_wrappers_of_training_programs_are_taken_off(
    is_old: bool, wrappers: list[str], prefix: str, said: str, assembly: Any, tmp_path: Path
) -> None:
    view: Any = {"view": (None,)} if is_old else {}
    state: Any = {f"{prefix}{name}": describe_tensor(assembly, array, name, **view) for name, array in STATE.items()}
    for name in reversed(wrappers):
        arguments = assembly.Call(assembly.Name("argparse", "Namespace"), ())
        state = {name: state, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3, "args": arguments}
    path = tmp_path / "x.pth"
    if is_old:
        write_old(path, assembly, state, sorted(STATE), STATE)
    else:
        write_archive(path, assembly(state), {name: array.tobytes() for name, array in STATE.items()})
    check(path, f"PyTorch file{' of the old format' * is_old}, unwrapped from {said}")


def test_what_is_compressed_is_refused(assembly: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", assembly({}))
    with pytest.raises(WeightsError, match="is compressed"):
        read_weights(path)


@pytest.mark.parametrize("is_old", [False, True])
def test_every_truncation_and_flip_is_an_error_or_harmless(is_old: bool, assembly: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    if is_old:
        tensors = {name: describe_tensor(assembly, array, name, view=(None,)) for name, array in STATE.items()}
        write_old(path, assembly, tensors, sorted(STATE), STATE)
    else:
        write_state(path, assembly, STATE)
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place])
        with pytest.raises((WeightsError, UnsafeWeightsError)):
            read_weights(path)
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with contextlib.suppress(WeightsError, UnsafeWeightsError):
            read_weights(path)


def test_the_arguments_of_a_program_are_left_unread(tmp_path: Path) -> None:
    """As Python pickles them, beside a state dict."""
    import argparse
    import pickle

    state = {"model": {}, "args": argparse.Namespace(lr=0.1, device="cuda", milestones=[3, 4]), "epoch": 3}
    path = write_archive(tmp_path / "x.pth", pickle.dumps(state, protocol=2), {})
    with pytest.raises(WeightsError, match="'args', 'epoch'"):
        read_weights(path)


def test_the_count_of_averaged_steps_is_left_out(assembly: Any, tmp_path: Path) -> None:
    averaged = {"n_averaged": np.array([3], np.int64), **{f"module.{name}": array for name, array in STATE.items()}}
    path = write_state(tmp_path / "x.pth", assembly, averaged)
    weights = read_weights(path)
    assert list(weights.tensors) == ["conv1/kernel", "conv1_bn/gamma"]
    assert weights.skipped["n_averaged"] == "no weight"
