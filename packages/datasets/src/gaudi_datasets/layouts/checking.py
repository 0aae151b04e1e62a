"""Check all images of a source before the first step, so that a damaged one does not end a training hours later."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from gaudi_datasets.documents import load_json
from gaudi_datasets.errors import BadImageError, DataError, MissingInputError
from gaudi_datasets.image_files import check_image, check_pixels, read_size, require_size, stat_image
from gaudi_datasets.layouts.file_checksums import cache_folder
from gaudi_datasets.layouts.inventory import OnBadImage, count_names
from gaudi_datasets.layouts.threads import map_threads
from gaudi_datasets.program import ProgressLine, count_things
from gaudi_datasets.records.record_sets import RecordSet
from gaudi_ops.files import hold_lock, read_file, write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_datasets.classification.listed_files import ListedSource
    from gaudi_datasets.classification.sources import RecordSource as ClassificationRecords
    from gaudi_datasets.detection.sources import CocoSource
    from gaudi_datasets.detection.sources import RecordSource as DetectionRecords
    from gaudi_datasets.showing import Source

    # Each tells the file that holds an image.
    StoredSource: TypeAlias = CocoSource | ListedSource | DetectionRecords | ClassificationRecords

_SHOWN = 3  # images in the message
_REMEMBERED = 1000


class BrokenImagesError(DataError):
    """Images of a source that cannot be used; `errors` holds the faults of the first thousand in their order."""

    def __init__(self, name: str, errors: Sequence[DataError | MissingInputError], count: int, total: int) -> None:
        shown = "; ".join(_describe(error) for error in errors[:_SHOWN])
        more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
        super().__init__(
            f"{count} of {total} images cannot be used: {shown}{more}",
            path=name,
            remedy="fetch or convert them again, or take them out of the data",
        )
        self.errors, self.count, self._arguments = tuple(errors), count, (name, tuple(errors), count, total)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


def _describe(error: DataError | MissingInputError) -> str:
    """Return an error without its remedy, of which one for all is enough."""
    return str(error).removesuffix(f"; {error.remedy}")


def read_sizes(paths: Sequence[Path], name: str, notes: list[str] | None = None) -> dict[Path, tuple[int, int]]:
    """Read height and width in pixels of images in threads, as people see them; `name` is that of the data set.

    With `notes`, images that cannot be read are left out and noted.

    Raises:
        BrokenImagesError: some cannot be read; it names the first and counts all.
    """
    progress, found = ProgressLine("reading sizes"), list[tuple[int, int] | DataError | MissingInputError]()

    def read(path: Path) -> tuple[int, int] | DataError | MissingInputError:
        try:
            return read_size(path)
        except (DataError, MissingInputError) as error:
            return error

    for size in map_threads(read, paths):
        found.append(size)
        progress(len(found), len(paths))
    faults = {path: each for path, each in zip(paths, found, strict=True) if isinstance(each, Exception)}
    if faults and notes is None:
        raise BrokenImagesError(name, [*faults.values()][:_REMEMBERED], len(faults), len(paths))
    if faults and notes is not None:
        notes.append(f"left out {count_names([path.name for path in faults], 'image', 'that cannot be read')}")
    return {path: each for path, each in zip(paths, found, strict=True) if not isinstance(each, Exception)}


Checked = TypeVar("Checked")


def check_when_read(source: Checked, on_bad_image: OnBadImage = "fail", *, verify: bool = False) -> Checked:
    """Return a source that checks each image when it is first read: all of a JPEG's data is decoded.

    What was decoded whole is remembered in the user's cache by the fingerprint of the data, and is not decoded for this
    again; neither are records that were decoded when they were written.

    With `verify` all are read at once, compared with their checksums, and what has none is told.

    Raises:
        BrokenImagesError: with `verify`, images cannot be used.
        BadImageError: on reading an image that cannot be decoded whole, unless it is skipped.
    """
    checked: Any = _CheckedSource(source, on_bad_image)
    if verify:
        check_all(checked, ProgressLine("verifying"))
        unchecked = getattr(source, "unchecked", "")
        say("; ".join(filter(None, (f"verified {checked.name}: {count_things(len(checked), 'image')}", unchecked))))
    return cast("Checked", checked)


class _CheckedSource:
    """A source that has checked what was read; its `read` may be called from several threads."""

    def __init__(self, source: Any, on_bad_image: OnBadImage) -> None:
        self._source, self._skips = source, on_bad_image == "skip"
        self._bad, self._lock = set[int](), threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._skips:  # each process would tell of each bad image, and count its own alone
            raise TypeError("what skips images is of one process")
        return type(self), (self._source, "fail")

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Any:
        """Read an image, or the next good one in place of a bad one, which is the same for all ranks and epochs."""
        if not self._skips:
            return self._read(index)
        for place in range(index, index + len(self)):
            row = place % len(self)
            try:
                if row not in self._bad:
                    return self._read(row)
            except BadImageError as error:
                with self._lock:
                    if row not in self._bad:  # another thread may have met it
                        self._bad.add(row)
                        say(f"warning: skipped bad image {len(self._bad)} of {len(self)}: {error}", error=True)
        raise BadImageError("has no image that can be decoded whole", path=self._source.name)

    def _read(self, index: int) -> Any:
        decoded = self._decoded  # with the fingerprint, by whose checksums the image is compared when it is read
        example = self._source.read(index)
        if not decoded.flags[index]:
            check_pixels(example.encoded, f"{self._source.name}: image {index} ({example.file_name})")
            decoded.add(index)
        return example

    @functools.cached_property
    def _decoded(self) -> _DecodedImages:
        if getattr(self._source, "is_decoded", False):
            return _DecodedImages("", bytearray(b"\1" * len(self)))
        fingerprint = str(getattr(self._source, "fingerprint", ""))
        return _DecodedImages(fingerprint, bytearray(len(self)))


def _leave() -> None:
    """Write nothing down while another process does."""
    raise BlockingIOError


class _DecodedImages:
    """Which images of a data set were decoded whole; remembered from process to process, by its fingerprint.

    Args:
        fingerprint: of the data; empty: nothing is remembered.
        flags: 1 for each image that is known to be whole; those that are remembered are added.
    """

    def __init__(self, fingerprint: str, flags: bytearray) -> None:
        self.flags, self._new, self._lock = flags, 0, threading.Lock()
        self._path: Path | None = None
        if fingerprint:
            self._path = cache_folder("decoded") / hashlib.sha256(f"{fingerprint} {len(flags)}".encode()).hexdigest()
            self._join()

    def add(self, index: int) -> None:
        """Add an image; one in 64 of them is a reason to write all down, unless another thread or process does.

        It waits for no lock, see `gaudi_datasets.detection.pipeline`.
        """
        self.flags[index] = 1
        self._new += 1
        if self._path is None or self._new < -(-len(self.flags) // 64) or not self._lock.acquire(blocking=False):
            return
        try:
            self._new = 0
            with contextlib.suppress(OSError), hold_lock(self._path.with_suffix(".lock"), waiting=_leave):
                self._join()  # of other ranks
                bits = np.packbits(np.frombuffer(self.flags, np.uint8)).tobytes()
                write_file(self._path, hashlib.sha256(bits).digest() + bits, durable=False)
        finally:
            self._lock.release()

    def _join(self) -> None:
        """Add what is remembered; nothing where the file is not whole."""
        try:
            content = b"" if self._path is None else read_file(self._path)
        except OSError:
            return
        digest, bits = content[:32], content[32:]
        if len(bits) == -(-len(self.flags) // 8) and hashlib.sha256(bits).digest() == digest:
            known = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self.flags))
            np.frombuffer(self.flags, np.uint8)[known == 1] = 1


def check_all(
    source: Source, progress: Callable[[int, int], None] | None = None, on_bad_image: OnBadImage = "fail"
) -> None:
    """Read every image of a source in threads, and check that it can be decoded and has its annotated size.

    The structure of a JPEG or PNG is walked through; what this leaves in doubt is decoded.

    Args:
        source: of either kind.
        progress: is called with the numbers of images checked and of all, by one thread at a time.
        on_bad_image: whether images that cannot be decoded count.

    Raises:
        BrokenImagesError: some cannot be used; it names the first and counts all.
    """
    total, done, lock = len(source), 0, threading.Lock()
    is_record = isinstance(source, RecordSet)

    def check(index: int) -> DataError | MissingInputError | None:
        nonlocal done
        fault: DataError | MissingInputError | None = None
        try:
            example = source.read(index)
            if is_record:  # files are checked as they are read
                place = f"{source.name}: record {index}"
                image = check_image(example.encoded, place, decode=False, upright=False)
                require_size((image.height, image.width), (example.height, example.width), place)
        except BadImageError as error:
            fault = None if on_bad_image == "skip" else error
        except (DataError, MissingInputError) as error:
            fault = error
        with lock:
            done += 1
            if progress is not None:
                progress(done, total)
        return fault

    faults = [fault for fault in map_threads(check, range(total)) if fault is not None]
    if faults:
        raise BrokenImagesError(source.name, faults[:_REMEMBERED], len(faults), total)


def check_sources(
    sources: Mapping[str, StoredSource], known: Path, on_bad_image: OnBadImage = "fail"
) -> dict[str, str]:
    """Check the images of the splits of a data set before training, unless they were checked as they are now.

    Args:
        sources: by split.
        known: JSON file of what an earlier call returned, if it is there; files of the same sizes and times of change
            are not read again.
        on_bad_image: what training does at images that cannot be decoded; no other split may have any.

    Returns:
        a hash of what was checked, by split.

    Raises:
        BrokenImagesError: images of some splits cannot be used; all splits are checked before.
        MissingInputError: a file is not there.
    """
    states = {split: hash_state(source) for split, source in sources.items()}
    try:
        before = load_json(known)
    except (DataError, MissingInputError):
        before = None
    before = before if isinstance(before, dict) else {}
    new = {split: sources[split] for split, state in states.items() if before.get(split) != state}
    broken, start = list[BrokenImagesError](), time.monotonic()
    for split, source in new.items():
        try:
            check_all(source, ProgressLine(f"checking {split}"), on_bad_image if split == "train" else "fail")
        except BrokenImagesError as error:
            broken.append(error)
    if len(broken) > 1:
        faults = [fault for error in broken for fault in error.errors]
        total = sum(map(len, new.values()))
        raise BrokenImagesError(", ".join(new), faults, sum(error.count for error in broken), total)
    if broken:
        raise broken[0]
    if new:
        images = count_things(sum(map(len, new.values())), "image")
        say(f"checked {images} in {time.monotonic() - start:.1f} s")
    return states


def hash_state(source: StoredSource) -> str:
    """Hash the data of a source, and the paths, sizes and times of change of its files; no file is read.

    Raises:
        MissingInputError: a file is not there.
    """
    paths = dict.fromkeys(source.path(index) for index in range(len(source)))
    files = [(str(path), status.st_size, status.st_mtime_ns) for path in paths if (status := stat_image(path))]
    return hashlib.sha256(json.dumps([source.fingerprint, files]).encode()).hexdigest()
