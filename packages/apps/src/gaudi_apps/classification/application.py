"""Define resnet_train and resnext_train for the machinery of all programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gaudi_apps.classification.data import (
    input_options,
    open_found,
    open_training_data,
    read_class_names,
    require_model_config,
)
from gaudi_apps.classification.flags import TrainConfig
from gaudi_apps.classification.plan import fit_choices, make_plan
from gaudi_apps.cli.flag_rules import replace_flags
from gaudi_apps.runtime.tensorflow import TensorFlow
from gaudi_apps.training.application import Application, ReduceStatistics, Restored, check_source
from gaudi_apps.training.checkpoint import ModelConfig
from gaudi_apps.training.plan import Plan
from gaudi_apps.training.recipe import NO_RECIPE, Length, Recipe
from gaudi_apps.training.trainer import TrainableTask, TrainingData
from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.fetching.stores import find_copy, is_url
from gaudi_distributed import Communicator
from gaudi_distributed.devices.machine import describe_jemalloc
from gaudi_models.architectures import RESNETS
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.classification.evaluator import AccuracyEvaluator
    from gaudi_apps.cli.flags import ExportFormat, ProgramConfig
    from gaudi_apps.training.run_dir import RunFolder
    from gaudi_datasets.classification.layouts import ClassificationData
    from gaudi_models.weights import WeightsFile


class ClassificationApplication(Application):
    """Train and use classifiers.

    Args:
        program: what a Python is given to run it.
        config: the flags, validated.
        make_train_config: what they mean for this process, by a version of `gaudi_apps.training.plan`.
        recipe: what some of the flags follow from.
    """

    files: ClassVar = ("evaluation.json",)
    folders: ClassVar = ("pictures",)
    framework: TensorFlow

    def __init__(
        self,
        program: tuple[str, ...],
        config: ProgramConfig,
        make_train_config: Callable[..., TrainConfig],
        recipe: Recipe = NO_RECIPE,
    ) -> None:
        self.program = program
        self.config, self.recipe = config, recipe
        self.framework = TensorFlow()
        self._make_train_config = make_train_config
        self.train_config = make_train_config(config, version=self.recipe_version)
        self.settings = self.train_config.run

    def use_version(self, version: int) -> None:
        """Plan and train by a version of the rules."""
        super().use_version(version)
        self.train_config = self._make_train_config(self.config, version=version)

    @property
    def resolved_config(self) -> ProgramConfig:
        """The flags, with the values of those whose default follows from others."""
        return self.train_config.flags

    @property
    def first_result_step(self) -> int:
        """Return the first step whose weights are pruned as much as they will be."""
        pruning = self.train_config.learning.pruning
        return 0 if pruning is None else pruning.pruning_end_step + 1

    @property
    def rate_needs_length(self) -> bool:
        """Tell whether the learning rate depends on the last step."""
        return self.train_config.rate.kind in ("cosine", "polynomial")

    def change_flags(self, values: Mapping[str, Any]) -> None:
        """Replace values of flags by name."""
        self.config = replace_flags(self.config, values)
        self.use_version(self.recipe_version)
        self.settings = self.train_config.run

    def fit(self, task: Any, plan: Plan, length: Length, reason: str) -> None:
        """Set the length of training, and what follows from it."""
        self.use_recipe(self.recipe.replace_values(fit_choices(plan, length, reason)))
        task.change_average(self.train_config.learning.ema_decay)

    def open_found(self) -> ClassificationData | None:
        """Open what --data names."""
        flags = self.train_config.recipe
        return None if flags.data is None else open_found(flags, self.settings.device.seed)

    def open_training_data(self) -> TrainingData:
        """Open records, folders of classes, or random images."""
        data = self.train_config.flags.data
        if self.framework.list_devices() != ["CPU"]:  # without a device neither is of use
            if data.jpeg_data_dir:
                read = f"images are read from {data.folder} by the CPU"
                say(f"--jpeg_data_dir: hardware media loading is not available; {read}")
            say(describe_jemalloc(os.environ))
        return open_training_data(self.train_config)

    def find_data(self, mode: str) -> None:
        """Find the splits that are trained or evaluated on."""
        from gaudi_datasets.classification.sources import find_remote, open_split
        from gaudi_datasets.split_folders import find_folder

        data = self.train_config.flags.data
        folder, splits = Path(data.folder or ""), data.train_splits
        if mode in ("eval", "export"):
            splits = (data.eval_split,)
        for split in () if data.folder is None else splits:
            if is_url(data.folder):
                find_remote(str(data.folder), split)
            elif not any(folder.glob(f"{split}-*")) and find_folder(folder, split) is None:
                open_split(folder, split)  # which says what is there

    def make_plan(self, num_images: int) -> Plan:
        """Plan by the configuration; its own number of images comes first."""
        return make_plan(self.train_config, self.train_config.flags.data.num_examples_per_epoch or num_images)

    def describe_model(self, data: TrainingData, weights: WeightsFile | None) -> ModelConfig:
        """Return classes, network and size, and the padding of the flag, of the weights or of the original."""
        model, flags = self.train_config.model, self.train_config.flags
        of_original = RESNETS[model].padding if model in RESNETS else "symmetric"
        of_weights = None if weights is None else weights.padding
        return {
            **data.model_config,
            "model": model,
            "padding": flags.training.padding or of_weights or of_original,
            "image_size": flags.data.image_size,
        }

    def build_task(
        self,
        model_config: ModelConfig,
        *,
        averages: bool,
        communicator: Communicator,
        reduce_statistics: ReduceStatistics | None,
    ) -> TrainableTask:
        """Build a classifier as its configuration says."""
        from gaudi_apps.classification.task import ClassificationTask
        from gaudi_models.classifiers import build_classifier

        require_model_config(model_config)
        model = build_classifier(
            model_config["model"],
            len(model_config["classes"]),
            dtype=self.framework.precision.keras_policy,
            padding=model_config["padding"],
            image_size=model_config["image_size"],
            zero_gamma=self.train_config.flags.training.zero_gamma,
            implementation=self.train_config.flags.device.grouped_convolution,
            reduce_statistics=reduce_statistics,
        )
        task = ClassificationTask(
            model,
            self.train_config.learning,
            seed=self.settings.device.seed,
            head_only=self.train_config.flags.training.fine_tune,
            communicator=communicator,
            averages=averages,
        )
        if self.settings.device.recomputes:
            task.recompute()
        if self.settings.device.compiles_steps:
            task.compile_by_xla()
        return task

    def open_evaluator(
        self, folder: RunFolder, model_config: ModelConfig, communicator: Communicator
    ) -> AccuracyEvaluator:
        """Open the evaluator of the validation images."""
        from gaudi_apps.classification.data import open_source
        from gaudi_apps.classification.evaluator import AccuracyEvaluator

        require_model_config(model_config)
        data, names = self.train_config.flags.data, read_class_names(model_config)
        found = self.open_found()
        if found is None:
            source = open_source(data.folder, [data.eval_split], class_names=names)
        elif found.val is None:
            raise MissingInputError("--data: has no images to validate on", flag="--data", remedy="give --val_share")
        else:
            source = found.val
        options = input_options(self.train_config, image_size=model_config["image_size"])
        num_images = self.train_config.eval_images or None
        source = check_source(source, data, self.settings)
        evaluator = AccuracyEvaluator(source, options, folder, names, communicator, num_images=num_images)
        evaluator.split = data.eval_split if found is None else "val"
        return evaluator

    def draw_input(self, data: TrainingData, folder: Path) -> list[Path]:
        """Draw training images with their labels."""
        from gaudi_apps.classification.data import draw_training_input

        return draw_training_input(data.batches(0), read_class_names(data.model_config), folder)

    def finish(self, restore: Callable[[], Restored]) -> None:
        """Export a SavedModel, if the end of training is to."""
        if self.train_config.export_at_end is not None:
            self._export(restore(), Path(self.train_config.export_at_end), ("saved_model",), is_scored=False)

    def predict(self, restore: Callable[[], Restored]) -> None:
        """Classify the user's images and videos."""
        from gaudi_apps.classification.classifier import Classifier, ClassResults, make_preprocessor
        from gaudi_apps.inference.predictor import find_inputs, predict_files

        use = self.train_config.flags.use
        output_dir = find_copy(use.output_dir or self.settings.model_dir / "predictions", "outputs")
        files = find_inputs(use.inference, output_dir)
        restored = restore()
        names = read_class_names(restored.model_config)
        results = predict_files(
            Classifier(restored.task.model).classify,
            files,
            make_preprocessor(restored.model_config["image_size"]),
            lambda folder: ClassResults(folder, names, use.top, use.save),
            output_dir,
            batch_size=self.train_config.own_batch,
            strict=use.strict,
            max_frames=use.max_frames,
        )
        say(*results.describe(output_dir).split("\n"))

    def export(self, restore: Callable[[], Restored]) -> None:
        """Export the classifier, and its features."""
        use, formats = self.train_config.flags.use, self.train_config.flags.run.export_format
        self._export(restore(), find_copy(use.output_dir or self.settings.model_dir / "export", "outputs"), formats)

    def _export(
        self, restored: Restored, output_dir: Path, formats: tuple[ExportFormat, ...], *, is_scored: bool = True
    ) -> None:
        from gaudi_apps.classification.data import open_source
        from gaudi_apps.classification.task import run_export
        from gaudi_apps.inference.exporter import ExportRequest, choose_images, make_request
        from gaudi_apps.inference.report_page import renew_report, report_exports

        use, data = self.train_config.flags.use, self.train_config.flags.data
        found = self.open_found()
        source = open_source(data.folder, [data.eval_split]) if data.folder else found and (found.val or found.train)

        def open_train() -> Any:
            return found.train if found else open_source(data.folder, data.train_splits)

        encoded_images = choose_images(use.inference, source)
        # The end of a training has evaluated the network, and one image after the other takes long.
        has_images = is_scored and bool(data.folder or (found and found.val))
        exports = run_export(
            restored.task.model,
            restored.model_config,
            encoded_images,
            output_dir,
            formats,
            step=restored.step,
            with_features=use.export_features,
            request=make_request(self, restored, open_train, has_images=has_images)
            if is_scored
            else ExportRequest(checkpoint=restored.sha256),
        )
        report_exports(exports, len(encoded_images))
        renew_report(self.settings.model_dir)
