"""Define what a program and the library that it computes with have to implement."""

from __future__ import annotations

import glob
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

from gaudi_apps.cli.flag_rules import list_flags
from gaudi_apps.runtime.errors import flag_error
from gaudi_apps.training.checkpoint import BEST, CHECKPOINTS, CheckpointFolder, find_checkpoints, find_run_checkpoint
from gaudi_apps.training.plan import CURRENT
from gaudi_apps.training.recipe import CHECKED, NO_RECIPE, RECIPE, SPLIT, STARTED, Length, Recipe, describe_found
from gaudi_datasets.documents import load_yaml
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.fetching.stores import is_url
from gaudi_datasets.memory import decide_cache
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import DataFlags, ProgramConfig
    from gaudi_apps.inference.evaluator import Evaluator
    from gaudi_apps.runtime.settings import DeviceSettings, RunSettings
    from gaudi_apps.training.checkpoint import ModelConfig
    from gaudi_apps.training.plan import Plan
    from gaudi_apps.training.recording import ReplaySteps
    from gaudi_apps.training.run_dir import RunFolder
    from gaudi_apps.training.trainer import Callback, TrainableTask, TrainingData
    from gaudi_datasets.layouts.splitting import SplitData
    from gaudi_datasets.sampling import InputOptions
    from gaudi_distributed import Communicator
    from gaudi_models.weights import WeightsFile

# Returns the sums over ranks of what batch norm measures.
ReduceStatistics: TypeAlias = Callable[[Sequence[Any]], list[Any]]
Data = TypeVar("Data")


CONFIG = "config.yaml"  # the flags of a run, as --config takes them
_PATHS = (
    *("data", "data_dir", "jpeg_data_dir", "coco_root"),
    *("train_annotations", "train_images", "val_annotations", "val_images"),
)


