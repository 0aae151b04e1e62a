"""Define ssd_train for the machinery of all programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gaudi_apps.cli.flag_rules import parse_step_range, replace_flags
from gaudi_apps.detection.config import SSDConfig, find_checkpoint, find_mode, open_found
from gaudi_apps.detection.data import (
    choose_architecture,
    find_split,
    input_options,
    open_source,
    open_training_data,
    read_architecture,
)
from gaudi_apps.detection.detections import OpenedDetector, make_export_preprocessor, open_detector, read_categories
from gaudi_apps.detection.plan import fit_choices, make_plan
from gaudi_apps.inference.exported_models import CheckedExport, choose_export, open_model
from gaudi_apps.runtime.errors import warn
from gaudi_apps.runtime.settings import Distribution, RunSettings, make_device_settings, make_run_settings
from gaudi_apps.runtime.tensorflow import TensorFlow
from gaudi_apps.training.application import Application, ReduceStatistics, Restored, check_source
from gaudi_apps.training.checkpoint import BEST, CHECKPOINTS, Checkpoint, ModelConfig, load_chosen
from gaudi_apps.training.plan import Plan
from gaudi_apps.training.recipe import NO_RECIPE, Length, Recipe
from gaudi_apps.training.trainer import TrainableTask, TrainingData
from gaudi_datasets.errors import FlagError
from gaudi_datasets.fetching.stores import find_copy
from gaudi_distributed import Communicator, SingleProcess
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.detection.evaluator import DetectionEvaluator
    from gaudi_apps.training.run_dir import RunFolder
    from gaudi_datasets.detection.layouts import DetectionData
    from gaudi_models.weights import WeightsFile

# Modes whose images are of the size that the flags say.
TRAINING = ("train", "verify-resume", "parity")


class SSDApplication(Application):
    """Train and use the SSD."""

    program = ("-m", "gaudi_apps.ssd_train")
    files: ClassVar = ("evaluation.json", "detections.json")
    folders: ClassVar = ("pictures",)
    framework: TensorFlow
    config: SSDConfig

    def __init__(self, config: SSDConfig, distribution: Distribution | None = None, recipe: Recipe = NO_RECIPE) -> None:
        self.config, self.recipe = config, recipe
        self.settings = make_settings(config, distribution or Distribution())
        self.framework = TensorFlow()

    @property
    def rate_needs_length(self) -> bool:
        """A cosine ends at the last step; steps of the rate do not depend on it."""
        return self.config.schedule.lr_schedule == "cosine"

    def open_found(self) -> DetectionData | None:
        """Open what --data names."""
        return None if self.config.recipe.data is None else open_found(self.config)

    def change_flags(self, values: Mapping[str, Any]) -> None:
        """Replace values of flags by name."""
        self.config = replace_flags(self.config, values)
        self.settings = make_settings(self.config, self.settings.distribution)

    def fit(self, task: Any, plan: Plan, length: Length, reason: str) -> None:
        """Set the length of training, and what follows from it."""
        self.use_recipe(self.recipe.replace_values(fit_choices(plan, length, reason)))
        task.change_average(self.config.run.ema_decay)

    def open_training_data(self) -> TrainingData:
        """Open what --data names, records, files, static batches or random images."""
        return open_training_data(self.config, self.settings)

    def find_data(self, mode: str) -> None:
        """Find the records that are trained or evaluated on."""
        from gaudi_datasets.records.record_sets import has_records

        data, split = self.config.data, find_split(mode)
        if data.data_dir is not None and not data.static and not has_records(data.data_dir, split):
            open_source(self.config, split)  # which says what is there

    def make_plan(self, num_images: int) -> Plan:
        """Plan by the flags; --num_examples_per_epoch replaces the number of images."""
        workers = self.settings.distribution.rank_info.size
        images = self.config.data.num_examples_per_epoch or num_images
        return make_plan(self.config, images, workers, self.recipe_version)

    def describe_model(self, data: TrainingData, weights: WeightsFile | None) -> ModelConfig:
        """Return the classes, the network of the flags, and the padding of the weights."""
        architecture, config = choose_architecture(self.config), data.model_config.copy()
        config["model"], config["image_size"] = architecture.name, architecture.image_size
        config["pool_padding"] = "same" if weights is None else weights.pool_padding
        if self.config.network.box_voting:
            config["box_voting"] = True
        return config

    def build_task(
        self,
        model_config: ModelConfig,
        *,
        averages: bool,
        communicator: Communicator,
        reduce_statistics: ReduceStatistics | None,
    ) -> TrainableTask:
        """Build a detector of a configuration."""
        from gaudi_apps.detection.detector import SSDTask

        architecture = read_architecture(model_config)
        if find_mode(self.config) in TRAINING and architecture != choose_architecture(self.config):
            raise FlagError(
                f"--backbone {self.config.network.backbone}, --image_size {self.config.network.image_size}: the "
                f"checkpoint is of {architecture.backbone} at {architecture.image_size}",
                flag="--image_size",
                remedy="give the same",
            )
        task = SSDTask(
            len(read_categories(model_config)) + 1,
            keras_policy=self.framework.precision.keras_policy,
            weight_decay=self.config.schedule.weight_decay,
            communicator=communicator,
            architecture=architecture,
            pool_padding=model_config.get("pool_padding", "same"),
            reduce_statistics=reduce_statistics,
            cross_entropy=self.config.device.cross_entropy,
            class_weights=model_config.get("class_weights"),
            box_weight=self.config.schedule.box_weight,
            frozen=self.config.network.freeze == "backbone",
            ema_decay=self.config.run.ema_decay if averages else 0.0,
        )
        if self.settings.device.recomputes:
            task.recompute()
        if self.settings.device.compiles_steps:
            task.compile_by_xla()
        return task

    def open_evaluator(
        self, folder: RunFolder, model_config: ModelConfig, communicator: Communicator
    ) -> DetectionEvaluator:
        """Open the evaluator of the validation images."""
        from gaudi_apps.detection.evaluator import DetectionEvaluator

        source = check_source(open_source(self.config, "val"), self.config.data, self.settings)
        options = input_options(self.config, self.settings, read_architecture(model_config))
        limit = self.config.report.eval_samples or None
        return DetectionEvaluator(
            source,
            options,
            folder,
            read_categories(model_config),
            communicator,
            num_images=limit,
            max_boxes=self.config.use.max_boxes,
            box_voting=model_config.get("box_voting", False),
        )

    def draw_input(self, data: TrainingData, folder: Path) -> list[Path]:
        """Draw training images with the boxes that their targets were encoded from."""
        from gaudi_apps.detection.data import draw_training_input

        spec = choose_architecture(self.config).spec
        return draw_training_input(data.batches(0), read_categories(data.model_config), folder, spec=spec)

    def predict(self, restore: Callable[[], Restored]) -> None:
        """Detect on the user's images and videos by the network."""
        from gaudi_apps.detection.detector import Detector, make_preprocessor

        def open_restored(_batch_size: int) -> OpenedDetector:
            restored = restore()
            config = restored.model_config
            prepare = make_preprocessor(read_architecture(config).image_size)
            detector = Detector(restored.task.model, box_voting=config.get("box_voting", False))
            return OpenedDetector(detector.detect, read_categories(config), prepare)

        self._predict(open_restored)

    def predict_exported(self) -> bool:
        """Detect on the user's images and videos by an export of the checkpoint that is used, as --runtime says."""
        export, _ = self._choose_export()
        if export is not None:
            self._predict(partial(open_detector, export, self.settings.device.runtime_threads))
        return export is not None

    def evaluate_exported(self) -> bool:
        """Evaluate an export of the checkpoint that is used, as --runtime says, and write what eval writes."""
        export, checkpoint = self._choose_export()
        if export is None or checkpoint is None:
            return False
        from gaudi_apps.inference.report_page import write_report
        from gaudi_apps.training.run_dir import RunFolder

        folder = self.settings.model_dir
        evaluator = self.open_evaluator(
            RunFolder(folder, (CHECKPOINTS, BEST)), checkpoint.model_config, SingleProcess()
        )
        if (source := self.open_test_source()) is not None:
            evaluator.use_source(source, "test")
        evaluator.compare_with_run(checkpoint.model_config)
        prepare = make_export_preprocessor(int(export.manifest["image_size"])).from_encoded
        model = open_model(export, prepare, self.settings.device.runtime_threads)
        evaluator.report_exported(model, checkpoint.step, export.folder.name)
        say(f"report: {write_report(folder)}")
        return True

    def _choose_export(self) -> tuple[CheckedExport | None, Checkpoint | None]:
        """Choose the export that --runtime asks for, and load its checkpoint; no export: the network is used."""
        runtime = self.config.run.runtime
        if runtime == "tensorflow":
            return None, None
        folder, which = self.settings.model_dir, self.find_used_checkpoint()
        checkpoint = load_chosen(folder, which, warn)
        if (export := choose_export(folder, checkpoint.sha256, runtime, which)) is None:
            self.settings = replace(self.settings, checkpoint=which)  # which eval uses, too
        return export, checkpoint

    def _predict(self, open_network: Callable[[int], OpenedDetector]) -> None:
        from gaudi_apps.detection.outputs import predict_by_flags

        predict_by_flags(self.config.use, open_network, self.settings.model_dir, batch_size=self.config.data.batch_size)

    def export(self, restore: Callable[[], Restored]) -> None:
        """Export the detector, checked on images of the user's or of validation, and scored on all of validation."""
        from gaudi_apps.detection.detector import run_export
        from gaudi_apps.inference.exporter import choose_images, make_request
        from gaudi_apps.inference.report_page import renew_report, report_exports

        use, run = self.config.use, self.config.run
        has_images = self.config.recipe.data or self.config.data.data_dir or self.config.data.val_annotations
        encoded_images = choose_images(use.inference, open_source(self.config, "val") if has_images else None)
        restored = restore()
        exports = run_export(
            restored.task.model,
            read_categories(restored.model_config),
            encoded_images,
            find_copy(use.output_dir or self.settings.model_dir / "export", "outputs"),
            run.export_format,
            step=restored.step,
            architecture=read_architecture(restored.model_config),
            pool_padding=restored.model_config.get("pool_padding", "same"),
            box_voting=restored.model_config.get("box_voting", False),
            request=make_request(
                self, restored, lambda: open_source(self.config, "train"), has_images=bool(has_images)
            ),
        )
        report_exports(exports, len(encoded_images))
        renew_report(self.settings.model_dir)


def make_settings(config: SSDConfig, distribution: Distribution) -> RunSettings:
    """Make the settings of a run."""
    run, device, report = config.run, config.device, config.report
    has_truth = not (config.data.use_fake_data or config.data.static)
    return make_run_settings(
        config,
        make_device_settings(config, distribution, intra_threads=device.threads, inter_threads=device.threads),
        distribution,
        checkpoint=find_checkpoint(run),
        summary_every=report.save_summary_steps,
        profiled_steps=parse_step_range(report.profile),
        weights=config.network.weights,
        target=report.target,
        patience=report.patience,
        evaluates=has_truth and (report.eval_epochs > 0 or not report.no_evaluate),
        reports_scores=not report.no_evaluate,
        kills=run.kills,
        minutes=config.recipe.minutes,
        reports_best=config.recipe.data is not None,
    )
