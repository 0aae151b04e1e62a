"""Read files of weights, told apart by their contents and not by their names, and convert them to safetensors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from gaudi_models.errors import MissingWeightsError, UnsafeWeightsError, WeightsError
from gaudi_models.padding import PADDING_RULES, Padding
from gaudi_models.weights.contents import Array, RawWeights, WeightsFile, WeightsMetadata, hold_arrays, write_tensors
from gaudi_models.weights.names import translate_names
from gaudi_models.weights.pickles import read_numpy_pickle
from gaudi_models.weights.tensorflow_files import HDF5_MAGIC, find_checkpoint, read_hdf5, read_tensorflow_checkpoint
from gaudi_models.weights.torch_files import LEGACY_MAGIC, read_torch_archive, read_torch_pickles, widen_bfloat16
from gaudi_ops.files import hash_file, open_regular_file, read_file, read_text

TENSORS = "state.safetensors"
MANIFEST = "manifest.json"
_MOST_BYTES = 2**35  # of a pickle, which is read whole
_UNPACKED_BYTES, _MOST_RATIO = 2**26, 50  # of compressed arrays; floats lose little, pruned ones up to 9 of 10 bytes
_LEGACY_TORCH = b"\x8a\x0a" + LEGACY_MAGIC.to_bytes(10, "little") + b"."

# Errors that readers raise for damaged bytes, beside those that they raise on purpose.
_DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError, MemoryError, SyntaxError,
    RuntimeError, NotImplementedError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
    SafetensorError,
)  # fmt: skip


def read_weights(path: str | os.PathLike[str]) -> WeightsFile:
    """Read the weights of a ResNet or ResNeXt, of its backbone, or of an SSD on one.

    Args:
        path: a PyTorch file (``.pth``) with torchvision's names; an ``.npz``, a pickled dict of NumPy arrays (MLPerf's
            MXNet backbone) or a safetensors file with torchvision's or our names; Keras' ``.h5`` with the names of
            keras.applications, of the original ResNet-50 or ours; a TensorFlow checkpoint with the names of the
            original SSD, ResNet-50 or ResNeXt, as its prefix or its folder; or a checkpoint folder of our own programs.

    Returns:
        Tensors by our names, and the padding that they were trained with.

    Raises:
        MissingWeightsError: there is nothing of that name.
        UnsafeWeightsError: the file asks for more than numbers; nothing that it asks for was done.
        WeightsError: it is damaged, of another format, or has no name that is known.
    """
    where = os.fspath(path)
    with contextlib.ExitStack() as stack:
        try:
            return translate_names(where, _read_raw(Path(path), stack))
        except UnsafeWeightsError as error:
            error.path, error.remedy = where, "nothing of it was run, and it is not read"
            raise
        except (WeightsError, MissingWeightsError):
            raise
        except OSError as error:
            # A damaged archive sends its reader to places before the file's begin.
            if error.errno != errno.EINVAL:
                raise
            raise WeightsError("is damaged", path=where, remedy="get it again") from None
        except _DAMAGE as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise WeightsError(
                f"is damaged or of another format: {reason}", path=where, remedy="get it again"
            ) from None


def _read_raw(path: Path, stack: contextlib.ExitStack) -> RawWeights:
    """Read a file or a folder; files that stay open while tensors are read are put on the stack."""
    if path.is_dir() and (path / MANIFEST).is_file():
        return _read_own_checkpoint(path)
    if prefix := find_checkpoint(path):
        return read_tensorflow_checkpoint(prefix)
    if path.is_dir():
        raise WeightsError(
            f"is a folder without {MANIFEST} or TensorFlow checkpoint", path=path, remedy="name one or a file"
        )
    if not path.exists():
        raise MissingWeightsError(
            "there is no such file, folder or TensorFlow checkpoint", path=path, remedy="check the name"
        )
    return _read_file(path, stack)


def _read_file(path: Path, stack: contextlib.ExitStack) -> RawWeights:
    file = stack.enter_context(open_regular_file(path))
    head = file.read(64)
    if not head:
        raise WeightsError("is empty", path=path, remedy="get it again")
    if head[:4] == b"PK\x03\x04":
        archive = stack.enter_context(zipfile.ZipFile(file))
        if any(name.endswith(".npy") for name in archive.namelist()):
            _require_sizes(archive, path)
            file.seek(0)
            return _read_npz(stack.enter_context(np.load(file, allow_pickle=False)))
        if any(name.endswith("data.pkl") for name in archive.namelist()):
            return read_torch_archive(archive)
        raise WeightsError("is a zip archive of neither PyTorch nor NumPy", path=path, remedy="name a file of weights")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return _read_safetensors(path)
    if head.startswith(HDF5_MAGIC):
        return read_hdf5(path)
    if head[2:].startswith(_LEGACY_TORCH):
        return read_torch_pickles(BytesIO(read_file(path, limit=_MOST_BYTES)))
    # Protocols 0 and 1 of pickles have no mark: they begin with a container, or a name to be called.
    if head[:1] in (b"\x80", b"(", b"}", b"]") or (head[:1] == b"c" and b"\n" in head):
        return read_numpy_pickle(BytesIO(read_file(path, limit=_MOST_BYTES)))
    raise WeightsError(
        "is none of PyTorch, NumPy, pickle, safetensors, HDF5 and TensorFlow",
        path=path,
        remedy="name a file of weights",
    )


def _require_sizes(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise ValueError for arrays that swell beyond what weights do, before memory is taken for them."""
    packed = path.stat().st_size
    total = sum(member.file_size for member in archive.infolist())  # members may share their bytes
    if total > max(_UNPACKED_BYTES, _MOST_RATIO * packed):
        raise ValueError(f"it has {packed} bytes, and {total} unpacked")


