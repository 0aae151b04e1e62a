"""Records written in parallel: the same files for any number of processes, and continued where they were stopped.

Shards come to be in a hidden folder inside the output folder, and stay there when the program is stopped or killed.
When all are whole they are renamed to where they belong, the manifest last; what is replaced and what is renamed is
written down before, so that this can be stopped at any time too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import google_crc32c

from gaudi_datasets.documents import CHECKSUM, load_json, require_seal, seal
from gaudi_datasets.errors import DataError, FlagError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.stores import find_copy, is_url
from gaudi_datasets.memory import count_processors
from gaudi_datasets.output_files import resumable_folder, write_json
from gaudi_datasets.records.manifests import (
    DECODED,
    INDEX,
    JOB,
    JOB_IDENTITY,
    MANIFEST_FORMAT,
    MANIFEST_VERSION,
    UNSEALED_VERSION,
    index_path,
)
from gaudi_datasets.records.tfrecords import checksum_file, encode_index, frame_parts
from gaudi_ops.files import (
    open_regular_file,
    publish_file,
    read_text,
    sync_file,
    sync_folder,
    write_atomically,
    write_file,
)
from gaudi_ops.program import hold_interrupts

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized


_REFRESH_SECONDS = 0.5  # between two reports of what other processes have written
_RECORDS_WORTH_A_PROCESS = 256  # to start one takes about as long as writing these
_MOST_SHARDS = 1024  # or as many as there are examples; ImageNet's records have so many
_PLAN = "plan.json"


Encode = Callable[[int], tuple[bytes, str]]
"""Encodes the record of an example, and says what was fixed in it (empty for nothing); it can be pickled."""


WriteShard: TypeAlias = Callable[[int, Callable[[], None]], dict[str, Any]]
"""Writes the shard of a number, see `_write_shard`; it can be pickled."""


def write_shards(
    encode: Encode,
    count: int,
    output_dir: str | Path,
    split: str,
    *,
    manifest: Mapping[str, Any],
    fingerprint: str,
    shards: int,
    suffix: str = ".tfrecord",
    processes: int = 0,
    overwrite: bool = False,
    decoded: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write `<split>-00000-of-0000N.tfrecord` and so on, and the manifest `<split>.json`, into `output_dir`.

    Record i is in shard i % shards, so that the shards in turn give the order of the examples. Beside them,
    `<split>.index` tells where each record is, so that who reads them need not look at each. All files appear at the
    end. A call that was stopped, even by a kill, is continued by the same call, with the same result; after its end the
    same call does nothing.

    Args:
        encode: makes the record of an example.
        count: number of examples.
        output_dir: made when it is not there; or the URL of a folder, which gets each shard as soon as it is whole.
        split: what the file names begin with.
        manifest: what the manifest tells beside the shards: at least `kind`.
        fingerprint: of all that the records are made of; shards of an earlier call with another one are not used.
        shards: number of files.
        suffix: what the shards' names end with.
        processes: how many work at once; 0: one for each usable core, as far as they are worth their start.
        overwrite: replace an earlier conversion of this split.
        decoded: `encode` decodes each image whole, which the manifest tells; the fingerprint must, too.
        progress: called with the records done and their number.

    Returns:
        The manifest, with `fixed` (number of records by what was fixed in them), `shards` (name, records, bytes and
        CRC-32C of each) and `index` (SHA-256 of that file).

    Raises:
        UnsafeError: records of this split that were made of something else are there and `overwrite` is not set, or are
            in no manifest; another process is writing them; or another call was stopped while its shards were renamed,
            and one of them was changed since. If none was, that call is finished first.
        DataError: the same call was done before, and its manifest or a shard was changed since.
        ChildProcessError: a worker process was killed.
        FlagError: there would be more shards than 1024, or than examples.
        ValueError: `split` is no plain word, or `shards` or `processes` is out of range.
    """
    if not re.fullmatch(r"\w+", split) or shards < 1 or processes < 0:
        raise ValueError(
            f"split {split!r}, {shards} shards, {processes} processes: must be a word, above 0, at least 0"
        )
    if shards > (most := max(count, _MOST_SHARDS)):
        raise FlagError(f"--shards {shards}: must be at most {most}", flag="--shards", remedy="give fewer")
    url, output_dir = output_dir, find_copy(output_dir, "conversions")
    staging = unfinished_folder(output_dir, split)
    pattern = f"{split}-{{:05d}}-of-{shards:05d}{suffix}"
    described = json.dumps([UNSEALED_VERSION, fingerprint, count, pattern, dict(manifest)])
    identity = hashlib.sha256(described.encode()).hexdigest()
    write = functools.partial(_write_shard, encode, count, staging, pattern, shards)
    write_all = functools.partial(_write_all, write, count, shards, staging, processes, progress)

    head = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, JOB_IDENTITY: identity, "split": split}
    head |= {DECODED: True} if decoded else {}
    describe = functools.partial(_describe, {**head, **manifest})
    if is_url(url):
        from gaudi_datasets.records.stored_conversion import write_shards_to_store

        names = [pattern.format(number) for number in range(shards)]
        return write_shards_to_store(url, split, staging, names, write_all, describe, identity, overwrite=overwrite)
    with resumable_folder(staging):
        job, plan = staging / JOB, _read_plan(staging / _PLAN)
        if plan is not None and plan["manifest"][JOB_IDENTITY] == identity:
            _write_again(plan["manifest"]["shards"], write, staging, output_dir)
            return _publish(plan, staging, output_dir, split)
        if plan is not None:
            _publish_other(plan, staging, output_dir, split)
        if plan is not None or not job.exists() or read_text(job, errors="replace") != identity:
            shutil.rmtree(staging)  # else of a job that was stopped, what is whole is kept
            staging.mkdir()
        finished = None if overwrite else _find_finished(output_dir, split, identity)
        if finished is not None:
            return finished
        there = _records_to_replace(output_dir, split, overwrite)
        write_file(job, identity)
        written = write_all()
        index = encode_index([staging / shard["name"] for shard in written])
        write_file(index_path(staging, split), index)
        document = seal(describe(written, index))
        replaced = [path.name for path in there if path.name not in {shard["name"] for shard in written}]
        plan = seal({"replaced": replaced, "manifest": document})
        write_json(staging / _PLAN, plan)
        return _publish(plan, staging, output_dir, split)