def read_flags_of_run(model_dir: Path) -> dict[str, Any]:
    """Read the flags of the run in a folder, by name; none where there is no such file, or it is damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = load_yaml(model_dir / CONFIG)
    except (FileNotFoundError, DataError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Restored:
    """A network from a checkpoint, its configuration, the step, and the SHA-256 of the tensors."""

    task: TrainableTask
    model_config: ModelConfig
    step: int
    sha256: str = ""


class Framework(Protocol):
    """A library that computes; it is imported by `start` at the earliest.

    Attributes:
        distributions: names of the packages whose versions must be equal on all ranks.
    """

    distributions: tuple[str, ...]

    def start(self, settings: DeviceSettings) -> None:
        """Choose device and precision, set the environment, and only then import the library.

        Raises:
            ConfigurationError, DeviceError, ImportError: it cannot compute like this here.
        """

    @property
    def precision_name(self) -> str:
        """Return the precision that was started with, which ranks compare."""

    def list_devices(self) -> list[str]:
        """List the kinds of the devices in use, once the framework was started."""

    def needs_static_shapes(self) -> bool:
        """Return True if the device in use needs static shapes."""

    @property
    def replay_steps(self) -> ReplaySteps:
        """Return what trains and yields the tensors of each step, see `gaudi_apps.training.comparisons`."""

    def start_trace(self, folder: Path) -> None:
        """Start a trace, which goes into a folder."""

    def trace_step(self, step: int) -> AbstractContextManager[Any]:
        """Return a context that marks the number of a step in the trace."""

    def stop_trace(self) -> None:
        """Wait for the device, and write the trace."""


class Application(ABC):
    """Base class of the four programs, once their flags are validated.

    Attributes:
        program: what a Python is given to run it, such as ``("-m", "gaudi_apps.ssd_train")``.
        files: names of files in the folder of a run that the program writes besides those of the machinery.
        folders: the same of folders.
        config: the dataclass of its flags, validated.
        settings: what the machinery has to know of them.
        recipe_version: version of the rules that are followed, see `gaudi_apps.training.plan`.
        recipe: what some of the flags follow from.
        began: by `time.monotonic`, from when --minutes counts.
        checks_exports: an export is compared with the network on images.
        checked: a hash of the images that `check_images` found good, by split.
        framework: what computes.
    """

    framework: Framework
    program: tuple[str, ...]
    files: ClassVar[tuple[str, ...]]
    folders: ClassVar[tuple[str, ...]]
    checks_exports: ClassVar[bool] = True
    config: ProgramConfig
    settings: RunSettings
    recipe_version: int = CURRENT
    recipe: Recipe = NO_RECIPE
    began: float = STARTED
    checked: Mapping[str, str] = MappingProxyType({})

    def use_version(self, version: int) -> None:
        """Plan and train by a version of the rules."""
        self.recipe_version = version

    def find_inputs(self, mode: str) -> None:
        """Find the files and folders that flags name, before the framework is imported, which takes seconds.

        Raises:
            MissingInputError: one of them is not there.
        """
        settings, config = self.settings, self.config
        if settings.distribution.rank_info.size > 1:
            return  # rank 0 alone may have them, and tells the others
        is_checked = mode == "export" and self.checks_exports and not config.use.inference
        if is_checked or mode not in ("predict", "export"):
            for name in (name for name in _PATHS if mode not in ("eval", "export") or not name.startswith("train_")):
                path = getattr(config.data, name, None)
                if path is not None and not is_url(path) and not Path(path).exists():
                    raise MissingInputError(
                        "there is no such file or folder", flag=f"--{name}", path=path, remedy=f"correct --{name}"
                    )
            self.open_found()
            self.find_data(mode)
        if config.use.inference:
            from gaudi_apps.inference.media import find_files

            find_files(config.use.inference)
        elif is_checked:
            self.use_data_of_run()
        if mode in ("predict", "export", "eval"):
            find_checkpoints(settings.model_dir, settings.checkpoint or "newest")
        weights = None if settings.weights is None else Path(settings.weights)
        is_there = (
            weights is None
            or is_url(settings.weights)
            or weights.exists()
            or any(weights.parent.glob(f"{glob.escape(weights.name)}.*"))
        )
        goes_on = not settings.clean and CheckpointFolder(settings.model_dir / CHECKPOINTS).steps()
        if mode != "train" or goes_on:  # no weights are read
            return
        if not is_there:  # a checkpoint of TensorFlow is the beginning of names
            raise MissingInputError(
                "there is no such file, run or checkpoint", flag="--weights", path=weights, remedy="correct --weights"
            )
        if is_url(settings.weights):
            from gaudi_apps.training.run_dir import fetch_weights

            fetch_weights(settings.weights)
        elif weights is not None:
            find_run_checkpoint(weights)  # of a run, which may have none

    def use_data_of_run(self) -> None:
        """Take the data that the run in the folder was trained on, where no flag names any.

        Raises:
            FlagError: it is no longer there.
        """
        flags = dict(list_flags(self.config))
        if any(flags.get(name) for name in (*_PATHS, "folder")):
            return
        found = read_flags_of_run(self.settings.model_dir)
        # An earlier release had fewer flags.
        values = {name: found[name] for name in ("val_share", "seed", *_PATHS) if name in flags and name in found}
        paths = [value for name, value in values.items() if name in _PATHS and value]
        numbers = [value for name, value in values.items() if name not in _PATHS]
        are_there = paths and all(isinstance(path, str) and (is_url(path) or Path(path).exists()) for path in paths)
        if not are_there or not all(isinstance(number, (int, float)) for number in numbers):
            raise flag_error(
                "--mode export: needs images to check the export on, and the run names none that are there",
                "give --inference, --data or --data_dir",
            )
        self.change_flags(values)

    def find_data(self, mode: str) -> None:  # noqa: B027 - most programs have nothing to add
        """Find the split that a mode needs in the folders that flags name; see `find_inputs`."""

    def check_images(self) -> None:
        """Check the images of --data, unless the run in the folder has checked the same files.

        Raises:
            BrokenImagesError: images cannot be used; it names the first and counts all.
        """
        if (found := self.open_found()) is not None:
            from gaudi_datasets.layouts.checking import check_sources

            self.checked = check_sources(
                found.sources, self.settings.model_dir / CHECKED, self.config.data.on_bad_image
            )

    def describe_data(self) -> tuple[str, ...]:
        """Return what was recognised in --data, and what was left out."""
        found, config = self.open_found(), cast(Any, self.config)
        return () if found is None else describe_found(config.recipe.data, found)

    def open_found(self) -> SplitData[Any] | None:
        """Open the data set of --data as it is, once in a process; None without the flag."""
        return None

    def list_documents(self) -> dict[str, Any]:
        """Return what a run is to keep of its beginning: JSON values by the name of the file."""
        documents: dict[str, Any] = {}
        if self.recipe.choices:
            documents[RECIPE] = {**self.recipe.to_document(), "program": self.program[-1].rpartition(".")[2]}
        found = self.open_found()
        if found is not None and found.split:
            documents[SPLIT] = {**found.split}
        return documents | ({CHECKED: dict(self.checked)} if self.checked else {})

    def fit(self, task: Any, plan: Plan, length: Length, reason: str) -> None:
        """Set the length of training, which was fitted to a time, and what follows from it; with --minutes only.

        Args:
            task: is trained; a `KerasTask`.
            plan: of another length.
            length: of the training.
            reason: of the length.
        """
        raise NotImplementedError(f"{type(self).__name__} has no --minutes")

    def use_recipe(self, recipe: Recipe) -> None:
        """Replace the recipe, and the flags that follow from it; what the former one chose besides gets its default."""
        defaults = dict(list_flags(type(self.config)()))
        former = {choice.flag: defaults[choice.flag] for choice in self.recipe.effective}
        self.recipe = recipe
        self.change_flags({**former, **{choice.flag: choice.value for choice in recipe.effective}})

    def change_flags(self, values: Mapping[str, Any]) -> None:
        """Replace values of flags by name; for programs with a recipe only."""
        raise NotImplementedError(f"{type(self).__name__} has no recipe")

    def open_test_source(self) -> Any | None:
        """Open images that the result of a training is reported on, in place of those of validation; None: none."""
        found = self.open_found()
        return None if found is None else found.test

    @property
    def resolved_config(self) -> ProgramConfig:
        """Return the flags, with the values of those whose default follows from others."""
        return self.config

    @property
    def first_result_step(self) -> int:
        """Return the first step whose weights are a result, see `EarlyStopping`."""
        return 0

    @property
    @abstractmethod
    def rate_needs_length(self) -> bool:
        """Return True if the learning rate depends on the last step, so that a resumed run must keep its length."""

    @abstractmethod
    def open_training_data(self) -> TrainingData:
        """Open what the flags name.

        Raises:
            MissingInputError: it is not there.
            DataError: it is damaged.
        """

    @abstractmethod
    def make_plan(self, num_images: int) -> Plan:
        """Plan the training of so many images an epoch, on all processes together."""

    @abstractmethod
    def describe_model(self, data: TrainingData, weights: WeightsFile | None) -> ModelConfig:
        """Return what is needed to build the model again: classes, architecture, padding."""

    @abstractmethod
    def build_task(
        self,
        model_config: ModelConfig,
        *,
        averages: bool,
        communicator: Communicator,
        reduce_statistics: ReduceStatistics | None,
    ) -> TrainableTask:
        """Build a network with new weights.

        Args:
            model_config: from `describe_model`, or from a checkpoint.
            averages: whether it may keep an average of its weights.
            communicator: of the processes that it trains with.
            reduce_statistics: gives the sums, over processes, of what batch norm measures; None: each by itself.

        Raises:
            DataError: the configuration lacks what is needed.
        """

    @abstractmethod
    def open_evaluator(
        self, folder: RunFolder, model_config: ModelConfig, communicator: Communicator
    ) -> Evaluator[Any]:
        """Open what evaluates networks of this configuration, each rank a part of the images.

        Raises:
            MissingInputError: there is no validation data.
            DataError: it has other classes.
        """

    @abstractmethod
    def draw_input(self, data: TrainingData, folder: Path) -> list[Path]:
        """Draw what the network sees of the first training images; returns the files."""

    def make_callbacks(self, callbacks: Sequence[Callback], plan: Plan) -> list[Callback]:
        """Return the callbacks of a training: by default those given; a program may add or replace some."""
        return list(callbacks)

    def finish(self, restore: Callable[[], Restored]) -> None:  # noqa: B027
        """Act on the result of a training that came to its end; by default do nothing."""

    def find_used_checkpoint(self) -> str:
        """Return which checkpoint predict and export use: that of --checkpoint, or of the report of the run.

        The latter is the best one where the run was trained by --data, else the newest.

        Raises:
            DataError: the run has both, and does not tell any more how it was trained.
        """
        folder = self.settings.model_dir
        if self.settings.checkpoint or not CheckpointFolder(folder / BEST).steps():
            return self.settings.checkpoint or "newest"
        flags = read_flags_of_run(folder)
        if not flags:
            raise DataError(
                "is missing or damaged, so nobody knows which checkpoint the report of the run is of",
                path=folder / CONFIG,
                remedy="give --checkpoint best or --checkpoint newest",
            )
        return "best" if flags.get("data") else "newest"

    def predict_exported(self) -> bool:
        """Predict without the framework, by an export, if flags ask for it; return False where nothing was done."""
        return False

    def evaluate_exported(self) -> bool:
        """Evaluate an export without the framework, if flags ask for it; return False where nothing was done."""
        return False

    @abstractmethod
    def predict(self, restore: Callable[[], Restored]) -> None:
        """Use the chosen checkpoint on the user's images."""

    @abstractmethod
    def export(self, restore: Callable[[], Restored]) -> None:
        """Export the chosen checkpoint."""


def keep_if_it_fits(num_bytes: int, options: InputOptions, processes: int) -> InputOptions:
    """Decide whether encoded images are kept in memory, and print the decision.

    Args:
        num_bytes: of all encoded images.
        options: of the pipeline.
        processes: of this machine that keep the images.

    Returns:
        the options with the decision.
    """
    decision = decide_cache(num_bytes, processes=processes)
    say(decision.describe())
    return replace(options, cache_encoded=decision.keeps)


def check_source(source: Data, flags: DataFlags, settings: RunSettings, *, trains: bool = False) -> Data:
    """Return a source that checks images as flags say; one process of a machine verifies them all before.

    Raises:
        BrokenImagesError: by --verify_data; images cannot be used.
    """
    from gaudi_datasets.layouts.checking import check_when_read  # here, since plans need none of it

    verify = flags.verify_data and not settings.distribution.rank_info.local_rank
    return check_when_read(source, flags.on_bad_image if trains else "fail", verify=verify)