def _read_npz(arrays: Any) -> RawWeights:
    def read(name: str) -> Array:
        try:
            array = arrays[name]
        except ValueError as error:
            if "allow_pickle" in str(error):
                raise UnsafeWeightsError(
                    "holds pickled objects, which are no numbers", record=f"array {name}"
                ) from None
            raise
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name!r} in it is no array")
        return array

    # All at once: an array of objects is refused whether or not it would be used.
    return RawWeights("NumPy archive", hold_arrays({name: read(name) for name in arrays.files}))


def _read_safetensors(path: Path) -> RawWeights:
    try:
        with safe_open(path, framework="np") as file:
            notes = file.metadata() or {}
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - it is no dict
            tensors = {name: file.get_tensor(name) for name, dtype in dtypes.items() if dtype != "BF16"}
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EIO, str(error), str(path)) from None  # the library's own has neither number nor file
    if halves := dtypes.keys() - tensors:
        tensors |= _read_bfloat16(path, halves)
    metadata = None
    if (padding := _find_padding(notes)) is not None:
        classes = json.loads(notes.get("classes", "[]"))
        voting = json.loads(notes.get("box_voting", "false"))
        metadata = _make_metadata(padding, classes, int(notes.get("image_size", 0)), notes.get("model", ""), voting)
    return RawWeights("safetensors", hold_arrays(tensors), metadata=metadata)


def _read_bfloat16(path: Path, names: Iterable[str]) -> dict[str, Array]:
    """Read tensors as float32, of a file whose sizes and offsets the library has checked."""
    tensors = {}
    with open_regular_file(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        for name in names:
            begin, end = header[name]["data_offsets"]
            file.seek(start + begin)
            bits = np.frombuffer(file.read(end - begin), "<u2")
            tensors[name] = widen_bfloat16(bits.reshape(header[name]["shape"]))
    return tensors


def _read_own_checkpoint(folder: Path) -> RawWeights:
    """Read a checkpoint of our programs, whose manifest has the tensors' SHA-256 and describes the model."""
    whole = json.loads(read_text(folder / MANIFEST))
    manifest = whole["manifest"]
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    if whole.get("manifest_sha256", checksum) != checksum:
        raise WeightsError("is damaged", path=folder / MANIFEST, remedy="use another checkpoint")
    if not (folder / TENSORS).is_file():
        raise WeightsError(f"has no {TENSORS}", path=folder, remedy="use another checkpoint")
    if manifest["sha256"][TENSORS] != hash_file(folder / TENSORS):
        raise WeightsError(
            "does not have the SHA-256 in its manifest", path=folder / TENSORS, remedy="use another checkpoint"
        )
    notes = manifest["facts"]
    classes = notes.get("categories", notes.get("classes", []))
    size, model = notes.get("image_size", 0), notes.get("model", "")
    voting = notes.get("box_voting", False)
    metadata = _make_metadata(_find_padding(notes) or "same_pool", classes, size, model, voting)
    tensors = _read_safetensors(folder / TENSORS).tensors
    # Where weights were averaged over the steps, it is the average that is of use.
    averaged = {name: tensors.get(f"average/{name}", tensor) for name, tensor in tensors.items()}
    return RawWeights("our checkpoint", averaged, metadata=metadata)


def _find_padding(notes: Mapping[str, Any]) -> Any:
    """Find the padding in the notes of a file; files of the detector only have that of the pooling."""
    if "padding" not in notes and "pool_padding" in notes:
        return {"same": "same_pool"}.get(notes["pool_padding"], notes["pool_padding"])
    return notes.get("padding")


def _make_metadata(padding: Any, classes: Any, image_size: Any, model: Any, box_voting: Any) -> WeightsMetadata:
    known = next((each for each in PADDING_RULES if each == padding), None)
    if known is None:
        raise ValueError(f"its padding is none of {', '.join(PADDING_RULES)}")
    if not isinstance(classes, list) or not all(isinstance(each, dict) and "name" in each for each in classes):
        raise ValueError("its classes are no list of objects with a name")
    if type(image_size) is not int or not isinstance(model, str):
        raise ValueError("its image_size is no whole number, or its model no name")
    if type(box_voting) is not bool:
        raise ValueError("its box_voting is neither true nor false")
    return WeightsMetadata(known, tuple(classes), image_size, model, box_voting)


def convert_weights(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, padding: Padding | None = None
) -> WeightsFile:
    """Read any file of weights and write it as safetensors, by our names, for TensorFlow and MXNet.

    Args:
        source: as `read_weights` takes it.
        target: the file to write; one that is there is replaced.
        padding: of the network, if the file does not tell.

    Returns:
        The weights that were read.

    Raises:
        WeightsError: the file is damaged or of no known format, its padding is not known, or another one was given.
        MissingWeightsError: there is no such file.
        UnsafeWeightsError: it asks for more than numbers; nothing that it asks for was done.
        OSError: the target cannot be written.
    """
    if Path(source).resolve() == Path(target).resolve():
        raise WeightsError("would replace the file that it is made of", path=target, remedy="name another file")
    weights = read_weights(source)
    if weights.padding is None and padding is None:
        raise WeightsError(
            "does not tell its network's padding",
            path=source,
            field="padding",
            remedy=f"give it, {', '.join(PADDING_RULES)}",
        )
    if padding not in (None, weights.padding) and weights.padding is not None:
        raise WeightsError(
            f"was trained with padding {weights.padding!r}, not {padding!r}",
            path=source,
            field="padding",
            remedy="leave that out",
        )
    known = weights.padding or padding
    metadata = weights.metadata or WeightsMetadata(known or "same")
    write_tensors(weights.tensors, target, metadata=metadata)
    return weights