def _describe(head: Mapping[str, Any], written: list[dict[str, Any]], index: bytes) -> dict[str, Any]:
    """Return the manifest of shards and of their index; their numbers of fixed records are counted together."""
    fixed = Counter[str]()
    for shard in written:
        fixed.update(shard.pop("fixed"))
    told = {"fixed": dict(sorted(fixed.items())), "shards": written, INDEX: hashlib.sha256(index).hexdigest()}
    return {**head, **told}


def unfinished_folder(output_dir: Path, split: str) -> Path:
    """Return the folder of the shards of a split while they are written."""
    return output_dir / f".unfinished-{split}"


def _write_shard(
    encode: Encode, count: int, folder: Path, pattern: str, shards: int, number: int, tell: Callable[[], None]
) -> dict[str, Any]:
    """Write one shard, and call `tell` after each record.

    Returns:
        what the manifest tells of it, and how many of its records were fixed, by what it was.
    """
    path = folder / pattern.format(number)
    fixed, records, size, checksum = Counter[str](), 0, 0, 0
    with write_atomically(path, durable=False) as file:  # `_write_all` waits for the disk
        for index in range(number, count, shards):
            content, fix = encode(index)
            for part_of_record in frame_parts(content):  # joined they would be copied
                file.write(part_of_record)
                checksum = google_crc32c.extend(checksum, part_of_record)
                size += len(part_of_record)
            records += 1
            fixed.update([fix] if fix else [])
            tell()
    # CRC-32C, in hexadecimal: SHA-256 would take as long as all the rest.
    return {"name": path.name, "records": records, "bytes": size, "crc32c": f"{checksum:08x}", "fixed": dict(fixed)}


def _find_finished(output_dir: Path, split: str, identity: str) -> dict[str, Any] | None:
    """Return the manifest of the same job, if it was done before and its shards are there, which are read for it."""
    path = output_dir / f"{split}.json"
    manifest = load_json(path) if path.exists() else None
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        return None
    require_seal(manifest, path, needed=manifest.get("version") != UNSEALED_VERSION)
    if manifest.get(JOB_IDENTITY) != identity:
        return None
    if not all((output_dir / shard["name"]).is_file() for shard in manifest["shards"]):
        return None
    for shard in manifest["shards"]:
        if checksum_file(output_dir / shard["name"]) != shard["crc32c"]:
            raise DataError(
                "is not the file that its manifest tells of",
                path=output_dir / shard["name"],
                field="crc32c",
                remedy="copy it again, or replace all with --overwrite",
            )
    if INDEX in manifest and not (index := index_path(output_dir, path.stem)).exists():
        write_file(index, encode_index([output_dir / shard["name"] for shard in manifest["shards"]]))
    return manifest


