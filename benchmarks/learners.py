"""The programs that `benchmarks.learning` trains: their installation, the fit of a schedule, training and detection."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.environments import ROOT, make_environment
from benchmarks.peers.program import BEGINS
from benchmarks.processor_time import ReadLine, run_measured
from gaudi_apps.training.recipe import END_SECONDS, Length, Speed, count_epochs, fit_length
from gaudi_datasets.detection.scoring import score_detections
from gaudi_datasets.errors import FlagError

SCRIPTS = Path(__file__).with_name("peers")
STEPS, EVERY = 24, 12  # of our measured run, and between its evaluations
EPOCHS = (1, 4)  # of the measured runs of the others
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_STEP = re.compile(r"step (\d+)/\d+ ")


class Scores(NamedTuple):
    """Figures of the test images by their names, and AP of each class of a detector."""

    figures: dict[str, float]
    by_class: dict[str, float]


class TrainingError(RuntimeError):
    """A program could not be installed, trained or used."""


class InstallationError(TrainingError):
    """A program could not be installed, so no budget is worth a try."""


class Learner(Protocol):
    """A program that trains.

    Attributes:
        name: in the table.
        settings: what it trains, and how, in a line.
        folder: of its runs.
    """

    name: str
    settings: str
    folder: Path

    def prepare(self, minutes: float) -> None:
        """Install it, and measure its speed for a budget, unless that is done; raises TrainingError."""

    def train(self, minutes: float, folder: Path) -> tuple[float, str]:
        """Train for a budget; return the processor seconds that it took and the schedule; raises TrainingError."""

    def score(self, folder: Path) -> Scores:
        """Return the figures of the test images; raises TrainingError."""


class Ours:
    """A program of ours by the recipe of the data: ssd_train, or a subclass's.

    Args:
        data: the data set, as it is.
        output: folder of all runs.
        seed: of the training.
        flags: in addition.
    """

    program = "ssd_train"
    measured_flags: tuple[str, ...] = ()  # so that it prints each step

    def __init__(self, data: Path, output: Path, seed: int, flags: str = "") -> None:
        self.name = f"{self.program} {flags}".strip()
        self.settings = f"the recipe of `--data`, with the network and the batch that `--minutes` chooses; seed {seed}"
        self.folder, self._truth = output / make_file_name(self.name), output / "data" / "test.json"
        self._command = [sys.executable, "-m", f"gaudi_apps.{self.program}", f"--data={data}", f"--seed={seed}"]
        self._command += shlex.split(flags)
        self._measured: dict[str, Any] = {}

    def prepare(self, minutes: float) -> None:
        """Measure start, steps, evaluations and the end by a short run, with the network and batch of `--minutes`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [*self._command, "--mode=plan", "--json", f"--minutes={minutes}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=make_variables(ours=True))
        if done.returncode:
            raise TrainingError(f"the plan failed: {done.stderr.strip()[-200:]}")
        plan = json.loads(done.stdout)
        batch, per_epoch = plan["global_batch"], plan["steps_per_epoch"]
        network = self.read_network(plan)
        chosen = {**network, "--batch_size": batch}
        settings = {**chosen, **self.read_settings(plan)}
        words = [f"{flag}={value}" for flag, value in settings.items() if not self._gives(flag)]
        folder = self.folder / "_".join(["measured", *map(str, chosen.values())])
        path = folder.with_suffix(".json")
        if not path.exists():
            marks: dict[int, float] = {}
            flags = [f"--steps={STEPS}", f"--eval_epochs={count_epochs(EVERY, per_epoch)}", *self.measured_flags]
            seconds = self._run([*words, *flags], folder, partial(mark_step, marks))
            document = {
                "network": ", ".join(map(str, network.values())), "batch": batch, "chosen": words,
                "steps_per_epoch": per_epoch, "seconds": seconds, "marks": marks,
            }  # fmt: skip
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        self._measured = json.loads(path.read_text(encoding="utf-8"))

    def train(self, minutes: float, folder: Path) -> tuple[float, str]:
        """Train as many steps as fit, with as many evaluations as `--minutes` makes."""
        measured = self._measured
        marks = {int(step): seconds for step, seconds in measured["marks"].items()}
        per_epoch = measured["steps_per_epoch"]
        try:
            length = fit_steps(60 * minutes, marks, measured["seconds"], per_epoch)
        except FlagError as error:
            raise TrainingError(str(error)) from error
        flags = [f"--steps={length.steps}", f"--eval_epochs={count_epochs(length.evaluation_steps, per_epoch)}"]
        schedule = (
            f"{measured['network']}, {length.steps} steps of {measured['batch']}, {length.steps / per_epoch:.3g} epochs"
        )
        return self._run([*measured["chosen"], *flags], folder), schedule

    def score(self, folder: Path) -> Scores:
        """Score what the program detected on the test images, at the end of its training."""
        self.read_evaluation(folder)
        return score_by_coco(self._truth, folder / "detections.json")

    def read_evaluation(self, folder: Path) -> dict[str, Any]:
        """Read the evaluation at the end of a training; raises TrainingError if it is not of the test images."""
        evaluation: dict[str, Any] = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        if evaluation.get("split") != "test":
            raise TrainingError(f"evaluated the split {evaluation.get('split')!r}, not the test images")
        return evaluation

    def read_network(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flags of the network of a plan."""
        return {"--backbone": plan["network"]["backbone"]}

    def read_settings(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return further flags of the recipe that follow from the time."""
        return {}

    def _gives(self, flag: str) -> bool:
        return any(word.partition("=")[0] == flag for word in self._command)

    def _run(self, flags: Sequence[str], folder: Path, read_line: ReadLine | None = None) -> float:
        command = [*self._command, *flags, f"--model_dir={folder}", "--clean"]
        return run(command, folder.with_suffix(".log"), make_variables(ours=True), read_line)


class OurClassifier(Ours):
    """Train resnet_train by the recipe of the data."""

    program, measured_flags = "resnet_train", ("--log_steps=1",)

    def score(self, folder: Path) -> Scores:
        """Return what the program counted on the test images, at the end of its training."""
        evaluation = self.read_evaluation(folder)
        return Scores({"top-1": evaluation["top_1"], "top-5": evaluation["top_5"]}, {})

    def read_network(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flags of the network of a plan, with the size of its images."""
        chosen = {entry["flag"]: entry["value"] for entry in plan.get("recipe", [])}
        size = {"--image_size": chosen["image_size"]} if "image_size" in chosen else {}
        return {"--model": plan["model"], **size}

    def read_settings(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a large data set has in little time only."""
        names = ("least_crop_area", "color_jitter", "gray_probability")
        return {f"--{one['flag']}": one["value"] for one in plan.get("recipe", []) if one["flag"] in names}


class Peer:
    """Another program, in an environment of its own.

    Args:
        name: in the table.
        settings: in a line.
        script: in ``peers``.
        requirements: of its environment, with versions.
        output: folder of all runs.
        data: folder that `write_data` wrote, or of folders of classes.
        seed: of the training.
        flags: in addition.
    """

    in_ours = False  # runs in our environment

    def __init__(
        self,
        name: str,
        settings: str,
        script: str,
        requirements: Sequence[str],
        output: Path,
        data: Path,
        seed: int,
        flags: Sequence[str] = (),
    ) -> None:
        self.name, self.settings, self._flags = name, settings, flags
        self.folder = output / make_file_name(name)
        self._script, self._requirements, self._data, self._seed = script, requirements, data, seed
        self._python, self._measured = Path(), dict[int, float]()  # seconds by epochs

    def prepare(self, minutes: float) -> None:
        """Make the environment, and measure two short trainings, the longer one only where it fits into the budget."""
        self._python = self._find_python()
        path = self.folder / "measured.json"
        if path.exists():
            self._measured = {int(epochs): seconds for epochs, seconds in json.loads(path.read_text("utf-8")).items()}
        first = EPOCHS[0]
        for epochs in EPOCHS:
            if epochs in self._measured or (self._measured and epochs * self._measured[first] > 60 * minutes):
                continue
            marks: list[float] = []
            self._measured[epochs] = self._train(epochs, self._measured_folder(epochs), partial(mark_start, marks))
            if not marks:
                raise TrainingError(f"never wrote {BEGINS!r}")
            self._measured[0] = marks[0]
            path.write_text(json.dumps(self._measured, indent=2) + "\n", encoding="utf-8")

    def train(self, minutes: float, folder: Path) -> tuple[float, str]:
        """Train as many epochs as fit, or take the measured training where that was of as many."""
        epochs = fit_epochs(60 * minutes, self._measured)
        if epochs in self._measured:
            shutil.copytree(self._measured_folder(epochs), folder, dirs_exist_ok=True)
            return self._measured[epochs], f"{epochs} epochs"
        return self._train(epochs, folder), f"{epochs} epochs"

    def score(self, folder: Path) -> Scores:
        """Detect on the test images, which is none of the budget, and score that."""
        self._run("detect", folder, [])
        return score_by_coco(self._data / "test.json", folder / "detections.json")

    def _measured_folder(self, epochs: int) -> Path:
        return self.folder / f"measured_{epochs}"

    def _find_python(self) -> Path:
        try:
            return make_environment(f"{Path(self._script).stem}_benchmark", self._requirements)
        except (OSError, subprocess.CalledProcessError) as error:
            raise InstallationError(f"{', '.join(self._requirements)} cannot be installed: {error}") from error

    def _train(self, epochs: int, folder: Path, read_line: ReadLine | None = None) -> float:
        return self._run("train", folder, [f"--epochs={epochs}", f"--seed={self._seed}"], read_line)

    def _run(self, mode: str, folder: Path, flags: Sequence[str], read_line: ReadLine | None = None) -> float:
        words = [str(self._python), str(SCRIPTS / self._script), mode, f"--data={self._data}", f"--output={folder}"]
        variables = make_variables(ours=self.in_ours)
        return run([*words, *self._flags, *flags], folder.with_suffix(f".{mode}.log"), variables, read_line)


class KerasPeer(Peer):
    """A program in Keras and tf.data, in our environment."""

    in_ours = True

    def _find_python(self) -> Path:
        return Path(sys.executable)


class ClassifierPeer(Peer):
    """A classifier in PyTorch, which says the classes of each test image."""

    def score(self, folder: Path) -> Scores:
        """Classify the test images, which is none of the budget, and count where the folder's class is named."""
        self._run("classify", folder, [])
        named: dict[str, list[str]] = json.loads((folder / "classes.json").read_text(encoding="utf-8"))
        return Scores(count_right(self._data / "test", named), {})


def score_by_coco(truth: Path, detections: Path) -> Scores:
    """Return AP and AP50 of detections, and AP by class, by COCO's rules; a figure that is not defined is 0."""
    scored = score_detections(truth, detections)
    figures = {name: scored.figures[name] or 0.0 for name in ("AP", "AP50")}
    return Scores(figures, {each.name: each.ap or 0.0 for each in scored.classes})


def count_right(folder: Path, named: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return the shares of images whose class is the first, and among the first five, of those named for it.

    Args:
        folder: of folders of classes, with the images.
        named: classes of each image, the best first, by its path in the folder.

    Raises:
        TrainingError: images have no classes, or there are others.
    """
    images = {path.relative_to(folder).as_posix() for path in folder.glob("*/*") if path.is_file()}
    if named.keys() != images:
        raise TrainingError(f"named classes of {len(named)} images, and {len(named.keys() & images)} of {len(images)}")
    places = [classes.index(name.partition("/")[0]) for name, classes in named.items()]
    return {f"top-{most}": sum(place < most for place in places) / len(places) for most in (1, 5)}


def fit_steps(seconds: float, marks: Mapping[int, float], total: float, per_epoch: int) -> Length:
    """Fit the length of ssd_train to processor seconds, by its own rule for `--minutes`.

    Args:
        seconds: of the budget.
        marks: processor seconds of the measured run until each of its steps.
        total: processor seconds of the measured run.
        per_epoch: steps of an epoch.
    """
    step = statistics.median(marks[one] - marks[one - 1] for one in range(3, STEPS + 1) if one != EVERY + 1)
    evaluation = max(0.0, marks[EVERY + 1] - marks[EVERY] - step)
    start = max(0.0, marks[2] - 2 * step)
    report = max(0.0, total - marks[STEPS] - evaluation - END_SECONDS)
    return fit_length(seconds - start, Speed(step, evaluation, report), per_epoch)


def fit_epochs(seconds: float, measured: Mapping[int, float]) -> int:
    """Return the epochs that fit into processor seconds, at least one.

    Args:
        seconds: of the budget.
        measured: seconds of some numbers of epochs, 0 for those until the first step; the two largest numbers count.
    """
    fewer, more = sorted(measured)[-2:]
    per_epoch = (measured[more] - measured[fewer]) / (more - fewer)
    if per_epoch <= 0:
        raise TrainingError(f"{more} epochs took {measured[more]:.1f} s, and {fewer} {measured[fewer]:.1f} s")
    return max(1, fewer + int((seconds - measured[fewer]) // per_epoch))


def mark_step(marks: dict[int, float], line: str, read_seconds: Callable[[], float]) -> None:
    """Keep the seconds until the step that a line of ssd_train tells."""
    if found := _STEP.match(line):
        marks[int(found[1])] = read_seconds()


def mark_start(marks: list[float], line: str, read_seconds: Callable[[], float]) -> None:
    """Keep the seconds until another program says that its first step is next."""
    if line.strip() == BEGINS:
        marks.append(read_seconds())


def run(command: Sequence[str], log: Path, variables: Mapping[str, str], read_line: ReadLine | None = None) -> float:
    """Run a command, and return its processor seconds.

    Raises:
        TrainingError: it failed; the last line of its log is told.
    """
    spent = run_measured(command, log, environment=variables, read_line=read_line)
    if spent.status:
        lines = log.read_text(encoding="utf-8").strip().splitlines()
        raise TrainingError(f"ended with status {spent.status}: {lines[-1][:200] if lines else 'without a word'}")
    return spent.seconds


def make_variables(*, ours: bool) -> dict[str, str]:
    """Return the environment of a program, which has one thread; that of others has none of our packages."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if ours:
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**variables, **ONE_THREAD, "PYTHONUNBUFFERED": "1"}


def make_file_name(name: str) -> str:
    """Return a name as one of a folder."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_")
