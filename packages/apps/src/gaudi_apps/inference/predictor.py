"""Load trained weights, and predict on images and videos: read in batches, draw, write, and show progress."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gaudi_apps.inference.addresses import Address, Source
from gaudi_apps.inference.exported_models import FOLDER, FORMATS, CheckedExport, choose_export, require_weights
from gaudi_apps.inference.media import InputImage, Preprocessor, VideoWriter, find_files, make_batches, read_images
from gaudi_apps.inference.visualizer import Image, write_image
from gaudi_apps.runtime.errors import StopRequest, require_argument
from gaudi_apps.training.checkpoint import BEST, find_run_checkpoint, load_checkpoint
from gaudi_apps.training.run_dir import fetch_weights
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.output_files import take_name, write_json
from gaudi_datasets.program import count_things, make_console
from gaudi_models.weights import LoadReport, WeightsFile, WeightsMetadata, assign_weights, read_weights
from gaudi_ops.files import publish_file, read_text, staging_folder
from gaudi_ops.program import describe_error, say

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import RuntimeFlag

Compute = Callable[[npt.NDArray[np.float32]], Sequence[npt.NDArray[Any]]]
Computed: TypeAlias = tuple[list[InputImage], Sequence[npt.NDArray[Any]]]
AnyResults = TypeVar("AnyResults", bound="Results")
Item = TypeVar("Item")


class Results(ABC):
    """Collect predictions, and draw them into a folder; a context manager that finishes the videos.

    Attributes:
        tables: names of the files that `write_tables` writes; the last one lists the bad files.
        files: of these and of others, what is written.
        images: a row for each image and each frame.
        bad_files: a row for each file that could not be used.
    """

    tables: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Path, *, draws: bool = True) -> None:
        self.images: list[dict[str, Any]] = []
        self.bad_files: list[dict[str, Any]] = []
        self.folder, self.draws = folder, draws
        self.files: list[str] = list(self.tables)
        self._taken: set[str] = set()
        self._video: tuple[Source, VideoWriter] | None = None  # the one whose frames are being read

    def __enter__(self: AnyResults) -> AnyResults:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_video()

    @abstractmethod
    def add(self, image: InputImage, *outputs: npt.NDArray[Any]) -> list[str]:
        """Keep and draw the predictions of an image; return the lines to show."""

    @abstractmethod
    def count(self) -> str:
        """Return the number of results in words."""

    @abstractmethod
    def write_tables(self) -> None:
        """Write the collected results into the folder."""

    def add_image(self, image: InputImage, drawn: Image | None) -> dict[str, Any]:
        """Write a drawn image, or add it to its video, where there is one; return its row."""
        row = _name_file(image.image_id, image.path)
        row |= {"height": image.height, "width": image.width}
        row["drawn"] = None if drawn is None else self._write_drawn(image, drawn)
        self.images.append(row if image.frame is None else row | {"frame": image.frame})
        return self.images[-1]

    def describe(self, output_dir: Path, counts: str = "") -> str:
        """Describe the results in a line, with counts besides that of images, and the bad files in another."""
        files = " and ".join([", ".join(self.files)] * bool(self.files) + ["what was drawn"] * self.draws)
        line = f"{output_dir}: {self.count_images()}{counts}; {files}"
        if not self.bad_files:
            return line
        count = len({row["path"] for row in (*self.images, *self.bad_files)})
        reason = f"; {self.tables[-1]} says why" if self.tables[-1] in self.files else ""
        return f"{line}\n{len(self.bad_files)} of {count_things(count, 'file')} could not be used{reason}"

    def count_images(self) -> str:
        """Return the number of images, and of frames of videos, in words."""
        frames = sum("frame" in row for row in self.images)
        counts = {"image": len(self.images) - frames, "frame": frames}
        return " and ".join(count_things(count, noun) for noun, count in counts.items() if count) or "0 images"

    def _write_drawn(self, image: InputImage, drawn: Image) -> str:
        """Write a PNG, or add a frame to the video of the file; return the name of the file."""
        find_name = partial(take_name, image.path.name, image.image_id, self._taken)
        if image.frame is None:
            path = self.folder / f"{find_name()}.png"  # the whole name before it: a.jpg and a.png are two
            write_image(path, drawn)
            return path.name
        if self._video is None or self._video[0] != image.path:
            self._close_video()
            self._video = image.path, VideoWriter(self.folder / find_name(), image.rate)
        return self._video[1].write(drawn).name

    def _close_video(self) -> None:
        if self._video is not None:
            (_, writer), self._video = self._video, None
            writer.close()


def find_inputs(inputs: Sequence[str], output_dir: Path) -> list[Source]:
    """Find the files to predict on, see `find_files`, without those that an earlier prediction wrote into a folder.

    Raises:
        MissingInputError, FlagError: as by `find_files`; also where there are no others.
    """
    files = find_files(inputs, tells=True)
    own = {output_dir.resolve() / name for name in _read_manifest(output_dir / MANIFEST)}
    left = [path for path in files if isinstance(path, Address) or path.parent.resolve() / path.name not in own]
    told = f"{count_things(len(files) - len(left), 'file')} of an earlier prediction left out"
    if not left:
        raise MissingInputError(told, path=output_dir, remedy="give other images")
    if len(left) < len(files):
        say(f"{output_dir}: {told}", error=True)
    return left


def predict_files(
    compute: Compute,
    files: Sequence[Source],
    prepare: Preprocessor,
    make_results: Callable[[Path], AnyResults],
    output_dir: Path,
    *,
    batch_size: int,
    strict: bool,
    max_frames: int = 0,
    side_by_side: int = 1,
    write_lines: Callable[..., None] = say,
) -> AnyResults:
    """Predict on each image and each frame of the files; `output_dir` gets all results at the end, or nothing.

    Where a camera or an address is among them, Ctrl-C or SIGTERM ends the reading, and the results are written.

    Args:
        compute: returns the outputs of a batch, float32 [batch, side, side, 3].
        files: from `find_inputs`.
        prepare: see `Preprocessor`.
        make_results: makes the Results of a folder.
        output_dir: made when it is not there; the files that an earlier prediction wrote are replaced or removed.
        batch_size: images at once, at most; more than 16 are split, so that the next ones are read meanwhile.
        strict: raise an error for the first bad file, instead of skipping it.
        max_frames: of each video and stream, from its first one on; 0: all.
        side_by_side: number of threads that may call `compute` at once.
        write_lines: gets the lines to show of an image.

    Raises:
        DataError: no file can be used, or `strict` is set and a file is bad.
        UnsafeError: a result would take the place of a file of others, or of one that was changed.
        OSError: the results cannot be written.
    """
    places = {path: place for place, path in enumerate(files, 1)}
    stop = StopRequest() if any(isinstance(path, Address) for path in files) else None
    asked = contextlib.nullcontext() if stop is None else stop  # which is false until a signal comes
    with staging_folder(output_dir) as draft, FileProgress(len(files)) as progress, asked, ExitStack() as stack:
        with make_results(draft) as results:
            _require_free(results.files, output_dir)  # what is known before the work

            def skip(image_id: int, path: Source, error: Exception) -> None:
                if strict or (len(files) == 1 and isinstance(path, Address) and not results.images):
                    raise error
                results.bad_files.append({**_name_file(image_id, path), "error": describe_error(error)})
                progress.note(f"skipped: {describe_error(error)}")

            images = read_images(files, prepare, skip, max_frames=max_frames)
            if stop is None:
                images = stack.enter_context(contextlib.closing(read_ahead(images, READ_AHEAD, measure=_count_bytes)))
            most = max(1, min(batch_size, LARGEST_BATCH))
            batches = make_batches(itertools.takewhile(lambda _: not stop, images), most)
            compute_one = partial(_compute_batch, compute)
            computed: Iterator[Computed] = map(compute_one, batches)
            if stop is None:  # what happens now is neither read nor computed before it is asked for
                ahead = compute_ahead(compute_one, batches, side_by_side)
                computed = stack.enter_context(contextlib.closing(read_ahead(ahead, 1)))
            for batch, outputs in computed:
                for image, *rows in zip(batch, *outputs, strict=True):
                    if lines := results.add(image, *rows):
                        write_lines(*lines)
                counted = f"{count_things(len(results.images), 'image')}, {results.count()}"
                progress.update(places[batch[-1].path], counted)
        if not results.images:
            reason = f"; the first: {results.bad_files[0]['error']}" if results.bad_files else ""
            raise DataError(f"none of {len(files)} files can be used{reason}")
        results.write_tables()
        _publish(draft, output_dir)
    return results


def compute_ahead(
    compute: Callable[[list[InputImage]], Computed], batches: Iterator[list[InputImage]], side_by_side: int
) -> Generator[Computed, None, None]:
    """Yield what is computed of batches, in their order, while so many others are computed by threads.

    Fewer are where their pixels take much memory. An error in reading comes after the batches that were read.
    """
    executor, error = ThreadPoolExecutor(side_by_side), None
    started: deque[tuple[int, Future[Computed]]] = deque()  # with the bytes of each
    try:
        while True:
            while error is None and len(started) <= side_by_side and sum(size for size, _ in started) < BYTES_AHEAD:
                try:
                    batch = next(batches)
                    started.append((sum(map(_count_bytes, batch)), executor.submit(compute, batch)))
                except Exception as one:
                    error = one
            if not started:
                break
            yield started.popleft()[1].result()
        if error is not None and not isinstance(error, StopIteration):
            raise error
    finally:
        executor.shutdown(cancel_futures=True)


def _compute_batch(compute: Compute, batch: list[InputImage]) -> Computed:
    return batch, compute(np.stack([image.network_input for image in batch]))


def _count_bytes(image: InputImage) -> int:
    return 3 * image.height * image.width + image.network_input.nbytes


LARGEST_BATCH = 16  # one thread reads and prepares some hundred images a second, so larger ones would wait for it
BATCH_BESIDE_OTHERS = 4  # so that those that compute end at nearly the same time
READ_AHEAD, BYTES_AHEAD = 2 * LARGEST_BATCH, 128 * 2**20  # images, and bytes of them


def read_ahead(
    items: Iterator[Item], depth: int, *, measure: Callable[[Item], int] = lambda _: 0, most_bytes: int = BYTES_AHEAD
) -> Generator[Item, None, None]:
    """Yield items in their order, while a thread reads some of the next ones; an error comes at its place.

    Decoding and resizing let go of Python's lock, so they run beside the network.

    Args:
        items: are read by one thread, one after the other.
        depth: number of items that are read before they are asked for, at most.
        measure: returns the bytes of an item.
        most_bytes: no other item is read while those that wait have as many; so one item more may be in memory.
    """
    ready: deque[tuple[list[Item], Exception | None]] = deque()  # neither an item nor an error: the end
    change, has_left, sizes = threading.Condition(), False, deque[int]()

    def read() -> None:
        while True:
            with change:
                change.wait_for(lambda: has_left or (len(sizes) < depth and sum(sizes) < most_bytes))
                if has_left:
                    break
            found, error = list[Item](), None
            try:
                found = [*itertools.islice(items, 1)]
            except Exception as one:
                error = one
            with change:
                sizes.append(measure(found[0]) if found else 0)
                ready.append((found, error))
                change.notify_all()
                if not found:
                    return
            del found  # which the next one may need the memory of
        if isinstance(items, Generator):
            items.close()  # here, for nobody else can while it runs

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while True:
            with change:
                change.wait_for(lambda: ready)
                found, error = ready.popleft()
                sizes.popleft()
                change.notify_all()
            if error is not None:
                raise error
            if not found:
                return
            yield found.pop()
    finally:
        with change:
            has_left = True
            change.notify_all()
        thread.join()


MANIFEST = ".predictions.json"
"""Names the files that a prediction wrote, each with its size and time, so that the next one can remove them."""


def _publish(draft: Path, output_dir: Path) -> None:
    """Move the files of a folder, and of those in it, to another one; nothing is moved where `_require_free` raises.

    Of what is there, the files that an earlier prediction wrote and nobody has changed are removed.
    """
    paths = {path.relative_to(draft).as_posix() + "/" * path.is_dir(): path for path in sorted(draft.rglob("*"))}
    files = {name: _mark_file(path) for name, path in paths.items() if not name.endswith("/")}
    earlier, root = _require_free(paths, output_dir), output_dir.resolve()
    for name, mark in earlier.items():
        path = root / name
        is_own = path.resolve() == path and path.is_relative_to(root) and path.is_file()
        if is_own and _mark_file(path) == mark:
            path.unlink()
            for parent in Path(name).parents[:-1]:
                with contextlib.suppress(OSError):  # not empty
                    (root / parent).rmdir()
    write_json(output_dir / MANIFEST, files)  # before they are there, should this be interrupted
    for name in files:
        (output_dir / name).parent.mkdir(parents=True, exist_ok=True)
        publish_file(draft / name, output_dir / name)


def _require_free(names: Iterable[str], output_dir: Path) -> dict[str, Any]:
    """Return what an earlier prediction wrote; raise UnsafeError where others have the name of a file or a folder/."""
    earlier = _read_manifest(output_dir / MANIFEST)
    for name in names:
        path = output_dir / name
        is_folder = name.endswith("/")
        if os.path.lexists(path) and not (path.is_dir() if is_folder else earlier.get(name) == _mark_file(path)):
            remedy = "give another --output_dir, or move it away"
            raise UnsafeError("is there, and not as a prediction wrote it", path=path, remedy=remedy)
    return earlier


def _mark_file(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_size, found.st_mtime_ns]


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read what an earlier prediction wrote; of a file that is none of ours, nothing is removed."""
    try:
        found = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name_file(image_id: int, path: Source) -> dict[str, Any]:
    """Return id, name and path of a file; COCO's file names have no folder, so the path is a field of its own."""
    return {"id": image_id, "file_name": path.name, "path": str(path)}


