"""The programs that are disturbed, each with small inputs, and what of their results must never differ."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import importlib.util
import io
import json
import os
import random
import re
import runpy
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from tests.torture import serving

ROOT = Path(__file__).resolve().parents[2]
APPS = ROOT / "packages" / "apps" / "tests"
NUM_IMAGES = 6

Results = dict[str, Any]
"""JSON values by name; those of two runs are equal or something is wrong."""


@dataclass(frozen=True)
class Program:
    """A program with a command line.

    Attributes:
        name: in the report.
        main: runs it with arguments.
        argv: the arguments; paths are relative to its folder.
        make: writes its inputs into a folder that it makes; another seed gives others.
        collect: reads its results.
        inputs, outputs: files and folders, relative to its folder; outputs are there only once it has run.
        modules: imported before it is forked.
        weight: how often it is drawn; quick programs are drawn more often.
        minutes: only in runs of at least this length.
        needs: a package that is not everywhere.
        saves: it saves what it has done when a signal ends it, a hangup, too.
        memory: MiB of addresses that its children add, which are not measured.
    """

    name: str
    main: Callable[[Sequence[str]], None]
    argv: tuple[str, ...]
    make: Callable[[Path, int], None]
    collect: Callable[[Path], Results]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    modules: tuple[str, ...] = ()
    weight: int = 1
    minutes: float = 0
    saves: bool = False
    needs: str = ""
    memory: int = 0


def make_images(folder: Path, seed: int = 0) -> None:
    """Write `photos` (JPEG and PNG, with a coloured square each) and `boxes.json`, its COCO annotations."""
    generator = np.random.default_rng(seed)
    photos = folder / "photos"
    photos.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in range(1, NUM_IMAGES + 1):
        pixels = generator.integers(0, 120, (60, 75, 3), np.uint8)
        colour = (255, 0, 0) if number % 2 else (0, 0, 255)
        cv2.rectangle(pixels, (4 * number, 4 * number), (4 * number + 29, 4 * number + 29), colour, cv2.FILLED)
        name = f"{number}.{'png' if number % 3 == 0 else 'jpg'}"
        cv2.imwrite(str(photos / name), pixels)
        images.append({"id": number, "file_name": name, "height": 60, "width": 75})
        box = [4 * number, 4 * number, 30, 30]
        annotations.append({"id": number, "image_id": number, "category_id": 1 + number % 2, "bbox": box})
    document = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}],
    }
    (folder / "boxes.json").write_text(json.dumps(document))


def make_records(folder: Path, seed: int = 0) -> None:
    """Write `records` of such images, for training and validation, and keep `photos`."""
    from gaudi_datasets.detection.coco import read_coco
    from gaudi_datasets.detection.records import write_records

    make_images(folder, seed)
    for split in ("train", "val"):
        annotations = read_coco(folder / "boxes.json")
        write_records(annotations, folder / "photos", folder / "records", split, keep_empty=True, shards=2)


def make_classes(folder: Path, seed: int = 0) -> None:
    """Write `classes`: folders train and validation of two classes."""
    generator = np.random.default_rng(seed)
    for split, count in (("train", 4), ("validation", 2)):
        for name, colour in {"blue": (255, 0, 0), "red": (0, 0, 255)}.items():
            (folder / "classes" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(np.array(colour) * 0.6 + generator.integers(0, 90, (36, 40, 3)), 0, 255)
                cv2.imwrite(str(folder / "classes" / split / name / f"{number}.png"), pixels.astype(np.uint8))


def hash_files(folder: Path, *patterns: str) -> dict[str, str]:
    """Return the SHA-256 of each file that one of the patterns finds, by its path in the folder."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def list_leftovers(folder: Path) -> list[str]:
    """List what a program should have removed: drafts and parts of files, and locks."""
    marks = (".unfinished", ".tmp", ".part", ".lock")
    return sorted({str(path.relative_to(folder)) for path in folder.rglob("*") if any(m in path.name for m in marks)})


