"""Lay out an export as TensorFlow Serving or Triton takes it, with the configuration of the server.

Both configurations are protobuf texts: ``ModelServerConfig`` of TensorFlow Serving's model_server_config.proto, and
``ModelConfig`` of Triton's model_config.proto.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from gaudi_apps.cli.flags import SERVED_NAME
from gaudi_apps.inference.exported_models import (
    FORMAT,
    MANIFEST,
    MAX_BYTES,
    MODEL_FILES,
    import_runtime,
    read_manifest,
    refuse_file,
)
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.copies import fetch_copy
from gaudi_ops.files import FileError, publish_file, read_file, read_text, staging_folder, write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.inference.serving.flags import LayoutFlags

SERVING_BASE = PurePosixPath("/models")
"""Where the image of TensorFlow Serving has its models."""
SERVING_CONFIG, TRITON_CONFIG, LABELS = "models.config", "config.pbtxt", "labels.txt"
SIGNATURE = "serving_default"
NAME = re.compile(r'^ *name: "(.*)"$', re.MULTILINE)  # of a model, in the configuration of TensorFlow Serving
MAX_BATCH, MAX_DELAY_MS = 8, 5.0  # of Triton, where flags do not say
BATCHING = re.compile(r"^ *max_(batch_size|queue_delay_microseconds):.*\n", re.MULTILINE)
# Types of ONNX, which TensorFlow numbers otherwise.
ONNX_TYPES = {1: "FP32", 2: "UINT8", 6: "INT32", 7: "INT64"}
TENSORFLOW_TYPES = {"float32": "FP32", "uint8": "UINT8", "int32": "INT32", "int64": "INT64", "string": "STRING"}


class Tensor(NamedTuple):
    """An input or an output: its name, Triton's type, and its shape without the batch; -1 stands for any size."""

    name: str
    type: str
    shape: tuple[int, ...]


