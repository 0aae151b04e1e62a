"""Give ssd_mxnet_train its data, plan, network, evaluation, callbacks and export."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from gaudi_apps.detection.config import COCO_TRAIN_IMAGES
from gaudi_apps.detection.data import open_files
from gaudi_apps.detection.detections import make_category_config, read_categories
from gaudi_apps.inference.media import Preprocessor
from gaudi_apps.inference.visualizer import Image
from gaudi_apps.mxnet.config import SSDMXNetConfig, find_profiled_steps
from gaudi_apps.mxnet.evaluation import AsyncEvaluation, MXNetEvaluator
from gaudi_apps.mxnet.framework import MXNet
from gaudi_apps.mxnet.plan import find_coco_files, make_plan
from gaudi_apps.runtime.settings import DeviceSettings, Distribution, RunSettings, make_run_settings
from gaudi_apps.training.application import Application, ReduceStatistics, Restored, check_source, keep_if_it_fits
from gaudi_apps.training.callbacks import Checkpoints, Evaluation, Heartbeat
from gaudi_apps.training.checkpoint import ModelConfig
from gaudi_apps.training.history import History
from gaudi_apps.training.plan import Plan
from gaudi_apps.training.trainer import Batches, Callback, TrainableTask, TrainingData
from gaudi_datasets.detection.batches import Layout, prepare_pixels
from gaudi_datasets.detection.coco import COCO_CATEGORIES
from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.fetching.stores import find_copy
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import Communicator, SingleProcess
from gaudi_distributed.cluster.rendezvous import CYCLE_VARIABLE
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.training.run_dir import RunFolder
    from gaudi_datasets.detection.sources import DetectionSource
    from gaudi_models.weights import WeightsFile


MLPERF_LOG = "mlperf.log"


class SSDMXNetApplication(Application):
    """Train and use SSD-ResNet34 in MXNet.

    Raises:
        MissingExtraError: --mlperf is given, and MLPerf's package is not installed.
    """

    program = ("-m", "gaudi_apps.ssd_mxnet_train")
    files: ClassVar = ("evaluation.json", "detections.json", MLPERF_LOG)
    folders: ClassVar = ("pictures",)
    checks_exports = False
    config: SSDMXNetConfig

    def __init__(self, config: SSDMXNetConfig, distribution: Distribution) -> None:
        self.config = config
        self.settings = make_settings(config, distribution)
        self._mxnet = MXNet(config)
        self.framework = self._mxnet
        self._started, self._num_scored = time.time(), 0
        if config.mlperf.mlperf:
            from gaudi_apps.mxnet.mlperf import load_mllog

            load_mllog()

    @property
    def rate_needs_length(self) -> bool:
        """Return False: the rate of a step does not depend on the length of the run."""
        return False

    def open_training_data(self) -> TrainingData:
        """Open files, records or random images."""
        # The weights depend on what the device chose for "auto".
        device = replace(self.config.device, precision=self._mxnet.precision, data_layout=self._mxnet.layout)
        self.config = replace(self.config, device=device)
        return open_training_data(self.config, self.settings, self._mxnet.layout)

    def find_data(self, mode: str) -> None:
        """Find the records or files that are trained or evaluated on."""
        from gaudi_datasets.records.record_sets import has_records

        data = self.config.data
        split: Split = "val" if mode == "eval" else "train"
        if data.data_dir is None and data.coco_root is not None:
            for path in find_coco_files(data.coco_root, data.dataset, split):
                if not path.exists():
                    remedy = "correct --coco_root or --dataset"
                    raise MissingInputError("there is no such file or folder", path=path, remedy=remedy)
        elif data.data_dir is not None and not has_records(data.data_dir, split):
            open_source(self.config, split)  # which says what is there

    def make_plan(self, num_images: int) -> Plan:
        """Plan by the flags; --num_examples_per_epoch replaces the number of images."""
        workers = self.settings.distribution.rank_info.size
        return make_plan(
            self.config, self.config.data.num_examples_per_epoch or num_images, workers, self.recipe_version
        )

    def describe_model(self, data: TrainingData, weights: WeightsFile | None) -> ModelConfig:
        """Return the classes, and the padding of the weights."""
        is_known = weights is not None and weights.padding is not None
        config = data.model_config.copy()
        config["pool_padding"] = weights.pool_padding if weights and is_known else "symmetric"
        return config

    def build_task(
        self,
        model_config: ModelConfig,
        *,
        averages: bool,
        communicator: Communicator,
        reduce_statistics: ReduceStatistics | None,
    ) -> TrainableTask:
        """Build a detector of these classes."""
        from gaudi_apps.mxnet.task import MXNetTask

        flags, group = self.config.distribution, self.settings.distribution.batch_norm_group
        among: Any = communicator
        return MXNetTask(
            len(read_categories(model_config)) + 1,
            device=self._mxnet.device,
            communicator=communicator,
            precision=self._mxnet.precision,
            layout=self._mxnet.layout,
            loss_scale=self._mxnet.loss_scale,
            momentum=self.config.schedule.momentum,
            weight_decay=self.config.schedule.weight_decay,
            predivide=flags.gradient_predivide_factor,
            groups=flags.horovod_num_groups,
            pool_padding=model_config.get("pool_padding", "symmetric"),
            # The session's sums are of TensorFlow's tensors, and these of MXNet's arrays.
            reduce_statistics=among.sum_within(group) if group > 1 and communicator.size > 1 else None,
            seed=self.config.run.seed,
        )

    def open_evaluator(
        self, folder: RunFolder, model_config: ModelConfig, communicator: Communicator
    ) -> MXNetEvaluator:
        """Open the evaluation on the validation images, which computes COCO's figures."""
        data = self.config.data
        source = check_source(open_source(self.config, "val"), data, self.settings)
        self._num_scored = min(len(source), data.eval_samples or len(source))
        return MXNetEvaluator(
            source,
            input_options(self.config, self.settings, data.eval_batch_size),
            folder,
            read_categories(model_config),
            communicator,
            open_detector=self._open_detector,
            layout=self._mxnet.layout,
            num_images=data.eval_samples,
            max_boxes=self.config.use.max_boxes,
        )

    def make_callbacks(self, callbacks: Sequence[Callback], plan: Plan) -> list[Callback]:
        """Add MLPerf's log on rank 0, and score in a process of its own, if the flags ask for it."""
        made = list(callbacks)
        (history,) = (one for one in made if isinstance(one, History))
        if self.config.report.async_val:
            (heartbeat,) = (one for one in made if isinstance(one, Heartbeat))
            (saver,) = (one for one in made if isinstance(one, Checkpoints))
            open_process = partial(open_scoring, self.config)
            for one in [one for one in made if isinstance(one, Evaluation)]:
                made.remove(one)
                evaluation = AsyncEvaluation(one, saver.folder, history, heartbeat, open_process)
                made.insert(made.index(saver), evaluation)
        if self.config.mlperf.mlperf and self.settings.distribution.rank_info.rank == 0:
            from gaudi_apps.mxnet.mlperf import MLPerfLog

            path, count = self.settings.model_dir / MLPERF_LOG, self._num_scored
            made.insert(0, MLPerfLog(path, self.config, plan, history, eval_samples=count, started=self._started))
        return made

    def _open_detector(self, model: Any) -> Any:
        from gaudi_apps.mxnet.task import Detector

        flags = self.config.report
        return Detector(
            model,
            self._mxnet.device,
            score_threshold=flags.nms_valid_thresh,
            iou_threshold=flags.nms_overlap_thresh,
            max_per_class=flags.nms_topk,
            max_detections=flags.post_nms,
        ).detect

    def draw_input(self, data: TrainingData, folder: Path) -> list[Path]:
        """Draw training images with the boxes that their targets encode."""
        from gaudi_apps.detection.data import draw_training_input

        batches = open_training_data(self.config, self.settings, "NHWC").batches(0)
        return draw_training_input(batches, read_categories(data.model_config), folder)

    def predict(self, restore: Callable[[], Restored]) -> None:
        """Detect on the user's images and videos."""
        from gaudi_apps.detection.detections import OpenedDetector
        from gaudi_apps.detection.outputs import predict_by_flags

        def open_restored(_batch_size: int) -> OpenedDetector:
            restored = restore()
            detect = self._open_detector(restored.task.model)
            return OpenedDetector(detect, read_categories(restored.model_config), make_preprocessor(self._mxnet.layout))

        batch_size, folder = self.config.data.batch_size, self.settings.model_dir
        predict_by_flags(self.config.use, open_restored, folder, batch_size=batch_size)

    def use_data_of_run(self) -> None:
        """Leave the data as it is: an export is checked on numbers."""

    def export(self, restore: Callable[[], Restored]) -> None:
        """Write the weights, their image size and classes into a file that both frameworks read."""
        from gaudi_models.mxnet.weights import write_weights
        from gaudi_models.weights import WeightsMetadata
        from gaudi_ops import SSD300

        restored = restore()
        folder = find_copy(self.config.use.output_dir or self.settings.model_dir / "export", "outputs")
        folder.mkdir(parents=True, exist_ok=True)
        network, path = restored.task.model, folder / "weights.safetensors"
        classes = [asdict(category) for category in read_categories(restored.model_config)]
        write_weights(network, path, metadata=WeightsMetadata(network.padding, classes, SSD300.image_size))
        say(f"{path}: weights after step {restored.step}")