def read_json(path: Path, *without: str) -> Any:
    """Read a JSON file, of an object without some names; None where there is none."""
    if not path.exists():
        return None
    value = json.loads(path.read_text(encoding="utf-8"))
    return {name: each for name, each in value.items() if name not in without} if isinstance(value, dict) else value


def read_lines(path: Path) -> list[Any]:
    """Read a file of JSON lines; one that is damaged is taken as a text."""
    return [_read_line(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _read_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line.decode(errors="backslashreplace")


def collect_records(folder: Path) -> Results:
    """Read what a conversion left: the shards' contents, and the manifest but for the job's identity."""
    manifest = read_json(folder / "out" / "train.json", "job")
    return {"files": hash_files(folder, "out/train-*"), "manifest": manifest, "left": list_leftovers(folder)}


def collect_run(folder: Path) -> Results:
    """Read what a training left: weights, losses, scores, settings and the names of all files."""
    run, order = folder / "run", folder.with_name(f"{folder.name}.order")
    rows = {name: read_lines(run / name) for name in ("history.jsonl", "evaluations.jsonl")}
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {
        "weights": hash_files(run, "checkpoints/*/state.safetensors", "best/*/state.safetensors"),
        "rows": rows,
        "scores": read_json(run / "evaluation.json", "seconds", "images_per_second"),
        "detections": hash_files(run, "detections.json"),
        "settings": (read_json(run / "run.json") or {}).get("settings"),
        "names": sorted(name for name in names if "events.out" not in name),
        "images": sorted(set(order.read_text().splitlines())) if order.exists() else [],
        "left": list_leftovers(folder),
    }


def collect_files(folder: Path) -> Results:
    """Read what a program left in `out`."""
    return {"files": hash_files(folder, "out/**/*"), "left": list_leftovers(folder)}


def collect_predictions(folder: Path) -> Results:
    """Read what a prediction left, without the settings that it remembers."""
    files = hash_files(folder, "out/[!.]*")
    return {"files": files, "left": list_leftovers(folder)}


def run_datasets(argv: Sequence[str]) -> None:
    """Run gaudi-datasets."""
    from gaudi_datasets import cli

    sys.argv = ["gaudi-datasets", *argv]
    cli.main()


def watch_images() -> None:
    """Have a training write beside its folder which images each step takes, so that another sequence is seen."""
    from gaudi_apps.training.trainer import Trainer

    fit = Trainer.fit
    path = Path.cwd().with_name(f"{Path.cwd().name}.order")

    def watched(self: Any) -> int:
        batches = self.data.batches

        def note(first: int) -> Iterator[Any]:
            for step, batch in enumerate(batches(first), first + 1):
                with path.open("a") as file:
                    file.write(f"{step} {np.asarray(batch['image_ids']).ravel().tolist()}\n")
                yield batch

        self.data = dataclasses.replace(self.data, batches=note)
        return fit(self)

    setattr(Trainer, "fit", watched)  # noqa: B010 - mypy lets no method be assigned


def run_ssd(argv: Sequence[str]) -> None:
    """Run ssd_train with a network that costs next to nothing."""
    import gaudi_models.ssd
    from gaudi_apps import ssd_train

    watch_images()
    small = runpy.run_path(str(APPS / "small_ssd.py"))["build_small_ssd"]
    serving.exchange_network(gaudi_models.ssd.build_ssd, small)
    ssd_train.main([*argv])


def run_resnet(argv: Sequence[str]) -> None:
    """Run resnet_train with such a network."""
    import gaudi_models.classifiers
    from gaudi_apps import resnet_train

    watch_images()
    small = runpy.run_path(str(APPS / "classification" / "conftest.py"))["build_small_classifier"]
    serving.exchange_network(gaudi_models.classifiers.build_classifier, small)
    resnet_train.main([*argv])


def make_run(folder: Path, seed: int = 0) -> None:
    """Write `run`, a training of one step, with its data. Call it in a process of its own."""
    make_records(folder, seed)
    _train(run_ssd, folder, *SSD_FLAGS, "--steps", "1", "--no_evaluate", "--seed", str(seed))


def make_served(folder: Path, seed: int = 0) -> None:
    """Write `run/model.safetensors`, and `photos`."""
    make_images(folder, seed)
    serving.make_weights(folder / "run" / "model.safetensors")


def make_class_run(folder: Path, seed: int = 0) -> None:
    """Write `run`, a training of a classifier, with its data. Call it in a process of its own."""
    make_classes(folder, seed)
    _train(run_resnet, folder, *RESNET_FLAGS, "--train_epochs", "1", "--skip_eval", "--seed", str(seed))


def _train(run: Callable[[Sequence[str]], None], folder: Path, *flags: str) -> None:
    os.chdir(folder)
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            run(flags)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{folder}: cannot be trained:\n{text.getvalue()}") from None


def make_server(folder: Path, seed: int = 0) -> None:
    """Write `served`, and `list.yaml` with the addresses of its files on the server of this run."""
    generator = np.random.default_rng(seed)
    served = Path(os.environ[SERVED]) / str(seed)
    served.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, size in (("a.bin", 150_000), ("b.bin", 10), ("c.bin", 40_000)):
        content = generator.bytes(size)
        (served / name).write_bytes(content)
        url = f"http://127.0.0.1:{os.environ[PORT]}/{seed}/{name}"
        lines.append(f"- url: {url}\n  sha256: {hashlib.sha256(content).hexdigest()}\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "list.yaml").write_text("".join(lines))


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves files, from the byte that is asked for."""

    def do_GET(self) -> None:
        path = Path(os.environ[SERVED]) / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(found[1]) if found else 0
        if found and first >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()[:8]}"')
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content[first:])

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def serve(folder: Path) -> int:
    """Serve a folder on the loopback from a process of its own; return its id."""
    os.environ[SERVED] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler)
    os.environ[PORT] = str(server.server_port)
    pid = os.fork()
    if not pid:
        server.serve_forever()
    server.server_close()
    return pid


def run_mxnet(argv: Sequence[str]) -> None:
    """Run ssd_mxnet_train with a network that costs next to nothing."""
    import gaudi_models.mxnet.ssd
    from gaudi_apps import ssd_mxnet_train

    watch_images()
    small = runpy.run_path(str(APPS / "small_ssd_mxnet.py"))["build_small_ssd"]
    serving.exchange_network(gaudi_models.mxnet.ssd.build_ssd, small)
    ssd_mxnet_train.main([*argv])


def find_two_ports() -> int:
    """Return the first of two ports that nothing listens at, drawn from those that no connection is given."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port


def run_ranks(argv: Sequence[str]) -> None:
    """Run gaudi-run with two ranks of ssd_train, which are processes of their own."""
    from gaudi_distributed.launch import cli

    port = find_two_ports()
    spread = (
        *("--np", "2", "--backend", "multi_worker", "--cores_per_rank", "0", "--first_port", str(port)),
        *("--forward", "TORTURE"),
    )
    cli.main([*spread, "--", sys.executable, str(APPS / "small_ssd.py"), *argv])


SERVED, PORT = "TORTURE_SERVED", "TORTURE_PORT"
SSD_FLAGS = (
    *("--data_dir", "records", "--model_dir", "run", "--batch_size", "4", "--steps", "6", "--dtype", "fp32"),
    *("--lr_warmup_steps", "2", "--save_checkpoints_steps", "2", "--deterministic"),
)
RESNET_FLAGS = (
    *("--data_dir", "classes", "--model_dir", "run", "--image_size", "32", "--batch_size", "4", "--dtype", "fp32"),
    *("--lr_schedule", "constant", "--base_learning_rate", "0.1", "--log_steps", "1", "--train_epochs", "2"),
    *("--deterministic",),
)
TENSORFLOW = (
    *("tensorflow", "gaudi_ops.tf.keras_api", "gaudi_apps.training.run", "gaudi_apps.runtime.session"),
    *("gaudi_models.ssd", "gaudi_models.classifiers", "gaudi_apps.detection.detector"),
)

PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "convert",
            run_datasets,
            (
                *("convert", "coco", "--annotations", "boxes.json", "--images", "photos", "--output_dir", "out"),
                *("--split", "train", "--shards", "2", "--processes", "1", "--decode"),
            ),
            make_images,
            collect_records,
            ("photos", "boxes.json"),
            ("out",),
            ("gaudi_datasets.cli", "gaudi_datasets.detection.records", "gaudi_datasets.detection.coco"),
            weight=8,
        ),
        Program(
            "ssd",
            run_ssd,
            SSD_FLAGS,
            make_records,
            collect_run,
            ("records",),
            ("run",),
            (*TENSORFLOW, "gaudi_apps.ssd_train", "gaudi_apps.detection.application"),
            saves=True,
        ),
        Program(
            "resnet",
            run_resnet,
            RESNET_FLAGS,
            make_classes,
            collect_run,
            ("classes",),
            ("run",),
            (*TENSORFLOW, "gaudi_apps.resnet_train", "gaudi_apps.classification.application"),
            saves=True,
        ),
        Program(
            "fetch",
            run_datasets,
            ("fetch", "files", "--list", "list.yaml", "--output_dir", "out"),
            make_server,
            collect_files,
            ("list.yaml",),
            ("out",),
            ("gaudi_datasets.cli", "gaudi_datasets.fetching.file_lists", "requests"),
            weight=4,
        ),
        Program(
            "predict",
            run_ssd,
            ("--mode", "predict", "--model_dir", "run", "--inference", "photos", "--output_dir", "out"),
            make_run,
            collect_predictions,
            ("run", "photos"),
            ("out",),
            (*TENSORFLOW, "gaudi_apps.ssd_train", "gaudi_apps.detection.application"),
            weight=2,
        ),
        Program(
            "serve",
            serving.run_serve,
            ("serve", "--model_dir", "run/model.safetensors", "--score_threshold", "0.05", "--timeout_s", "60"),
            make_served,
            collect_files,
            ("run", "photos"),
            ("out",),
            (*TENSORFLOW, "gaudi_apps.cli.run_commands", "gaudi_apps.inference.serving.server"),
            memory=1000,
        ),
        Program(
            "export",
            run_resnet,
            (
                *("--mode", "export", "--model_dir", "run", "--export_format", "safetensors", "--output_dir", "out"),
                *("--image_size", "32"),
            ),
            make_class_run,
            collect_files,
            ("run", "classes"),
            ("out",),
            (*TENSORFLOW, "gaudi_apps.resnet_train", "gaudi_apps.classification.application"),
        ),
        Program(
            "mxnet",
            run_mxnet,
            (
                *("--data_dir", "records", "--model_dir", "run", "--batch-size", "2", "--steps", "4"),
                *("--save_checkpoints_steps", "2", "--log-interval", "1", "-j", "1"),
            ),
            make_records,
            collect_run,
            ("records",),
            ("run",),
            ("mxnet", "gaudi_apps.ssd_mxnet_train"),
            needs="mxnet",
            minutes=10,
            saves=True,
        ),
        Program(
            "ranks",
            run_ranks,
            (*SSD_FLAGS, "--distribution_strategy", "multi_worker"),
            make_records,
            collect_run,
            ("records",),
            ("run",),
            minutes=10,
            saves=True,
        ),
    )
}


def list_programs(minutes: float) -> list[str]:
    """List the programs that a run of so many minutes disturbs, of those that can be run here."""
    found = (each for each in PROGRAMS.values() if not each.needs or importlib.util.find_spec(each.needs))
    return [program.name for program in found if minutes >= program.minutes]


def import_modules(names: Sequence[str]) -> None:
    """Import what programs take long to import."""
    for name in names:
        for module in PROGRAMS[name].modules:
            importlib.import_module(module)
