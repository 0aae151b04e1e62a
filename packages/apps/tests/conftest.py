"""Share between the tests of this package what takes a while to make: records, and the network."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.detection.coco import Category, read_coco
from gaudi_datasets.detection.records import write_records
from gaudi_distributed.devices.machine import Machine, gather_processor

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat
    from gaudi_apps.detection.detector import SSDTask
    from gaudi_apps.inference.exporter import Export
    from gaudi_apps.runtime.settings import DeviceSettings

SMALL_PROGRAM = Path(__file__).with_name("small_ssd.py")
NUM_IMAGES = 5
SIDE = 60  # of the square in each image, in pixels


@pytest.fixture(scope="session")
def image_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of images 1.png to 5.png, with a red or a blue square each; the grey behind tells them apart."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(1, NUM_IMAGES + 1):
        image = np.full((120, 150, 3), 30 * number, np.uint8)
        top = left = 8 * number
        colour = (255, 0, 0) if number % 2 else (0, 0, 255)
        cv2.rectangle(image, (left, top), (left + SIDE - 1, top + SIDE - 1), colour, cv2.FILLED)
        cv2.imwrite(str(folder / f"{number}.png"), image)
    return folder


@pytest.fixture(scope="session")
def annotation_file(image_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the COCO annotation file of the images."""
    numbers = range(1, NUM_IMAGES + 1)
    document = {
        "images": [{"id": n, "file_name": f"{n}.png", "height": 120, "width": 150} for n in numbers],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 1 + n % 2, "bbox": [8 * n, 8 * n, SIDE, SIDE]} for n in numbers
        ],
        "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}],
    }
    path = tmp_path_factory.mktemp("annotations") / "images.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="session")
