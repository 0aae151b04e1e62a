"""Readers of each kind of file: a good input, how to change it, and how a program reads it."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from tests.torture import members, mutations, programs

LONGEST_TEXT = 400  # characters of an error


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        name: of the kind of file.
        name_in: the file that is changed, in the folder of a good input.
        make: writes a good input into a folder, and returns the strategy of changed contents.
        read: reads what is there, as far as a program would.
    """

    name: str
    name_in: str
    make: Callable[[Path], st.SearchStrategy[bytes]]
    read: Callable[[Path], Any]


def make_coco(folder: Path) -> st.SearchStrategy[bytes]:
    programs.make_images(folder)
    return mutations.of_json(json.loads((folder / "boxes.json").read_text()))


def read_coco(folder: Path) -> None:
    from gaudi_datasets.detection.coco import read_coco as read
    from gaudi_datasets.detection.sources import CocoSource

    source = CocoSource(read(folder / "boxes.json"), folder / "photos", keep_empty=True)
    for index in range(len(source)):
        source.read(index)


XML = """<annotation><folder>JPEGImages</folder>
<filename>1.jpg</filename>
<size> <width> 75 </width> <height> 60 </height> <depth> 3 </depth> </size>
<object> <name> red </name> <difficult> 0 </difficult> <truncated> 0 </truncated>
<bndbox> <xmin> 4 </xmin> <ymin> 5 </ymin> <xmax> 30 </xmax> <ymax> 31 </ymax> </bndbox> </object>
</annotation>"""