def _records_to_replace(output_dir: Path, split: str, overwrite: bool) -> list[Path]:
    """List the manifest and shards of an earlier conversion, which are removed when the new ones are whole."""
    manifest_path = output_dir / f"{split}.json"
    index = index_path(output_dir, split)
    there = [path for path in (manifest_path, index, *sorted(output_dir.glob(f"{split}-*"))) if path.exists()]
    if there and not overwrite:
        raise UnsafeError(
            f"has records of split {split!r} ({there[0].name})", path=output_dir, remedy="name another or --overwrite"
        )
    if there:
        manifest = load_json(manifest_path) if manifest_path.exists() else None
        shards = manifest.get("shards") if isinstance(manifest, Mapping) else None
        named = {shard.get("name") for shard in shards or [] if isinstance(shard, Mapping)} | {manifest_path.name}
        named |= {index.name} if isinstance(manifest, Mapping) and INDEX in manifest else set()
        stranger = next((path for path in there if path.name not in named), None)
        if stranger is not None or shards is None:
            raise UnsafeError(
                "was not written by an earlier conversion that a manifest tells of, so it is not overwritten",
                path=stranger or manifest_path,
                remedy="move it away",
            )
    return there


def _write_all(
    write: WriteShard,
    count: int,
    shards: int,
    staging: Path,
    processes: int,
    progress: Callable[[int, int], None] | None,
    is_whole: Callable[[Mapping[str, Any]], bool] | None = None,
    bring: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Write the shards that are not whole yet, in this process or in several; return all of them, in order.

    `bring` takes each shard to another place, where `is_whole` looks for those that are noted, and returns what else
    is noted of it.
    """
    notes = [staging / f"{number}.json" for number in range(shards)]  # each says that a shard is whole
    whole = {number: shard for number, path in enumerate(notes) if (shard := _read_note(path, is_whole)) is not None}
    missing = [number for number in range(shards) if number not in whole]
    if not processes:
        processes = min(count_processors(), count * len(missing) // shards // _RECORDS_WORTH_A_PROCESS)
    processes = min(processes, len(missing))
    before, own = sum(shard["records"] for shard in whole.values()), itertools.count(1)

    def tell(written: int) -> None:
        if progress is not None:
            progress(before + written, count)

    with contextlib.ExitStack() as stack:
        written: Iterable[dict[str, Any]] = (write(number, lambda: tell(next(own))) for number in missing)
        if processes > 1:  # closed with the folder still locked, so that no worker of a conversion that failed goes on
            written = stack.enter_context(contextlib.closing(_write_in_workers(write, missing, processes, tell)))
        for number, shard in zip(missing, written, strict=True):
            # Here, so that the workers go on meanwhile.
            with open_regular_file(staging / shard["name"]) as file:
                sync_file(file)
            if bring is not None:
                shard |= bring(shard)
            write_json(notes[number], seal(shard))
            whole[number] = shard
    return [whole[number] for number in range(shards)]


def _write_in_workers(
    write: WriteShard, numbers: Sequence[int], processes: int, tell: Callable[[int], None]
) -> Generator[dict[str, Any], None, None]:
    # Spawned, because a fork of a process that has loaded TensorFlow may hang.
    context = multiprocessing.get_context("spawn")
    written = context.Value("q", 0)
    count = written.get_obj()  # read without the lock, which a worker that is killed may hold for ever
    pool = ProcessPoolExecutor(processes, context, _start_worker, (write, written))
    try:
        left, ahead = iter(numbers), deque[Future[dict[str, Any]]]()
        while True:
            with hold_interrupts():
                more = itertools.islice(left, 2 * processes - len(ahead))  # not all, for those that wait take room
                ahead += [pool.submit(_write_in_worker, each) for each in more]
            if not ahead:
                return
            shard = ahead.popleft()
            while not wait([shard], _REFRESH_SECONDS).done:
                tell(count.value)
            tell(count.value)
            yield shard.result()
    except BrokenProcessPool:
        raise ChildProcessError(
            "a process that writes records was killed, maybe for lack of memory; repeat the command to go on, with"
            " fewer --processes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker_write: Callable[[int], dict[str, Any]] | None = None  # given once, since a source may be large


def _start_worker(write: WriteShard, written: Synchronized[int]) -> None:
    global _worker_write

    def tell() -> None:
        with written.get_lock():
            written.value += 1

    _worker_write = lambda number: write(number, tell)  # noqa: E731 - not pickled
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program that started this one ends it
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this process when the program that started it is gone, even if it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_in_worker(number: int) -> dict[str, Any]:
    if _worker_write is None:
        raise RuntimeError("the worker was not started by _start_worker")
    return _worker_write(number)


def _read_note(path: Path, is_whole: Callable[[Mapping[str, Any]], bool] | None) -> dict[str, Any] | None:
    """Read the note of a shard; None where it or the shard was changed since, which is written again then."""

    def is_here(shard: Mapping[str, Any]) -> bool:
        return checksum_file(path.with_name(shard["name"])) == shard["crc32c"]

    try:
        noted = load_json(path)
        require_seal(noted, path)
        if not (is_whole or is_here)(noted):
            return None
    except (DataError, MissingInputError, FileNotFoundError):
        return None
    return {name: value for name, value in noted.items() if name != CHECKSUM}


def _read_plan(path: Path) -> dict[str, Any] | None:
    """Read the plan by which finished shards are renamed; None where none is there.

    Raises:
        UnsafeError: it was changed, so that nobody knows which files it replaces.
    """
    if not path.exists():
        return None
    try:
        plan: dict[str, Any] = load_json(path)
        require_seal(plan, path)
    except DataError:
        raise UnsafeError(
            "was changed or is damaged",
            path=path,
            remedy="remove its folder and the records of this split, and repeat the command",
        ) from None
    return plan


def _write_again(rows: Sequence[Mapping[str, Any]], write: WriteShard, staging: Path, output_dir: Path) -> None:
    """Write the shards of a plan that were changed since, as they were.

    Raises:
        UnsafeError: one becomes another one, because a library that encodes images is of another version.
    """
    for number in _list_changed(rows, staging, output_dir):
        name, shard = rows[number]["name"], write(number, lambda: None)
        if shard["crc32c"] != rows[number]["crc32c"]:
            raise UnsafeError(
                "was changed, and cannot be written again as it was",
                path=output_dir / name,
                remedy=f"remove {staging} and the records of this split, and repeat the command",
            )
        with open_regular_file(staging / name) as file:
            sync_file(file)


def _publish_other(plan: Mapping[str, Any], staging: Path, output_dir: Path, split: str) -> None:
    """Finish the renaming of another call that was stopped in it: some of the records that it replaces are gone.

    Raises:
        UnsafeError: a shard was changed since; only that call could write it again.
    """
    rows = plan["manifest"]["shards"]
    for number in _list_changed(rows, staging, output_dir):
        raise UnsafeError(
            f"was changed since a conversion of split {split!r} from something else was stopped",
            path=output_dir / rows[number]["name"],
            remedy=f"repeat that one, or remove {staging} and the records of this split",
        )
    _publish(plan, staging, output_dir, split)


def _list_changed(rows: Sequence[Mapping[str, Any]], staging: Path, output_dir: Path) -> list[int]:
    """List the numbers of a plan's shards that are in neither folder as they were written."""
    changed = []
    for number, row in enumerate(rows):
        draft, published = staging / row["name"], output_dir / row["name"]
        path = draft if draft.exists() else published
        if not path.is_file() or checksum_file(path) != row["crc32c"]:
            changed.append(number)
    return changed


def _publish(plan: Mapping[str, Any], staging: Path, output_dir: Path, split: str) -> dict[str, Any]:
    """Do what the plan says; whatever was done of it before does not matter."""
    document: dict[str, Any] = plan["manifest"]
    path = output_dir / f"{split}.json"
    path.unlink(missing_ok=True)
    for name in plan["replaced"]:
        (output_dir / name).unlink(missing_ok=True)
    for shard in document["shards"]:
        if (staging / shard["name"]).exists():
            publish_file(staging / shard["name"], output_dir / shard["name"])
    draft = index_path(staging, split)
    if draft.exists():
        publish_file(draft, index_path(output_dir, split))
    # Beside the plan and not in place of it: until the folder is gone all this may be repeated.
    write_json(staging / path.name, document)
    publish_file(staging / path.name, path)
    sync_folder(output_dir)
    return document
