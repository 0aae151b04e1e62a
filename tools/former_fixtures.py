"""Write tests/former_version anew by a former version: `python tools/former_fixtures.py CHECKOUT`.

CHECKOUT is a worktree of the former version, whose packages are run in the environment of this Python. Data, runs,
exported models and the figures that the former version finds by them are written. tests/test_former_version.py compares
what the present version finds by the same commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "former_version"
FIGURES = "figures.json"
IMAGES, SIDE = 5, 60
COLOURS = {"blue": (255, 0, 0), "green": (0, 255, 0), "red": (0, 0, 255)}  # BGR
# A run is kept after the former of these, and goes on to the latter.
KEPT_STEPS, ALL_STEPS = 3, 5
# Between the arguments of two runs of a program by one process, as small_programs.py takes them.
THEN = "THEN"
# Files of a run for people's eyes, which are not kept.
LEFT_OUT = ("curves.png", "dataloader", "detections.json", "pictures", "summaries")
_DETECTOR = ("--data_dir", "data/detection", "--batch_size", "2", "--lr_warmup_steps", "2", "--dtype", "fp32")
_CLASSIFIER = ("--data_dir", "data/classification", "--image_size", "32", "--batch_size", "2", "--ema_decay", "0.5")
_MXNET = ("--dataset", "plain", "--coco-root", "data/coco", "--batch-size", "2", "-j", "2", "--log-interval", "1")
# Flags of each program's training, but for the number of steps, and the flag of that.
PROGRAMS: Mapping[str, tuple[Sequence[str], str]] = {
    "ssd_train": ((*_DETECTOR, "--ema_decay", "0.5", "--log_step_count_steps", "1"), "--steps"),
    "resnet_train": (
        (*_CLASSIFIER, "--lr_schedule", "constant", "--base_learning_rate", "3.2", "--log_steps", "1"),
        "--train_steps",
    ),
    "resnext_train": (
        (*_CLASSIFIER, "--no_use_cosine_lr", "--disable_warmup", "--display_steps", "1"),
        "--max_train_steps",
    ),
    "ssd_mxnet_train": (_MXNET, "--steps"),
}
EXPORTS = {"ssd_train": "saved_model", "resnet_train": "onnx"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder; its small_programs.py and README.md are kept."""
    parser = argparse.ArgumentParser(description="Write tests/former_version anew by a former version.")
    parser.add_argument("checkout", type=Path, help="a worktree of the former version")
    parser.add_argument("--only_figures", action="store_true", help="of the data, runs and exports that there are")
    options = parser.parse_args(arguments)
    sources = sorted(options.checkout.resolve().glob("packages/*/src"))
    with tempfile.TemporaryDirectory() as name:
        if not options.only_figures:
            write(Path(name, "new"), sources)
        folder = Path(name, "figures")
        shutil.copytree(FOLDER, folder)
        figures = {program: find_figures(program, folder, sources) for program in PROGRAMS}
        figures["exports"] = find_export_figures(folder / "exports", folder / "data/coco/val/1.png")
    (FOLDER / FIGURES).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def write(folder: Path, sources: Sequence[Path]) -> None:
    """Make data, runs and exports in a folder, and replace those of tests/former_version by them."""
    folder.mkdir()
    shutil.copy(FOLDER / "small_programs.py", folder)
    make_data(folder, sources)
    for program in PROGRAMS:
        run(program, list_training(program, KEPT_STEPS), folder, sources)
        for left_out in LEFT_OUT:
            remove(folder / program / left_out)
        if program in EXPORTS:
            export(program, folder, sources)
    for kept in ("data", "exports", *PROGRAMS):
        remove(FOLDER / kept)
        shutil.copytree(folder / kept, FOLDER / kept)


def find_figures(program: str, folder: Path, sources: Sequence[Path]) -> dict[str, Any]:
    """Evaluate a kept run, let it go on, and return what both find.

    Args:
        program: its name.
        folder: a copy of tests/former_version, in which the run is changed.
        sources: folders of the packages that are run.

    Returns:
        ``evaluation``, the numbers of evaluation.json; ``detections``, sums of them where there are some; ``loss``, of
        each step after the kept ones; ``tensors``, the Euclidean norm of each tensor in the last checkpoint.
    """
    mode, evaluated = "val" if program == "ssd_mxnet_train" else "eval", folder / f"{program}-evaluated"
    shutil.copytree(folder / program, evaluated)
    evaluate = [*PROGRAMS[program][0], "--mode", mode, "--model_dir", evaluated.name]
    run(program, [*evaluate, THEN, *list_training(program, ALL_STEPS)], folder, sources)
    evaluation = json.loads((evaluated / "evaluation.json").read_text(encoding="utf-8"))
    detections = read_detections(evaluated / "detections.json")
    rows = [json.loads(line) for line in (folder / program / "history.jsonl").read_text().splitlines()]
    return {
        "evaluation": {name: value for name, value in evaluation.items() if isinstance(value, int | float)},
        "detections": detections,
        "loss": [row["loss"] for row in rows if row["step"] > KEPT_STEPS],
        "tensors": read_norms(folder / program / "checkpoints" / f"step-{ALL_STEPS:08d}"),
    }