def make_voc(folder: Path) -> st.SearchStrategy[bytes]:
    programs.make_images(folder)
    (folder / "photos").rename(folder / "JPEGImages")
    for name in ("Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    (folder / "Annotations" / "1.xml").write_text(XML)
    (folder / "ImageSets" / "Main" / "train.txt").write_text("1\n")
    headed = st.sampled_from(("", '<?xml version="1.0" encoding="latin-1"?>', '<?xml version="1.0" encoding="x"?>'))
    entity = st.sampled_from(("", '<!DOCTYPE a [<!ENTITY e "x">]>'))
    return st.builds(lambda a, b, c: (a + b).encode() + c, headed, entity, mutations.of_text(XML)) | mutations.of_text(
        XML
    )


def read_voc(folder: Path) -> None:
    from gaudi_datasets.detection.coco import parse_coco
    from gaudi_datasets.detection.sources import CocoSource
    from gaudi_datasets.detection.voc import read_voc as read

    annotations = parse_coco(read(folder, ("train",)), folder)
    CocoSource(annotations, folder / "JPEGImages", keep_empty=True).read(0)


YOLO = "path: .\ntrain: images/train\nval: images/train\nnames:\n  0: red\n  1: blue\n"
LABELS = "0 0.5 0.5 0.25 0.25\n1 0.25 0.25 0.1 0.2"


def make_yolo(folder: Path) -> st.SearchStrategy[bytes]:
    programs.make_images(folder)
    (folder / "images").mkdir()
    (folder / "photos").rename(folder / "images" / "train")
    (folder / "labels" / "train").mkdir(parents=True)
    (folder / "labels" / "train" / "1.txt").write_text(LABELS)
    (folder / "data.yaml").write_text(YOLO)
    return mutations.of_text(YOLO) | mutations.of_text(YOLO.replace("  0: red\n  1: blue", "  [red, blue]"))


def make_yolo_labels(folder: Path) -> st.SearchStrategy[bytes]:
    make_yolo(folder)
    return mutations.of_text(LABELS)


def read_yolo(folder: Path) -> None:
    from gaudi_datasets.detection.coco import parse_coco
    from gaudi_datasets.detection.yolo import read_yolo as read

    document, _ = read(folder / "data.yaml", "train")
    parse_coco(document, folder)


def make_manifest(folder: Path) -> st.SearchStrategy[bytes]:
    programs.make_records(folder)
    return mutations.of_json(json.loads((folder / "records" / "train.json").read_text()))


def make_index(folder: Path) -> st.SearchStrategy[bytes]:
    programs.make_records(folder)
    return mutations.change_bytes((folder / "records" / "train.index").read_bytes())


def make_shard(folder: Path) -> st.SearchStrategy[bytes]:
    from gaudi_datasets.records.tfrecords import frame_record, scan_records

    programs.make_records(folder)
    (folder / "records" / "train.json").unlink()
    path = folder / "records" / "train-00000-of-00002.tfrecord"
    content = path.read_bytes()
    records = [content[offset : offset + length] for offset, length, *_ in scan_records(path)]

    def frame(changed: bytes) -> bytes:
        return frame_record(changed) + b"".join(map(frame_record, records[1:]))

    return mutations.change_bytes(records[0]).map(frame) | mutations.change_bytes(content)


def make_sealed_shard(folder: Path) -> st.SearchStrategy[bytes]:
    programs.make_records(folder)
    return mutations.change_bytes((folder / "records" / "train-00000-of-00002.tfrecord").read_bytes())


def read_records(folder: Path) -> list[Any]:
    from gaudi_datasets.detection.sources import RecordSource

    source = RecordSource(folder / "records", "train")
    return [source.read(index) for index in range(len(source))]


def read_sealed_records(folder: Path) -> None:
    require_same("records", repr(read_records(folder)))


_good: dict[str, Any] = {}


def require_same(name: str, content: Any) -> None:
    """Refuse to take a file that has a checksum where it holds something else than the good one, which came first."""
    if _good.setdefault(name, content) != content:
        raise RuntimeError("another content is taken")


def make_checkpoint(folder: Path) -> st.SearchStrategy[bytes]:
    from gaudi_apps.training.checkpoint import CheckpointFolder, RunState, _render

    state = RunState(settings={"seed": 0, "classes": ["red"]}, batch_norm_images=2, refits=((1, 2),))
    tensors = {"conv1/kernel": np.ones([2, 3], np.float32), "step": np.array(4)}
    CheckpointFolder(folder / "run" / "checkpoints").save(4, tensors, state.to_json())
    path = folder / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    signed = mutations.change_json(manifest).map(_render).map(mutations.deepen)
    return signed | signed | mutations.change_bytes(path.read_bytes())


def read_checkpoint(folder: Path) -> None:
    from gaudi_apps.training.checkpoint import CheckpointFolder

    checkpoint = CheckpointFolder(folder / "run" / "checkpoints").load_newest()
    checkpoint.run_state  # noqa: B018 - read
    checkpoint.model_config  # noqa: B018


def make_sealed_checkpoint(folder: Path) -> st.SearchStrategy[bytes]:
    make_checkpoint(folder)
    content = (folder / "run" / "checkpoints" / "step-00000004" / "manifest.json").read_bytes()
    return mutations.of_json(json.loads(content)) | mutations.change_bytes(content)


def make_sealed_tensors(folder: Path) -> st.SearchStrategy[bytes]:
    make_checkpoint(folder)
    content = (folder / "run" / "checkpoints" / "step-00000004" / "state.safetensors").read_bytes()
    return mutations.change_safetensors(content) | mutations.change_bytes(content)


def read_sealed_checkpoint(folder: Path) -> None:
    from gaudi_apps.training.checkpoint import CheckpointFolder

    found = CheckpointFolder(folder / "run" / "checkpoints").load_newest()
    tensors = {name: (value.dtype.str, value.shape, value.tobytes()) for name, value in found.tensors.items()}
    require_same("checkpoint", (found.step, dict(found.metadata), tensors))


def make_run_file(folder: Path) -> st.SearchStrategy[bytes]:
    from gaudi_apps.training.run_dir import RunFolder

    RunFolder(folder / "run").begin({"seed": 0, "data": "x"}, files=("history.jsonl",), folders=("photos",))
    return mutations.of_json(json.loads((folder / "run" / "run.json").read_text()))


def read_run_file(folder: Path) -> None:
    from gaudi_apps.training.run_dir import RunFolder

    run = RunFolder(folder / "run")
    run.read_settings()
    with contextlib.suppress(Exception):
        run.validate({"seed": 0, "data": "x"}, files=("history.jsonl",), folders=("photos",))
    run.register_files(folder / "run" / "new")


def make_history(folder: Path) -> st.SearchStrategy[bytes]:
    rows = [json.dumps({"step": step, "loss": 1 / step, "learning_rate": 0.1}) for step in range(1, 5)]
    (folder / "history.jsonl").write_text("\n".join(rows) + "\n")
    return mutations.of_text("\n".join(rows) + "\n")


def read_history(folder: Path) -> None:
    from gaudi_apps.training.history import read_history as read

    rows = read(folder / "history.jsonl")
    [row for row in rows if row["step"] <= 3]


def tensors() -> dict[str, Any]:
    """Return weights by torchvision's names."""
    generator = np.random.default_rng(0)
    return {
        "conv1.weight": generator.normal(size=[4, 3, 2, 2]).astype(np.float32),
        "bn1.weight": generator.normal(size=[4]).astype(np.float32),
    }


def make_safetensors(folder: Path) -> st.SearchStrategy[bytes]:
    from safetensors.numpy import save

    content = save(tensors())
    (folder / "weights").write_bytes(content)
    return mutations.change_safetensors(content)


def make_npz(folder: Path) -> st.SearchStrategy[bytes]:
    file = io.BytesIO()
    np.savez(file, **tensors())

    def pack(head: bytes) -> bytes:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("conv1.weight.npy", head)
        return packed.getvalue()

    single = io.BytesIO()
    np.save(single, tensors()["bn1.weight"])
    shape = st.sampled_from(("(4,)", "(2**40,)", "(1099511627776,)", "(-1,)", "(4, 0)", "('a',)", "[4]", "(3,)"))
    odd = st.builds(lambda text: single.getvalue().replace(b"(4,)", text.encode(), 1), shape)
    (folder / "weights").write_bytes(file.getvalue())
    changed = mutations.change_bytes(single.getvalue())
    return st.one_of(mutations.change_bytes(file.getvalue()), changed.map(pack), odd.map(pack))


def make_pth(folder: Path) -> st.SearchStrategy[bytes]:
    sys.path.insert(0, str(programs.ROOT))
    assembly = runpy.run_path(str(programs.ROOT / "packages/models/tests/conftest.py"))["Assembly"]()
    torch = runpy.run_path(str(programs.ROOT / "packages/models/tests/test_torch_files.py"))
    described = {
        name: torch["describe_tensor"](assembly, array, str(n)) for n, (name, array) in enumerate(tensors().items())
    }
    storages = {str(n): array.tobytes() for n, array in enumerate(tensors().values())}
    pickled = assembly(described)

    def pack(changed: bytes) -> bytes:
        return bytes(torch["write_archive"](folder / "draft", changed, storages).read_bytes())

    (folder / "weights").write_bytes(pack(pickled))
    return mutations.change_bytes(pickled).map(pack) | mutations.change_bytes(pack(pickled))


def make_h5(folder: Path) -> st.SearchStrategy[bytes]:
    import h5py

    with h5py.File(folder / "weights", "w") as file:
        file["conv1/conv1/kernel:0"] = np.ones([7, 7, 3, 4], np.float32)
        file["bn_conv1/bn_conv1/gamma:0"] = np.ones([4], np.float32)
    return mutations.change_bytes((folder / "weights").read_bytes())


def read_weights(folder: Path) -> None:
    from gaudi_models.weights import read_weights as read

    weights = read(folder / "weights")
    for array in weights.tensors.values():
        np.asarray(array)


FLAGS = "data_dir: records\nmodel_dir: run\nbatch_size: 2\nsteps: 6\nlr_schedule: cosine\ndtype: fp32\n"


def make_config(folder: Path) -> st.SearchStrategy[bytes]:
    (folder / "config.yaml").write_text(FLAGS)
    bomb = "a: &a [x, x]\n" + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{f'*{chr(97 + n)}, ' * 9}x]\n" for n in range(9))
    return mutations.of_text(FLAGS) | mutations.of_text(FLAGS) | st.just(bomb.encode())


