"""YOLOv8n from ultralytics at 320 pixels, from random weights.

Recipe ``defaults`` is its own: it adds up the gradients of 64 images for an update, and its warm-up is of three epochs.
``updates`` makes one of every 4 images, after a warm-up of half an epoch.
Its yolov8n.yaml has no weights, and nothing is fetched. It validates after its last epoch alone, where by default it
does after each; so its time is for training. Runs where there is ultralytics, and nothing of this project. Usage:
python ultralytics_yolo.py train|detect --data DATA --output FOLDER --recipe defaults|updates [--epochs N] [--seed N]
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from program import BEGINS, parse, read_category_ids, to_records, write_detections  # type: ignore[import-not-found]

SIDE = 320
RECIPES: dict[str, dict[str, Any]] = {
    "defaults": {"batch": 16},
    "updates": {"batch": 4, "nbs": 4, "warmup_epochs": 0.5},
}


def prepare(output: Path) -> None:
    """Keep ultralytics from the network, and its settings in the folder; before it is imported."""
    settings = output / "settings"
    settings.mkdir(parents=True, exist_ok=True)
    os.environ |= {"YOLO_CONFIG_DIR": str(settings), "YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    import matplotlib as mpl

    # It would fetch this font, to draw with, if it were not there.
    for folder in (settings, settings / "Ultralytics"):
        folder.mkdir(exist_ok=True)
        shutil.copy(Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", folder / "Arial.ttf")


def train(data: Path, output: Path, epochs: int, seed: int, recipe: str) -> None:
    """Train for some epochs; the best weights are in ``run/weights/best.pt``."""
    from ultralytics import YOLO  # type: ignore[import-not-found]

    model = YOLO("yolov8n.yaml")
    model.add_callback("on_train_start", lambda _: print(BEGINS, flush=True))
    model.add_callback("on_train_epoch_end", lambda trainer: print(f"epoch {trainer.epoch + 1}/{epochs}", flush=True))
    model.train(
        data=str(data / "data.yaml"), imgsz=SIDE, epochs=epochs, seed=seed, pretrained=False, val=False, cache="ram",
        workers=0, device="cpu", plots=False, verbose=False, project=str(output.resolve()), name="run", exist_ok=True,
        **RECIPES[recipe],
    )  # fmt: skip


def detect(data: Path, output: Path) -> None:
    """Detect on the test images by the program's own evaluation, which looks at all scores from .001 on."""
    from ultralytics import YOLO

    model = YOLO(output / "run" / "weights" / "best.pt")
    numbers: list[int] = []  # of the classes in predictions.json, which depend on the release
    model.add_callback("on_val_end", lambda validator: numbers.extend(validator.class_map))
    model.val(
        data=str(data / "data.yaml"), split="test", imgsz=SIDE, batch=16, workers=0, device="cpu", plots=False,
        save_json=True, project=str(output.resolve()), name="test", exist_ok=True, verbose=False,
    )  # fmt: skip
    found = json.loads((output / "test" / "predictions.json").read_text(encoding="utf-8"))
    category_ids, by_image = read_category_ids(data), dict[int, list[Any]]()
    for one in found:
        by_image.setdefault(int(one["image_id"]), []).append(one)  # the name of its file, which is the id
    records = []
    for image_id, rows in by_image.items():
        boxes = [[x, y, x + width, y + height] for x, y, width, height in (row["bbox"] for row in rows)]
        ids = [category_ids[numbers.index(row["category_id"])] for row in rows]
        records += to_records(image_id, boxes, ids, [row["score"] for row in rows])
    write_detections(output / "detections.json", records)


def main() -> None:
    """Train or detect, as the command line says."""
    options = parse(__doc__, tuple(RECIPES))
    prepare(options.output.resolve())
    if options.mode == "train":
        train(options.data, options.output, options.epochs, options.seed, options.recipe)
    else:
        detect(options.data, options.output)


if __name__ == "__main__":
    main()