def records(image_dir: Path, annotation_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write records of the images, for training and for validation."""
    folder = tmp_path_factory.mktemp("data") / "records"
    for split in ("train", "val"):
        write_records(read_coco(annotation_file), image_dir, folder, split, keep_empty=True)
    return folder


@pytest.fixture(scope="session")
def task() -> SSDTask:
    """Build the smallest network for two classes, as it is at the start; who changes its weights sets them back."""
    from gaudi_apps.detection.detector import SSDTask
    from gaudi_distributed import SingleProcess
    from gaudi_models.architectures import SSDArchitecture
    from gaudi_ops.tf.keras_api import keras

    keras.utils.set_random_seed(0)
    options: dict[str, Any] = {"communicator": SingleProcess(), "architecture": SSDArchitecture("resnet18")}
    return SSDTask(3, keras_policy="float32", weight_decay=5e-4, **options)


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Any]:
    """Make a network that knows the five images by the grey behind and answers with boxes that it was given.

    Call it with a mapping from the number of an image to rows (box_yxyx in 0..1, label, logit).
    """
    import tensorflow as tf

    from gaudi_ops import encode_targets

    def build(answers: dict[int, list[tuple[list[float], int, float]]]) -> Callable[..., Any]:
        logits = np.zeros((NUM_IMAGES + 1, 8732, 3), np.float32)
        offsets = np.zeros((NUM_IMAGES + 1, 8732, 4), np.float32)
        logits[..., 0] = 9
        for number, rows in answers.items():
            boxes, labels, heights = zip(*rows, strict=True)
            # Each box is told apart by its place in the list while it is matched.
            places, offsets[number], _ = encode_targets(np.array(boxes, np.float32), np.arange(1, len(rows) + 1))
            for place, (label, height) in enumerate(zip(labels, heights, strict=True), 1):
                logits[number, places == place] = [0, -9, -9]
                logits[number, places == place, label] = height

        def network(images: Any, training: bool) -> tuple[Any, Any]:
            assert not training
            grey = tf.cast(images[:, -1, 0, 0], tf.float32) * 0.229 + 0.485
            number = tf.cast(tf.round(grey * 255 / 30), tf.int32)
            return tf.gather(logits, number), tf.gather(offsets, number)

        return network

    return build


@pytest.fixture(scope="session")
def truth() -> dict[int, list[tuple[list[float], int, float]]]:
    """Answers of the oracle that are right: blue in the odd images, red in the even ones."""
    return {
        n: [([8 * n / 120, 8 * n / 150, (8 * n + SIDE) / 120, (8 * n + SIDE) / 150], 1 + n % 2, 6.0)]
        for n in range(1, NUM_IMAGES + 1)
    }


@pytest.fixture(scope="session")
def noise_images() -> list[bytes]:
    """Three encoded images of noise: unlike flat ones they give no two detections the same score."""
    generator = np.random.default_rng(0)
    image_dir = [generator.integers(0, 256, (120, 150, 3), np.uint8) for _ in range(3)]
    return [cv2.imencode(".png", image)[1].tobytes() for image in image_dir]


def build_detector() -> Any:
    """Build the smallest network, of two classes, with random weights that find many things, by different scores."""
    from gaudi_models.ssd import build_ssd
    from gaudi_ops.tf.keras_api import keras

    keras.utils.set_random_seed(1)
    network = build_ssd(3, depth=18)
    for variable in network.variables:
        if "class_head" in variable.name and "kernel" in variable.name:
            variable.assign(0.3 * variable)
        if "class_head" in variable.name and "bias" in variable.name:
            variable.assign(np.tile([3.0, 0.0, 0.0], variable.shape[0] // 3))
    return network


@pytest.fixture(scope="session")
def detector_network() -> Any:
    """Make a small network of two classes whose random weights find many things in an image, by different scores."""
    return build_detector()


@pytest.fixture(scope="session")
def narrow_network() -> Any:
    """Make the same with a quarter of the channels of each layer, for what runs it many times."""
    from gaudi_models import architectures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gaudi_models.resnet.STEM_FILTERS", 16)
        patch.setattr("gaudi_models.resnet.STAGE_FILTERS", (16, 32, 64, 128))
        levels = [(inner // 4, outer // 4, *rest) for inner, outer, *rest in architectures.SSD_EXTRA_LEVELS]
        patch.setattr(architectures, "SSD_EXTRA_LEVELS", tuple(levels))
        return build_detector()


@pytest.fixture(scope="module")
def timed_images() -> Iterator[None]:
    """Time a batch of two images: what sixteen take is of no interest here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gaudi_apps.inference.evaluator.TIMED_BATCH", 2)
        yield


@pytest.fixture(scope="session")
def detector_exports(
    narrow_network: Any, noise_images: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, Export]:
    """Export that network in four formats, by their folders, as of step 12; no test changes them."""
    from gaudi_apps.detection.detector import run_export
    from gaudi_apps.inference.exporter import ExportRequest
    from gaudi_models.architectures import SSDArchitecture

    folder = tmp_path_factory.mktemp("exported") / "new" / "export"
    formats: tuple[ExportFormat, ...] = ("saved_model", "tflite", "safetensors", "onnx")
    where: dict[str, Any] = {"step": 12, "architecture": SSDArchitecture("resnet18"), "pool_padding": "same"}
    request = ExportRequest(checkpoint="ab12")
    categories = [Category(7, "red"), Category(9, "blue")]
    return run_export(narrow_network, categories, noise_images, folder, formats, **where, request=request)


@pytest.fixture(scope="session")
def small_network() -> Callable[..., Any]:
    """`build_small_ssd` of small_ssd.py, which is no module that a test could import."""
    build: Callable[..., Any] = runpy.run_path(str(SMALL_PROGRAM))["build_small_ssd"]
    return build


@dataclass(frozen=True)
class Done:
    """Hold the exit status of a program, its output, and the error that ended it."""

    status: int
    out: str
    err: str
    error: Any = None


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Call the `main` of a program with arguments."""

    def run(main: Callable[..., None], argv: Sequence[object]) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*map(str, argv)])
        out, err = capsys.readouterr()
        return Done(int(end.value.code or 0), out, err, end.value.__context__)

    return run


@pytest.fixture
def ssd_train(
    small_network: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, run_main: Callable[..., Done]
) -> Callable[..., Done]:
    """Run the program within this process, with the small network: TensorFlow has started already."""
    from gaudi_apps import ssd_train as program
    from gaudi_distributed import Precision
    from gaudi_ops.tf.keras_api import keras

    def start_tensorflow(settings: DeviceSettings) -> Precision:
        keras.utils.set_random_seed(settings.seed)
        return Precision("fp32", "float32")

    monkeypatch.setattr("gaudi_apps.runtime.tensorflow.start_tensorflow", start_tensorflow)
    monkeypatch.setattr("gaudi_apps.detection.detector.build_ssd", small_network)

    return lambda *argv: run_main(program.main, argv)


@pytest.fixture(scope="session")
def bf16_kernels() -> None:
    """Skip a test where TensorFlow adds values of bfloat16 in bfloat16: on processors without AVX-512."""
    if "avx512bw" not in gather_processor(Machine(), os.sched_getaffinity(0)).flags:
        pytest.skip("TensorFlow's sums in bfloat16 need AVX-512, which this processor lacks")


@pytest.fixture
def write_turned_split() -> Callable[[Path, str], None]:
    """Write a split of COCO with one image, which EXIF turns; that of train tells by its size how boxes were drawn."""

    def write(root: Path, split: str) -> None:
        marks = Image.Exif()
        marks[0x0112] = {"train": 6, "val": 3}[split]  # the orientation
        (root / split).mkdir()
        (root / "annotations").mkdir(exist_ok=True)
        Image.new("RGB", (80, 60)).save(root / split / "a.jpg", exif=marks)
        document = {
            "images": [{"id": 1, "file_name": "a.jpg", "height": 60, "width": 80}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [8, 6, 20, 12]}],
            "categories": [{"id": 1, "name": "light"}],
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))

    return write