class FileProgress:
    """Show progress on standard error, so that standard output has results only.

    Args:
        total: number of files.
        console: where to show it; standard error when None.
        seconds_between_lines: between two plain lines where there is no terminal.
    """

    def __init__(self, total: int, *, console: Console | None = None, seconds_between_lines: float = 10.0) -> None:
        self._total = total
        self._console = console or make_console(stderr=True, soft_wrap=True)
        self._seconds, self._last_line = seconds_between_lines, time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.completed:.0f}/{task.total:.0f} files"),
                BarColumn(bar_width=None),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                expand=True,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # else results that go to a file would go to the terminal
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> FileProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, text: str) -> None:
        """Show the number of files that are done, and a text."""
        if self._bar:
            self._bar.update(self._task, completed=done, description=text)
        elif time.monotonic() - self._last_line >= self._seconds:
            self._last_line = time.monotonic()
            self.note(f"{done}/{self._total} files, {text}")

    def note(self, text: str) -> None:
        """Show a line, such as one about a bad file."""
        self._console.print(text)


Trained: TypeAlias = tuple[WeightsFile, WeightsMetadata]


def read_model(place: str | os.PathLike[str], runtime: RuntimeFlag) -> CheckedExport | Trained:
    """Read a trained network once: the export that a runtime is to run, see `find_export`, else the weights.

    Args:
        place: path or URL of a run, a checkpoint or an export.
        runtime: that computes.

    Raises:
        GaudiError, WeightsError: see `fetch_weights`, `require_weights`, `find_export` and `read_trained`.
        ValueError: there is no such runtime.
    """
    require_argument("runtime", runtime, "tensorflow", "auto", *FORMATS)
    path = require_weights(fetch_weights(place, *(() if runtime == "tensorflow" else (FOLDER,))))
    return find_export(path, runtime) or read_trained(path)


