from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from gaudi_models.errors import MissingWeightsError, UnsafeWeightsError, WeightsError
from gaudi_models.weights import WeightsMetadata, read_weights, reading
from gaudi_models.weights.contents import write_tensors
from gaudi_ops.files import FileError

RNG = np.random.default_rng(0)
GAMMA = RNG.normal(size=[4]).astype(np.float32)
KERNEL = RNG.normal(size=[2, 2, 3, 4]).astype(np.float32)
OURS = {"conv1/kernel": KERNEL, "conv1_bn/gamma": GAMMA}
TORCHVISION = {"conv1.weight": np.ascontiguousarray(KERNEL.transpose(3, 2, 0, 1)), "bn1.weight": GAMMA}


def check(path: Path, tensors: Any, padding: str | None, kind: str) -> None:
    weights = read_weights(path)
    assert (weights.padding, weights.source) == (padding, f"{path} ({kind})")
    assert weights.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(weights.tensors[name], tensor)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("name", ["weights.npz", "weights.pth"])
def test_npz(save: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        save(file, **OURS)
    check(path, OURS, None, "NumPy archive, our names")
    with path.open("wb") as file:
        save(file, **TORCHVISION)
    check(path, OURS, "symmetric", "NumPy archive, torchvision's names")


def test_npz_of_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, **OURS, other=np.array([{}], object))
    with pytest.raises(UnsafeWeightsError) as caught:
        read_weights(path)
    assert (caught.value.path, caught.value.record) == (str(path), "array other")


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    save_file(OURS, path)
    check(path, OURS, None, "safetensors, our names")
    assert read_weights(path).pool_padding == "same"
    save_file(TORCHVISION, path)
    check(path, OURS, "symmetric", "safetensors, torchvision's names")
    save_file(OURS, path, {"pool_padding": "same"})  # as the detector's files of before said it
    check(path, OURS, "same_pool", "safetensors, our names")
    save_file(OURS, path, {"padding": "symmetric", "classes": '[{"name": "ant"}]', "image_size": "300", "model": "x"})
    check(path, OURS, "symmetric", "safetensors, our names")
    assert read_weights(path).metadata == WeightsMetadata("symmetric", ({"name": "ant"},), 300, "x")
    voting = WeightsMetadata("symmetric", ({"name": "ant"},), 300, "x", box_voting=True)
    write_tensors(OURS, path, metadata=voting)
    assert read_weights(path).metadata == voting


def write_bfloat16(path: Path) -> None:
    """Write a safetensors file of OURS, the kernel in bfloat16: the upper halves of its bits."""
    data = save({**OURS, "conv1/kernel": (KERNEL.view("<u4") >> 16).astype("<u2")})
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(b'"U16"', b'"BF16"').rstrip()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def test_safetensors_in_bfloat16(tmp_path: Path) -> None:
    write_bfloat16(tmp_path / "x")
    halved = (KERNEL.view("<u4") & 0xFFFF0000).view("<f4")
    check(tmp_path / "x", {**OURS, "conv1/kernel": halved}, None, "safetensors, our names")


@pytest.mark.parametrize(
    "notes",
    [
        {"pool_padding": "both"},
        {"padding": "both"},
        {"padding": "same", "classes": "["},
        {"padding": "same", "classes": '["ant"]'},
        {"padding": "same", "image_size": "big"},
        {"padding": "same", "box_voting": "7"},
    ],
)
def test_safetensors_with_wrong_notes(notes: dict[str, str], tmp_path: Path) -> None:
    save_file(OURS, tmp_path / "x", notes)
    with pytest.raises(WeightsError, match="is damaged") as caught:
        read_weights(tmp_path / "x")
    assert caught.value.path == str(tmp_path / "x")


def write_checkpoint(folder: Path, *, others: dict[str, Any] | None = None, **notes: Any) -> Path:
    folder.mkdir()
    momentum = {f"momentum/{name}": tensor + 1 for name, tensor in OURS.items()}
    save_file(OURS | momentum | (others or {}), folder / "state.safetensors")
    digest = hashlib.sha256((folder / "state.safetensors").read_bytes()).hexdigest()
    manifest = {"format": "gaudi-apps checkpoint", "version": 2, "step": 3, "facts": notes}
    manifest["sha256"] = {"state.safetensors": digest}
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"manifest_sha256": checksum, "manifest": manifest}))
    return folder