def read_detections(path: Path) -> dict[str, float]:
    """Return the sums of scores and of the sides of boxes in a file of COCO's detections; empty without a file."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    sums = {"score": sum(row["score"] for row in rows)}
    sums |= {f"bbox {place}": sum(row["bbox"][place] for row in rows) for place in range(4)}
    return sums if rows else {}


def read_norms(checkpoint: Path) -> dict[str, float]:
    """Return the Euclidean norm of each tensor of a checkpoint."""
    from safetensors.numpy import load_file

    (file,) = checkpoint.glob("*.safetensors")
    return {name: float(np.linalg.norm(each.astype(np.float64))) for name, each in sorted(load_file(file).items())}


def find_export_figures(exports: Path, image: Path) -> dict[str, dict[str, float]]:
    """Run the exported models on an image; returns the sum of each output, by program and output."""
    import onnxruntime
    import tensorflow as tf

    model = tf.saved_model.load(str(exports / "ssd_train/saved_model"))
    found = model.signatures["serving_default"](encoded=tf.constant([image.read_bytes()]))
    session = onnxruntime.InferenceSession(str(exports / "resnet_train/onnx/model.onnx"))
    (given,) = session.get_inputs()
    pixels = (np.arange(32 * 32 * 3) % 251).astype(np.uint8).reshape(1, 32, 32, 3)
    answers = session.run(None, {given.name: pixels})
    names = [each.name for each in session.get_outputs()]
    return {
        "ssd_train": {name: float(np.sum(np.asarray(each, np.float64))) for name, each in sorted(found.items())},
        "resnet_train": {
            f"{name} {place}": float(value)
            for name, each in zip(names, answers, strict=True)
            for place, value in enumerate(np.ravel(each))
        },
    }


def list_training(program: str, steps: int) -> list[str]:
    """Return the arguments that train up to a number of steps."""
    flags, steps_flag = PROGRAMS[program]
    return [*flags, steps_flag, str(steps), "--model_dir", program]


def export(program: str, folder: Path, sources: Sequence[Path]) -> None:
    """Export the newest checkpoint."""
    words = ["--mode", "export", "--export_format", EXPORTS[program], "--output_dir", f"exports/{program}"]
    run(program, [*PROGRAMS[program][0], "--model_dir", program, *words], folder, sources)


def run(program: str, arguments: Sequence[str], folder: Path, sources: Sequence[Path]) -> None:
    """Run a program with its small network, from within the folder; `THEN` begins the arguments of another run.

    Raises:
        RuntimeError: it failed.
    """
    start([str(folder / "small_programs.py"), program, *arguments], folder, sources)


def start(arguments: Sequence[str], folder: Path, sources: Sequence[Path]) -> None:
    """Run this Python in a folder, with the packages of some sources.

    Raises:
        RuntimeError: it failed.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_data(folder: Path, sources: Sequence[Path]) -> None:
    """Draw the images of both data sets, and write their records."""
    coco, classes = folder / "data/coco", folder / "classes"
    for split in ("train", "val"):
        write_squares(coco, split)
        paths = ["--annotations", f"{coco}/annotations/instances_{split}.json", "--images", f"{coco}/{split}"]
        convert(["coco", *paths, "--split", split], folder / "data/detection", sources)
        write_noise(classes / split, 2)
        convert(
            ["folders", "--folder", f"{classes}/{split}", "--split", split], folder / "data/classification", sources
        )


def convert(arguments: Sequence[str], output: Path, sources: Sequence[Path]) -> None:
    """Write records by gaudi-datasets."""
    words = ["--output_dir", str(output), "--shards", "1", "--processes", "1"]
    start(["-m", "gaudi_datasets", "convert", *arguments, *words], output.parent, sources)


def write_squares(root: Path, split: str) -> None:
    """Write images with a red or a blue square each, and their annotations as COCO's."""
    (root / split).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    numbers = range(1, IMAGES + 1)
    for number in numbers:
        image = np.full((120, 150, 3), 30 * number, np.uint8)
        top = left = 8 * number
        image[top : top + SIDE, left : left + SIDE] = COLOURS["blue" if number % 2 else "red"]
        cv2.imwrite(str(root / split / f"{number}.png"), image)
    document = {
        "images": [{"id": n, "file_name": f"{n}.png", "height": 120, "width": 150} for n in numbers],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 1 + n % 2, "bbox": [8 * n, 8 * n, SIDE, SIDE]} for n in numbers
        ],
        "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}],
    }
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))


def write_noise(root: Path, count: int) -> None:
    """Write images of one colour each, with noise, in a folder for each class."""
    generator = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            noise = generator.integers(-40, 40, (36, 32 + 4 * number, 3))
            pixels = np.rint(np.clip(np.array(colour) * 0.7 + 40 + noise, 0, 255)).astype(np.uint8)
            cv2.imwrite(str(root / name / f"{number}.png"), pixels)


if __name__ == "__main__":
    main()
