"""Share a server, and runs whose report is tested: one with names that break out of pages, and a large one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml

from gaudi_apps.detection.evaluator import DetectionEvaluator
from gaudi_apps.training.run_dir import RunFolder
from gaudi_datasets.detection.coco import parse_coco
from gaudi_datasets.detection.scoring import score_detections
from gaudi_datasets.detection.sources import CocoSource, ground_truth
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess

HOSTILE = [
    "<script>alert(1)</script>",
    "\" onmouseover='alert(2)' x=\"",
    "{{ 7 * 7 }}</title></svg></script><img src=x onerror=alert(3)>",
    "\u202egnp.exe\nsecond line\x1b[31m",
    "\u05e9\u05dc\u05d5\u05dd https://example.com/a.js",
    "long " * 300,
]


def write_run(
    folder: Path, *, images: int, names: list[str], files: list[str], drawn: bool = True, seed: int = 0
) -> Path:
    """Write the files of a run of a detector that was evaluated on squares, some of them drawn into image files.

    Args:
        folder: of the run; beside it, the images.
        images: number of images.
        names: of the classes.
        files: names of the image files, used again and again with a number before them.
        drawn: whether the image files are there, and so the images with the most errors.
        seed: of the boxes and detections.
    """
    generator = np.random.default_rng(seed)
    image_dir = folder.parent / f"{folder.name}-images"
    image_dir.mkdir(parents=True)
    annotations: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    file_names = [f"{n} {files[n % len(files)]}"[:200].replace("/", "|") + ".png" for n in range(images)]
    for image_id, file_name in enumerate(file_names, 1):
        pixels = generator.integers(0, 255, (60, 80, 3), np.uint8)
        if drawn:
            content = cv2.imencode(".png", cv2.resize(pixels, (320, 240), interpolation=cv2.INTER_NEAREST))[1]
            (image_dir / file_name).write_bytes(content.tobytes())
        for _ in range(7):
            box = [*map(float, generator.uniform(0, 200, 2)), *map(float, generator.uniform(20, 40, 2))]
            category_id = int(generator.integers(1, len(names) + 1))
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image_id, "category_id": category_id, "bbox": box}
            )
            if generator.random() < 0.8:
                moved = [box[0] + float(generator.normal(0, 3)), *box[1:]]
                taken = category_id if generator.random() < 0.9 else int(generator.integers(1, len(names) + 1))
                score = float(np.clip(generator.normal(0.7, 0.2), 0.05, 0.99))
                detections.append({"image_id": image_id, "category_id": taken, "bbox": moved, "score": score})
    document = {
        "images": [{"id": n, "file_name": name, "height": 240, "width": 320} for n, name in enumerate(file_names, 1)],
        "annotations": annotations,
        "categories": [{"id": n, "name": name} for n, name in enumerate(names, 1)],
    }
    flags = {"model_dir": str(folder), "batch_size": 2, "callbacks": [names[0]], "base_lr": 0.01 * (seed + 1)}
    run = RunFolder(folder)
    run.begin({"data": "x"}, files=("report.html",), folders=())
    (folder / "config.yaml").write_text(yaml.safe_dump(flags), encoding="utf-8")
    environment = {"Device": "CPU, fp32", "Versions": names[0]}
    start = {"command": ["ssd_train", "--model_dir", names[0]], "seconds": 61.0, "images_per_second": 9.5}
    plan = {"total_steps": 30, "global_batch": 2, "epochs": 3.0, "lr_schedule": "cosine"}
    plan |= {"peak_learning_rate": 0.01, "warmup_steps": 2}
    log: dict[str, Any] = {"program": "ssd_train", "plan": plan, "data": {"images": 20, "classes": len(names)}}
    log["starts"] = [{**start, "environment": environment}]
    (folder / "run_log.json").write_text(json.dumps(log), encoding="utf-8")
    history = [{"step": n, "loss": 9 / n, "class_loss": 6 / n, "learning_rate": 0.01} for n in range(1, 31)]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    evaluations = [{"step": 10 * n, "AP": 0.2 * n, "AP50": 0.3 * n} for n in (1, 2, 3)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    if drawn:
        source = CocoSource(parse_coco(document, folder), image_dir, keep_empty=True)
        evaluator = DetectionEvaluator(source, InputOptions(2), run, source.categories, SingleProcess())
        evaluator.write((score_detections(ground_truth(source), detections), detections), 30)
    else:
        write_evaluation_alone(folder, document, detections)
    return folder


def write_evaluation_alone(folder: Path, truth: dict[str, Any], detections: list[dict[str, Any]]) -> None:
    """Write what an evaluation leaves, with images of noise as large as they may be in place of those with errors."""
    from gaudi_apps.detection.error_analysis import analyse
    from gaudi_apps.inference.report_sections import MAX_IMAGE_BYTES
    from gaudi_apps.training.run_dir import write_analysis

    (folder / "pictures").mkdir()
    analysis, errors = analyse(truth, detections, [image["id"] for image in truth["images"]])
    noise = np.random.default_rng(0).integers(0, 255, (240, 320, 3), np.uint8)
    jpeg = cv2.imencode(".jpg", noise, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
    worst = sorted(errors, key=lambda image_id: -sum(errors[image_id]))[:24]
    rows = []
    for image_id in worst:
        name = f"pictures/worst-{image_id}.jpg"
        (folder / name).write_bytes(jpeg.ljust(MAX_IMAGE_BYTES, b"\0"))
        alarms, misses = errors[image_id]
        rows.append({"image_id": image_id, "file_name": f"{image_id}.jpg", "hits": 3, "image": name})
        rows[-1] |= {"false_alarms": alarms, "misses": misses}
    write_analysis(folder, {"kind": "detection", "step": 30, **analysis, "worst": rows})
    scores = {"step": 30, **score_detections(truth, detections).as_json()}
    (folder / "evaluation.json").write_text(json.dumps(scores), encoding="utf-8")


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `write_run` with a folder of its own for each call."""

    def make(**options: Any) -> Path:
        return write_run(tmp_path_factory.mktemp("reports") / "cells", **options)

    return make


@pytest.fixture(scope="session")
def hostile_run(make_run: Callable[..., Path]) -> Path:
    """Make a run whose classes, image files, command and versions have names that try to break out of a page."""
    return make_run(images=6, names=HOSTILE, files=HOSTILE)


@pytest.fixture(scope="session")
def large_run(make_run: Callable[..., Path]) -> Path:
    """Make a run that was evaluated on 5000 images of 80 classes."""
    names = [f"class {n}" for n in range(80)]
    return make_run(images=5000, names=names, files=["a"], drawn=False)


class Handler(BaseHTTPRequestHandler):
    """Serve the pages of the server: the type of a content and its bytes, or a function that writes them."""

    def do_GET(self) -> None:
        kind, content = self.server.pages.get(self.path, ("", None))  # type: ignore[attr-defined]
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if isinstance(content, bytes):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        try:
            if callable(content):
                content(self.wfile.write)
            else:
                self.wfile.write(content)
        except OSError:
            pass  # the client has left

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def pages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Serve pages on this machine; give the address of the server and its pages by path."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.pages = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", server.pages  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()