def read_config(folder: Path) -> None:
    from gaudi_apps.ssd_train import PROGRAM

    PROGRAM.parse(["--config", str(folder / "config.yaml")])


LIST = "".join(f"- url: http://127.0.0.1/{name}.bin\n  sha256: {name * 64}\n  name: {name}\n" for name in "ab")


def make_list(folder: Path) -> st.SearchStrategy[bytes]:
    (folder / "list.yaml").write_text(LIST)
    return mutations.of_text(LIST)


def read_list(folder: Path) -> None:
    from gaudi_datasets.fetching.file_lists import read_file_list

    read_file_list(folder / "list.yaml", folder)


def make_jpeg(folder: Path) -> st.SearchStrategy[bytes]:
    programs.make_images(folder)
    content = (folder / "photos" / "1.jpg").read_bytes()
    (folder / "image").write_bytes(content)
    return mutations.change_jpeg(content) | mutations.change_bytes(content)


def make_png(folder: Path) -> st.SearchStrategy[bytes]:
    programs.make_images(folder)
    content = (folder / "photos" / "3.png").read_bytes()
    (folder / "image").write_bytes(content)
    return mutations.change_png(content) | mutations.change_bytes(content)


def read_image(folder: Path) -> None:
    from gaudi_datasets.image_files import read_image as read

    read(folder / "image", decode=True)