def open_scoring(config: SSDMXNetConfig, model_config: ModelConfig) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that scores weights, for a process of its own; see `SSDMXNetApplication.open_evaluator`."""
    from gaudi_apps.training.run_dir import RunFolder

    app = SSDMXNetApplication(config, Distribution())
    app.framework.start(app.settings.device)
    alone = SingleProcess()
    task = app.build_task(model_config, averages=False, communicator=alone, reduce_statistics=None)
    evaluator = app.open_evaluator(RunFolder(app.settings.model_dir), model_config, alone)
    evaluator.show = None  # the training shows its own progress

    def score(tensors: Mapping[str, Any]) -> Any:
        task.write_weights(tensors)
        return evaluator.join([evaluator.evaluate(task)])

    return score


def make_settings(config: SSDMXNetConfig, distribution: Distribution) -> RunSettings:
    """Return the settings that the training and evaluation of all programs need."""
    run, report = config.run, config.report
    if distribution.rank_info.size > 1:
        communication = replace(distribution.communication, engine="horovod_mxnet")
        distribution = replace(distribution, communication=communication)
        if config.distribution.bn_group > 1:
            # Each of these layers waits for its sums, so ranks of processors poll Horovod as often as by default.
            environment = {CYCLE_VARIABLE: os.environ.get(CYCLE_VARIABLE, "1"), **distribution.environment}
            distribution = replace(distribution, environment=environment)
    validates = run.mode == "train_val" and not config.data.use_fake_data
    device = DeviceSettings(
        device=config.device.device,
        dtype=config.device.precision,
        seed=run.seed,
        local_rank=distribution.rank_info.local_rank,
        is_rank=distribution.rank_info.size > 1,
    )
    return make_run_settings(
        config,
        device,
        distribution,
        checkpoint=run.checkpoint,
        summary_every=report.log_steps,
        profiled_steps=find_profiled_steps(config),
        weights=config.schedule.weights,
        target=report.target_map / 100,
        evaluates=validates,
        reports_scores=validates,
    )


Split = Literal["train", "val"]


def open_training_data(config: SSDMXNetConfig, run: RunSettings, layout: Any) -> TrainingData:
    """Open the training images of this rank.

    Raises:
        MissingInputError: the flags name none, or they are missing.
        DataError: they are damaged.
    """
    from gaudi_datasets.detection.batches import synthetic_batches, train_batches

    options = input_options(config, run)
    if config.data.use_fake_data:

        def draw(first_step: int) -> Batches:
            return synthetic_batches(options, num_classes=len(COCO_CATEGORIES) + 1, layout=layout)

        return TrainingData(make_category_config(COCO_CATEGORIES), COCO_TRAIN_IMAGES, "random images", draw)
    source = open_source(config, "train")
    options = keep_if_it_fits(source.num_bytes, options, run.distribution.rank_info.local_size)
    checked = check_source(source, config.data, run, trains=True)

    def read(first_step: int) -> Batches:
        return train_batches(checked, options, first_step=first_step, layout=layout, scale_brightness=True)

    files, former = getattr(source, "list_files", dict), getattr(source, "former_fingerprint", "")
    return TrainingData(make_category_config(source.categories), len(source), source.fingerprint, read, files, former)


def open_source(config: SSDMXNetConfig, split: Split) -> DetectionSource:
    """Open the images of a split: records, or the files in --coco_root, in the same order.

    Files of the other split, where they are there, tell how turned images are read where those of the split do not.

    Raises:
        MissingInputError: the flags name none, or they are missing.
        DataError: they are damaged.
    """
    from gaudi_datasets.detection.sources import RecordSource

    data = config.data
    if data.data_dir is not None:
        return RecordSource(data.data_dir, split)
    if data.coco_root is None:
        raise MissingInputError(f"--coco_root, --data_dir: not given; one of them must name the {split} images")
    other: Split = "train" if split == "val" else "val"
    files, others = (find_coco_files(data.coco_root, data.dataset, each) for each in (split, other))
    return open_files(files, others, split)


def input_options(config: SSDMXNetConfig, run: RunSettings, batch_size: int | None = None) -> InputOptions:
    """Return the options of this rank's batches, of --batch_size images or another number."""
    data, rank_info = config.data, run.distribution.rank_info
    return InputOptions(
        batch_size=batch_size or data.batch_size,
        seed=run.device.seed,
        rank=rank_info.rank,
        size=rank_info.size,
        threads=data.threadpool_size,
        flip_probability=data.flip_probability,
        **asdict(config.augmentation),
    )


def make_preprocessor(layout: Layout) -> Preprocessor:
    """Return the preprocessing of the user's images for a network of a layout."""
    axes = (2, 0, 1) if layout == "NCHW" else (0, 1, 2)

    def from_pixels(pixels: Image) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(prepare_pixels(pixels).transpose(axes))

    return Preprocessor(from_pixels)