def test_checkpoint_of_our_own(tmp_path: Path) -> None:
    categories = [{"id": 7, "name": "bee", "supercategory": ""}]
    folder = write_checkpoint(tmp_path / "step-00000003", categories=categories, pool_padding="symmetric")
    check(folder, OURS, "symmetric", "our checkpoint, our names")
    weights = read_weights(folder)
    assert weights.skipped == dict.fromkeys([f"momentum/{name}" for name in OURS], "training state")
    assert weights.metadata == WeightsMetadata("symmetric", tuple(categories))
    assert read_weights(write_checkpoint(tmp_path / "older")).padding == "same_pool"
    notes: dict[str, Any] = {"padding": "symmetric_stem", "model": "resnet50", "image_size": 128}
    weights = read_weights(write_checkpoint(tmp_path / "classifier", classes=[{"name": "coat"}], **notes))
    assert weights.metadata == WeightsMetadata("symmetric_stem", ({"name": "coat"},), 128, "resnet50")
    weights = read_weights(write_checkpoint(tmp_path / "voting", pool_padding="same", box_voting=True))
    assert weights.metadata == WeightsMetadata("same_pool", box_voting=True)


def test_checkpoint_with_averaged_weights(tmp_path: Path) -> None:
    averages = {name: tensor + 7 for name, tensor in OURS.items()}
    others = {f"average/{name}": tensor for name, tensor in averages.items()}
    folder = write_checkpoint(tmp_path / "x", others={**others, "average/updates": np.array(3)})
    check(folder, averages, "same_pool", "our checkpoint, our names")


def test_checkpoint_whose_tensors_changed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x")
    data = bytearray((folder / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "state.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match="SHA-256") as caught:
        read_weights(folder)
    assert caught.value.path == str(folder / "state.safetensors")
    (folder / "state.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no state\.safetensors"):
        read_weights(folder)


def test_checkpoint_whose_classes_changed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", categories=[{"id": 7, "name": "bee"}])
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("bee", "fly"))
    with pytest.raises(WeightsError) as caught:
        read_weights(folder)
    assert caught.value.path == str(path)


def test_archives_that_swell_are_refused_before_they_do(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.zeros(2**25, np.float32))
    tracemalloc.start()
    with pytest.raises(WeightsError) as caught:
        read_weights(path)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert caught.value.path == str(path)


@pytest.mark.parametrize("name", ["x.pth", "x.npz", "x.h5", "x.safetensors"])
@pytest.mark.posix
def test_pipes_are_no_weights(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileError) as caught:
        read_weights(tmp_path / name)
    assert (caught.value.exit_status, caught.value.path) == (65, str(tmp_path / name))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"manifest": {"sha256": {}}}', '{"manifest": {"sha256": 3, "facts": {}}}']
)
def test_checkpoint_with_a_broken_manifest(text: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x")
    (folder / "manifest.json").write_text(text)
    with pytest.raises(WeightsError, match="is damaged"):
        read_weights(folder)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingWeightsError, match="no such file") as caught:
        read_weights(tmp_path / "nothing.pth")
    assert caught.value.path == str(tmp_path / "nothing.pth")
    assert caught.value.exit_status == 66


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "is damaged"),
        (b"GIF89a" + bytes(100), "is none of PyTorch"),
        (b'{"a": 1}', "is none of PyTorch"),
        (b"PK\x03\x04" + bytes(100), "is damaged"),
        (b"\x10" + bytes(7) + b"{" + bytes(100), "is damaged"),
        (b"\xff" * 7 + b"\x7f{" + bytes(100), "is none of PyTorch"),
    ],
)
def test_what_is_no_weights(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=message) as caught:
        read_weights(path)
    assert caught.value.path == str(path)
    assert caught.value.exit_status == 65
    assert "\n" not in str(caught.value)


def test_folders_and_archives_of_other_things(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"without manifest\.json"):
        read_weights(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(WeightsError, match="neither PyTorch nor"):
        read_weights(tmp_path / "x.zip")


@pytest.mark.parametrize("kind", ["npz", "compressed", "safetensors", "bfloat16"])
def test_every_truncation_and_flip_is_an_error_or_harmless(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        if kind == "safetensors":
            save_file(OURS, path)
        elif kind == "bfloat16":
            write_bfloat16(path)
        else:
            (np.savez if kind == "npz" else np.savez_compressed)(file, **OURS)
    data = path.read_bytes()
    for place in range(0, len(data), 5):
        path.write_bytes(data[:place])
        with pytest.raises((WeightsError, UnsafeWeightsError)):
            read_weights(path)
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with contextlib.suppress(WeightsError, UnsafeWeightsError):
            read_weights(path)


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
def test_reading_numbers_needs_no_tensorflow(name: str, tmp_path: Path) -> None:
    """Nor ml_dtypes, which comes with it and gives NumPy bfloat16."""
    np.savez(tmp_path / "x.npz", **OURS)
    write_bfloat16(tmp_path / "x.safetensors")
    code = "import sys; sys.modules |= dict.fromkeys(['tensorflow', 'ml_dtypes'])\n"
    code += "from gaudi_models.weights import read_weights\n"
    code += f"print(sorted(read_weights({str(tmp_path / name)!r}).tensors))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sorted(OURS))


def test_an_error_of_the_disk_has_its_file_and_number_where_the_library_gives_neither(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        reading._read_safetensors(tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert caught.value.errno == errno.EIO