def make_hosts(folder: Path) -> st.SearchStrategy[bytes]:
    texts = (
        "node1:4,node2:4",
        "a,b,c",
        "[::1]:2,10.0.0.1:2",
        "n[01-03,7],login",
        "2(x3),1",
        "n1 slots=8\nn2 slots=8 # x",
    )
    (folder / "hosts").write_text(texts[0])
    ranges = "n" + "[0-4000]" * 3
    return st.one_of(*(mutations.of_text(text) for text in texts), st.just(ranges.encode()))


def read_hosts(folder: Path) -> None:
    from gaudi_distributed.cluster import hosts
    from gaudi_distributed.errors import ConfigurationError

    text = (folder / "hosts").read_bytes().decode("utf-8", "surrogateescape")
    readers = (
        hosts.parse_hosts,
        lambda each: hosts.parse_hostfile(each, "hosts"),
        hosts.expand_node_list,
        hosts.expand_task_counts,
    )
    for read in readers:
        with refused_by(ConfigurationError):
            read(text)


def make_protocol(folder: Path) -> st.SearchStrategy[bytes]:
    from gaudi_distributed.failure import messages

    known = (
        messages.Hello("t" * 32, 0, "host"),
        messages.State(3, "step", 7),
        messages.Failed(70, "text", True),
        messages.Timeouts(),
        messages.FailureCause(1, "h", 2, "p", 75, "lost"),
    )
    lines = [messages.encode_message(message) for message in known]
    (folder / "line").write_bytes(lines[0])
    return st.one_of(*(mutations.of_json(json.loads(line)) for line in lines))


def read_protocol(folder: Path) -> None:
    from gaudi_distributed.errors import MessageError
    from gaudi_distributed.failure.messages import decode_message

    with contextlib.suppress(MessageError):  # which the coordinator shortens
        decode_message((folder / "line").read_bytes())


@contextlib.contextmanager
def refused_by(kind: type[Exception]) -> Iterator[None]:
    """Take the error of a parser as the refusal that it is."""
    try:
        yield
    except kind as error:
        if len(str(error)) > 2 * LONGEST_TEXT:
            raise RuntimeError(f"a text of {len(str(error))} characters") from error


TARGETS = {
    target.name: target
    for target in (
        Target("coco", "boxes.json", make_coco, read_coco),
        Target("voc", "Annotations/1.xml", make_voc, read_voc),
        Target("yolo", "data.yaml", make_yolo, read_yolo),
        Target("yolo_labels", "labels/train/1.txt", make_yolo_labels, read_yolo),
        Target("manifest", "records/train.json", make_manifest, read_sealed_records),
        Target("shard", "records/train-00000-of-00002.tfrecord", make_sealed_shard, read_sealed_records),
        Target("index", "records/train.index", make_index, read_records),
        Target("records", "records/train-00000-of-00002.tfrecord", make_shard, read_records),
        Target("checkpoint", "run/checkpoints/step-00000004/manifest.json", make_checkpoint, read_checkpoint),
        Target(
            "sealed_checkpoint",
            "run/checkpoints/step-00000004/manifest.json",
            make_sealed_checkpoint,
            read_sealed_checkpoint,
        ),
        Target(
            "sealed_tensors",
            "run/checkpoints/step-00000004/state.safetensors",
            make_sealed_tensors,
            read_sealed_checkpoint,
        ),
        Target("run_file", "run/run.json", make_run_file, read_run_file),
        Target("history", "history.jsonl", make_history, read_history),
        Target("safetensors", "weights", make_safetensors, read_weights),
        Target("npz", "weights", make_npz, read_weights),
        Target("pth", "weights", make_pth, read_weights),
        Target("h5", "weights", make_h5, read_weights),
        Target("config", "config.yaml", make_config, read_config),
        Target("file_list", "list.yaml", make_list, read_list),
        Target("jpeg", "image", make_jpeg, read_image),
        Target("png", "image", make_png, read_image),
        Target("hosts", "hosts", make_hosts, read_hosts),
        Target("protocol", "line", make_protocol, read_protocol),
        Target("coordinator", "lines", members.make_coordinator, members.read_coordinator),
        Target("member", "lines", members.make_member, members.read_member),
    )
}