class Signature(NamedTuple):
    """The inputs and outputs of a model."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def write_layout(flags: LayoutFlags) -> list[Path]:
    """Copy an export into the folder of models of a server, and write its configuration.

    The version appears in its place as a whole, since a server that runs may be looking there.

    Returns:
        what was written: the folder of the version, and the configuration.

    Raises:
        MissingInputError: there is no export.
        DataError: it is not as it was exported, or of a format that the server does not run.
        MissingExtraError: TensorFlow or ONNX, which reads its signature, is not installed.
        UnsafeError: the version is there already; the configuration that is there is of other inputs, outputs or
            classes, or was written by hand.
    """
    export = fetch_copy(flags.export)
    manifest = _read_export(export)
    kind = str(manifest["kind"]).partition("-")[0]
    formats = {"tensorflow_serving": ("saved_model",), "triton": ("saved_model", "onnx")}[flags.server]
    if kind not in formats:
        raise DataError(
            f"is of {kind}, which {flags.server} does not run here",
            path=flags.export,
            remedy=f"export it as {' or '.join(formats)}",
        )
    files = _read_files(export, manifest["sha256"])
    model = flags.output_dir / flags.name
    version = model / str(flags.version)
    if os.path.lexists(version):
        raise UnsafeError("is there already", path=version, remedy="give another --version")
    if flags.server == "tensorflow_serving":
        config_path = flags.output_dir / SERVING_CONFIG
        names = _list_models(flags.output_dir)
        text = make_serving_config(sorted({*names, flags.name}))
        _require_same(config_path, text, make_serving_config)
        configs = {config_path: text}
    else:
        read = _read_saved_model if kind == "saved_model" else _read_onnx
        batching = flags.max_batch or MAX_BATCH, MAX_DELAY_MS if flags.max_delay_ms is None else flags.max_delay_ms
        config = make_triton_config(flags.name, kind, read(export), *batching)
        if kind == "saved_model":
            files = {f"model.savedmodel/{name}": content for name, content in files.items()}
        classes = "".join(f"{' '.join(str(one['name']).split())}\n" for one in manifest["classes"])
        configs = {model / LABELS: classes, model / TRITON_CONFIG: config}
        for path, text in configs.items():
            _require_same(path, text)
    _publish(model, version, files, configs)
    return [version, [*configs][-1]]


def _require_same(path: Path, text: str, make: Callable[[Iterable[str]], str] | None = None) -> None:
    """Raise UnsafeError where a file is there that is another text, but for the sizes and delays of batches.

    Args:
        path: of the file.
        text: that it may have.
        make: returns the text of several models, any of which it may have.
    """
    try:
        found = read_text(path, limit=MAX_BYTES)
    except FileNotFoundError:
        return
    expected = text if make is None else make(NAME.findall(found))
    if BATCHING.sub("", found) != BATCHING.sub("", expected):
        remedy = "give another --name" if make is None else "remove it, or give another --output_dir"
        raise UnsafeError("is of another model, or was changed by hand", path=path, remedy=remedy)


def _read_export(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_manifest(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingInputError(
            "holds no export", path=folder, remedy=f"give the folder of an export, which has {MANIFEST}"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"cannot be read ({error})", path=folder / MANIFEST, remedy="export it again") from None
    is_whole = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    if not is_whole or not _is_described(manifest):
        raise DataError("is not of an export", path=folder / MANIFEST, remedy="give the folder of an export")
    return manifest


def _is_described(manifest: Mapping[str, Any]) -> bool:
    sums, classes = manifest.get("sha256"), manifest.get("classes")
    return (
        isinstance(manifest.get("kind"), str)
        and isinstance(sums, dict)
        and isinstance(classes, list)
        and all(isinstance(one, dict) and "name" in one for one in classes)
    )


def _read_files(folder: Path, sums: Mapping[str, str]) -> dict[str, bytes]:
    """Read the files of an export, each with the SHA-256 that it was exported with."""
    files = {}
    for name, sha256 in sums.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise UnsafeError(
                "names a file outside the export", path=folder / MANIFEST, record=ascii(name), field="sha256"
            )
        try:
            files[name] = read_file(folder / path)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError("is missing", path=folder / path, remedy="export it again") from None
        except FileError:  # names the file, which is a pipe or too large
            raise
        except (IsADirectoryError, ValueError):  # the latter of what no file can be named, as with NUL
            raise DataError(
                "names no file", path=folder / MANIFEST, record=ascii(name), field="sha256", remedy="export it again"
            ) from None
        if hashlib.sha256(files[name]).hexdigest() != sha256:
            raise DataError("is not as it was exported", path=folder / path, remedy="export it again")
    return files


def _publish(model: Path, version: Path, files: Mapping[str, bytes], configs: Mapping[Path, str]) -> None:
    """Write the files of a version beside its place, then configurations, and move the version there.

    The server is another user, who gets to read what is made here; the mode of a folder that is there is its owner's.
    """
    made = [folder for folder in (model, *model.parents) if not folder.exists()]
    for folder in {model, model.parent} - {*made}:
        if ~folder.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH):
            say(f"{folder}: others may not read it, and so maybe not the server", error=True)
    model.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(model.parent) as staging:
        draft = staging / "version"
        for name, content in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(draft / name, content)
        model.mkdir(exist_ok=True)
        drafts = {staging / path.name: path for path in configs}
        for own, path in drafts.items():
            write_file(own, configs[path])
        for each in (draft, *draft.rglob("*"), *drafts, *made):
            mode = stat.S_IMODE(each.stat().st_mode)
            each.chmod(mode | (0o755 if each.is_dir() else 0o644))
        for own, path in drafts.items():
            publish_file(own, path)
        draft.rename(version)


def _list_models(output_dir: Path) -> list[str]:
    """List the models that are laid out for TensorFlow Serving, those of earlier calls too."""
    found = {path.parents[1].name for path in output_dir.glob("*/*/saved_model.pb") if path.parent.name.isdigit()}
    return sorted(name for name in found if SERVED_NAME.fullmatch(name))


def make_serving_config(names: Iterable[str]) -> str:
    """Return a ModelServerConfig of models, each below `SERVING_BASE`."""
    entries = (_block("config", [f"name: {_quote(name)}", f"base_path: {_quote(str(SERVING_BASE / name))}",
                                 'model_platform: "tensorflow"']) for name in names)  # fmt: skip
    return "\n".join(_block("model_config_list", [line for entry in entries for line in entry])) + "\n"


def make_triton_config(name: str, kind: str, signature: Signature, max_batch: int, max_delay_ms: float) -> str:
    """Return a ModelConfig.

    Args:
        name: of the model.
        kind: saved_model or onnx.
        signature: of the model.
        max_batch: images at once, at most.
        max_delay_ms: that Triton waits for more images.
    """
    platform = {"saved_model": "tensorflow_savedmodel", "onnx": "onnxruntime_onnx"}[kind]
    lines = [f"name: {_quote(name)}", f"platform: {_quote(platform)}", f"max_batch_size: {max_batch}"]
    for field, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        for tensor in tensors:
            own = [f"name: {_quote(tensor.name)}", f"data_type: TYPE_{tensor.type}"]
            # Triton has no shape without dimensions: the one that it shows is of one element.
            own += [f"dims: {list(tensor.shape or (1,))}"] + (["reshape { shape: [] }"] if not tensor.shape else [])
            if tensor.name == "probabilities":  # Triton's classification answers name classes by it
                own.append(f"label_filename: {_quote(LABELS)}")
            lines += _block(field, own)
    lines += _block("dynamic_batching", [f"max_queue_delay_microseconds: {round(1000 * max_delay_ms)}"])
    if kind == "saved_model":
        lines += _block("parameters", ['key: "TF_SIGNATURE_DEF"', f"value {{ string_value: {_quote(SIGNATURE)} }}"])
    return "\n".join(lines) + "\n"


def _block(name: str, lines: Sequence[str]) -> list[str]:
    return [f"{name} {{", *(f"  {line}" for line in lines), "}"]


def _quote(text: str) -> str:
    """Quote a name, which has letters of ASCII alone, for a protobuf text."""
    return json.dumps(text)


def _read_saved_model(folder: Path) -> Signature:
    from gaudi_apps.inference.exported_models import SavedModel

    function = SavedModel(folder).signature

    def convert(found: Mapping[str, Any]) -> list[Tensor]:
        return [
            Tensor(name, TENSORFLOW_TYPES[one.dtype.name], _shape(one.shape.as_list())) for name, one in found.items()
        ]

    return Signature(convert(function.structured_input_signature[1]), convert(function.structured_outputs))


def _read_onnx(folder: Path) -> Signature:
    onnx = import_runtime("onnx")
    path = folder / MODEL_FILES["onnx"]
    try:
        graph = onnx.load_model_from_string(read_file(path)).graph
    except Exception as error:  # of protobuf's parser
        raise refuse_file(path, error) from None

    def convert(values: Any) -> list[Tensor]:
        found = []
        for value in values:
            tensor = value.type.tensor_type
            shape = [one.dim_value if one.HasField("dim_value") else None for one in tensor.shape.dim]
            found.append(Tensor(value.name, ONNX_TYPES[tensor.elem_type], _shape(shape)))
        return found

    return Signature(convert(graph.input), convert(graph.output))


def _shape(shape: Sequence[int | None]) -> tuple[int, ...]:
    """Return a shape without its first dimension, the batch."""
    return tuple(-1 if one is None else one for one in shape[1:])