def name_model(found: CheckedExport | Trained) -> str | None:
    """Return the name of the network that `read_model` found; None where its file names none."""
    name: str | None = found.manifest.get("model") if isinstance(found, CheckedExport) else found[1].model
    return name


def read_trained(path: str | os.PathLike[str]) -> Trained:
    """Read the weights of a trained network with its classes.

    Args:
        path: the folder of a run, whose best or else newest checkpoint is read; a checkpoint; or an export, its
            folder or its file.

    Raises:
        MissingInputError: the run has no checkpoint.
        DataError: the file does not name the classes.
        WeightsError: it is damaged or of another format, or a `gaudi_models.MissingWeightsError`: it is not there.
    """
    weights = read_weights(_find_weights(Path(path)))
    if weights.metadata is None or not weights.metadata.classes:
        raise DataError("does not name its classes", path=path, remedy="use a run, a checkpoint or an export of ours")
    return weights, weights.metadata


def find_export(path: Path, runtime: RuntimeFlag) -> CheckedExport | None:
    """Choose an export for the checkpoint of a run that is used, see `choose_export`; None: the network is used.

    Raises:
        MissingInputError: there is no such export, or the path is not the folder of a run.
    """
    checkpoint = None if runtime == "tensorflow" else find_run_checkpoint(path)
    if checkpoint is not None:
        loaded = load_checkpoint(checkpoint)
        return choose_export(path, loaded.sha256, runtime, BEST if checkpoint.parent.name == BEST else str(loaded.step))
    if runtime == "auto":
        say(f"{path}: computes by tensorflow (it is not the folder of a run, so it has no exports)", error=True)
    if runtime in ("tensorflow", "auto"):
        return None
    raise MissingInputError(f"runtime {runtime}: is for the folder of a run", path=path)


def assign_all(model: Any, weights: WeightsFile) -> LoadReport:
    """Set all variables of a model.

    Raises:
        DataError: the weights are of another model, or of a part of it.
    """
    report = assign_weights(model, weights)
    if missing := [*report.initial, *report.other_shape]:
        raise DataError(
            f"has no {missing[0]} for this model, and {len(missing) - 1} others are missing",
            path=weights.path,
            remedy="use a whole trained model of this kind",
        )
    return report


def _find_weights(path: Path) -> Path:
    """Find the weights in the folder of a run or of an export; other paths are returned as they are."""
    exported = path / "weights.safetensors"
    return find_run_checkpoint(path) or (exported if exported.is_file() else path)
