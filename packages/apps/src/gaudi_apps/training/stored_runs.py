"""Runs in a store: --model_dir as a URL.

Such a run lives in a folder of this machine, its copy, which all else reads and writes as that of any run. What
changes there is brought to the store in the background, small files first, then the checkpoints, each with its manifest
last. So a checkpoint in the store is whole, or none. Only here is known that a run has a URL.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_apps.runtime.errors import warn
from gaudi_apps.training.checkpoint import (
    BEST,
    CHECKPOINTS,
    MANIFEST,
    RUN_FILE,
    TENSORS,
    CheckpointFolder,
    load_checkpoint,
    read_run_id,
    read_run_record,
)
from gaudi_apps.training.run_dir import LOCK
from gaudi_datasets.errors import DataError, GaudiError, MissingInputError, TransferError, UnsafeError
from gaudi_datasets.fetching.copies import LAST_NAMES
from gaudi_datasets.fetching.stores import find_copy, is_url, list_copies, require_plain_url
from gaudi_datasets.fetching.uploads import WritableStore
from gaudi_datasets.output_files import write_json
from gaudi_ops.files import hold_lock, read_file, read_text, write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_datasets.fetching.uploads import StoredFile

LOCAL_RUNS = 8
"""Copies that are kept of runs which nothing uses and which are whole in their stores, the newest ones."""

_NAME = re.compile(r"(checkpoints|best)/step-(\d{8,})/(manifest\.json|state\.safetensors)")


_opened: dict[tuple[str, Path], StoredRun] = {}


def open_stored_run(url: str) -> StoredRun:
    """Return the run at a URL, the same one within a process; nothing is asked of the store.

    Raises:
        FlagError: the URL carries credentials.
    """
    require_plain_url(url, "--model_dir")
    key = url.rstrip("/"), find_copy(url)
    if key not in _opened:
        _opened[key] = StoredRun(*key)
    return _opened[key]


def fetch_run(model_dir: str | Path, which: str | None = "", *, begins: bool = False) -> Path:
    """Fetch what a start needs of a run at a URL, and return its folder here; a path is returned as it is.

    Args:
        model_dir: URL or path.
        which: checkpoints, as --checkpoint names them; None: the newest and the best one; empty: none.
        begins: whether a run may begin there.

    Raises:
        MissingInputError: there is no run, or no such checkpoint.
        DataError: run or checkpoint are damaged in the store.
        UnsafeError: there are files, and no run.
        AccessError, TransferError, FlagError, MissingExtraError: as by `Store`.
    """
    if is_url(model_dir):
        run = open_stored_run(str(model_dir))
        with run.excluding_fetches():
            if run.is_idle():
                run.fetch(which, begins=begins)
    return find_copy(model_dir)


def upload_results(url: str) -> None:
    """Upload what was written into the copy of a run, unless a training here does so; checkpoints are left alone.

    Raises:
        AccessError, TransferError: it is not all there.
    """
    run = open_stored_run(url)
    with run.excluding_fetches():
        if run.is_idle():
            run.upload(None)


class StoredRun:
    """A run at a URL, and its copy on this machine.

    Args:
        url: of the run.
        folder: of the copy.

    Attributes:
        on_file: called at each file that is sent or removed, so that a slow store is told from one that hangs.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self._state_path, self._holder_path = (folder.with_name(f"{folder.name}.{end}") for end in ("json", "holder"))
        self._fetching = folder.with_name(f"{folder.name}.lock")
        self._files: dict[str, StoredFile] = {}
        self._whole: dict[str, set[int]] = {CHECKPOINTS: set(), BEST: set()}
        self._stored_id: Any = None
        self.on_file: Callable[[], None] = lambda: None

    @cached_property
    def store(self) -> WritableStore:
        """Return the store, whose library is imported for it."""
        return WritableStore(self.url)

    def excluding_fetches(self) -> contextlib.AbstractContextManager[None]:
        """Wait for other processes that fetch the run, and keep them out within a context."""
        return hold_lock(self._fetching)

    def is_idle(self) -> bool:
        """Return whether no process of this machine trains in the copy, which would be ahead of the store."""
        if not (self.folder / LOCK).exists():
            return True
        try:
            with hold_lock(self.folder / LOCK, waiting=_refuse):
                return True
        except BlockingIOError:
            return False

    def fetch(self, which: str | None, *, begins: bool) -> None:
        """Bring the copy up to the store, see `fetch_run`; the caller keeps other processes out."""
        if not self.find_stored(begins=begins):
            return
        own = read_run_record(self.folder).get("id")
        if own not in (None, self._stored_id):
            if self._read_document().get("replaced") == [self._stored_id, own]:
                warn(f"{self.url}: holds the run still that --clean replaced here; the copy on this machine is kept")
                return
            warn(f"{self.url}: holds another run than its copy here, which is replaced")
            for path in self.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK:  # which the caller may hold
                    path.unlink()
        stored, here = self._list_steps(CHECKPOINTS), self._list_here(CHECKPOINTS)
        self._fetch_files(self._list_others(), is_ahead=max(stored, default=-1) > max(here, default=-1))
        for kind, wanted in (("newest", CHECKPOINTS), ("best", BEST)):
            if which in (None, kind):
                self._fetch_newest(wanted)
        if which not in (None, "", "newest", "best"):
            self._fetch_chosen(which)
        self._make_room()

    def find_stored(self, *, begins: bool) -> bool:
        """Look what the store has; return whether it has the run."""
        self._stored_id = None
        if self.store.find_file(RUN_FILE) is not None:  # asked for itself, because a list may lag behind
            self._files, self._stored_id = self.store.list_files(RUN_FILE), self._read_id()
            return True
        self._files = self.store.list_files()
        for name in sorted(self._files) if begins else ():
            if name not in (LOCK, RUN_FILE) and self.store.find_file(name) is not None:
                raise UnsafeError(
                    f"is there, but by {RUN_FILE} no run wrote it",
                    path=self.store.name(name),
                    remedy="give another --model_dir",
                )
        if not begins and not (self.folder / RUN_FILE).is_file():
            raise MissingInputError("holds no run", path=self.url, remedy="train first, or correct the URL")
        return False

    def _list_others(self) -> list[str]:
        """List the files in the store but for checkpoints and the lock."""
        return [name for name in self._files if name != LOCK and not name.startswith((f"{CHECKPOINTS}/", f"{BEST}/"))]

    def _read_id(self) -> Any:
        path = self.store.name(RUN_FILE)
        try:
            record = json.loads(self.store.read(RUN_FILE))
            if isinstance(record["settings"], dict) and isinstance(record["files"], list):
                return record.get("id")
        except (ValueError, RecursionError, KeyError, TypeError):
            pass
        raise DataError("is no record of a run", path=path, remedy="restore it from a copy, or give another URL")

    def _fetch_files(self, names: Iterable[str], *, is_ahead: bool) -> None:
        """Fetch files that are not here, or changed in the store; one that changed here, too, if the store is ahead."""
        known = self._read_state()
        for name in names:
            path, there, before = self.folder / name, self._files[name], known.get(name)
            if path.is_file():
                is_same = before is not None and before[2] == there.stamp
                if is_same or (not is_ahead and _is_dirty(path, before)):
                    continue
            try:
                self.store.download(name, there.size, path)
            except MissingInputError:
                if name == RUN_FILE:
                    raise
                continue  # removed, and the list lags behind
            known[name] = [*_describe(path), there.stamp]
        # What was trained here and is not in the store yet, which is not ahead of it, may not make room.
        self._write_state(known, is_whole=is_ahead or bool(self._read_document().get("is_whole", True)))

    def _fetch_newest(self, kind: str) -> None:
        """Fetch the newest checkpoint that is whole, unless it or a later one is here; name those that are not."""
        here = max(self._list_here(kind), default=-1)
        steps = sorted((step for step in self._list_steps(kind) if step > here), reverse=True)
        for step in steps:
            try:
                self._fetch_checkpoint(kind, step)
                return
            except (DataError, MissingInputError) as error:
                warn(f"{error}")
        if steps and here < 0:
            raise DataError(
                f"none of its {len(steps)} checkpoints can be read",
                path=self.store.name(kind),
                remedy="restore one from a copy",
            )

    def _fetch_chosen(self, which: str) -> None:
        """Fetch all checkpoints, or that of a step; a damaged one of all is named, and left out."""
        here = self._list_here(CHECKPOINTS)
        for step in sorted(self._list_steps(CHECKPOINTS) - here):
            if which == "all":
                with _warning():
                    self._fetch_checkpoint(CHECKPOINTS, step)
            elif which.isdecimal() and int(which) == step:
                self._fetch_checkpoint(CHECKPOINTS, step)

    def _fetch_checkpoint(self, kind: str, step: int) -> None:
        """Fetch a checkpoint into the copy.

        Raises:
            DataError: it is damaged, or of another run.
        """
        target = CheckpointFolder(self.folder / kind).path(step)
        name = f"{kind}/{target.name}"
        manifest = self.store.read(f"{name}/{MANIFEST}")
        try:
            sha256 = str(json.loads(manifest)["manifest"]["sha256"][TENSORS])
        except (ValueError, RecursionError, KeyError, TypeError):
            raise DataError("is no manifest", path=self.store.name(f"{name}/{MANIFEST}"), field="sha256") from None
        tensors = f"{name}/{TENSORS}"
        try:
            self.store.download(tensors, self._files[tensors].size, target / TENSORS, sha256=sha256)
            self.store.download(f"{name}/{MANIFEST}", len(manifest), target / MANIFEST)
            load_checkpoint(target)
        except BaseException as error:
            shutil.rmtree(target)
            if isinstance(error, DataError) and not str(error.path).startswith(self.url):
                fault = "is damaged, or of another run"
                raise DataError(fault, path=self.store.name(name), field=error.field) from None
            raise

    def _list_steps(self, kind: str) -> set[int]:
        """List the steps of the checkpoints in the store that have a manifest and tensors."""
        found: dict[int, set[str]] = {}
        for name in self._files:
            if (match := _NAME.fullmatch(name)) and match[1] == kind:
                found.setdefault(int(match[2]), set()).add(match[3])
        return {step for step, files in found.items() if len(files) == 2}

    def _list_unfinished(self, kind: str) -> set[int]:
        """List the steps of tensors in the store that have no manifest, as an upload leaves that does not end."""
        found = [match for match in map(_NAME.fullmatch, self._files) if match and match[1] == kind]
        manifests = {match[2] for match in found if match[3] == MANIFEST}
        return {int(match[2]) for match in found if match[2] not in manifests}

    def _list_here(self, kind: str) -> set[int]:
        folder = CheckpointFolder(self.folder / kind)
        return {
            step for step in folder.steps() if all((folder.path(step) / name).is_file() for name in (MANIFEST, TENSORS))
        }

    def begin(self) -> None:
        """Note what the store has, once it was fetched and other trainings are locked out; the copy is in use now."""
        self._write_state(self._read_state(), is_whole=False, replaced=self._read_document().get("replaced"))
        for kind, whole in self._whole.items():
            # One of a later step than any here could not be read; the run will come to it again.
            whole.clear()
            whole |= {step for step in self._list_steps(kind) if step <= max(self._list_here(kind), default=-1)}

    def upload(self, keep: int | None) -> None:
        """Bring what changed to the store, and remove checkpoints there that are too many.

        Args:
            keep: number of the newest checkpoints that the store keeps; None: this is no training, so that files of
                results are brought there alone.

        Raises:
            OSError, DataError: the record of the run cannot be read, or is damaged.
        """
        own = read_run_id(self.folder)
        if own is None:
            return
        if self._stored_id not in (None, own):
            if keep is None:
                raise TransferError(
                    "holds the run still that --clean replaced here",
                    path=self.url,
                    remedy="train again without --clean, which uploads the copy on this machine",
                )
            # Noted first: if the store takes nothing, the next start finds the former run there, and keeps this one.
            self._write_state(self._read_state(), is_whole=False, replaced=[self._stored_id, own])
            self._remove_former()
        known = self._read_state()
        changed = [name for name in self._list_changed(known) if keep is not None or name != RUN_FILE]
        sent = {name: _describe(self.folder / name) for name in changed}
        for name in changed:
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile; what the store lacks is another error
                self._send(name)
        self._stored_id = own
        if keep is not None:
            for kind in (CHECKPOINTS, BEST):
                self._upload_checkpoints(kind)
                self._remove_checkpoints(kind, keep)
        if changed or keep is not None:
            self._files = self.store.list_files()
            known |= {name: [*sent[name], self._files[name].stamp] for name in changed if name in self._files}
            self._write_state(known, is_whole=True)

    def _list_changed(self, known: Mapping[str, list[Any]]) -> list[str]:
        """List files of the copy that the store has not as they are: the record of the run first, manifests last."""
        found = [path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file()]
        names = [
            path.as_posix()
            for path in found
            if path.parts[0] not in (CHECKPOINTS, BEST, LOCK)
            and not any(part.startswith(".unfinished") for part in path.parts)
        ]
        changed = [name for name in names if _is_dirty(self.folder / name, known.get(name))]
        return sorted(changed, key=lambda name: (name != RUN_FILE, name.rpartition("/")[2] in LAST_NAMES, name))

    def _send(self, name: str) -> None:
        path = self.folder / name
        self.on_file()
        try:
            self.store.upload(name, path)
        except MissingInputError:
            raise
        except FileNotFoundError:
            if path.exists():
                raise

    def _upload_checkpoints(self, kind: str) -> None:
        """Upload the checkpoints that the store has not, the newest first: tensors, then the manifest."""
        folder = CheckpointFolder(self.folder / kind)
        for step in sorted(self._list_here(kind) - self._whole[kind], reverse=True):
            name = f"{kind}/{folder.path(step).name}"
            if f"{name}/{MANIFEST}" in self._files:  # of a damaged one
                self.store.remove(f"{name}/{MANIFEST}")
            try:
                for part in (TENSORS, MANIFEST):
                    self.on_file()
                    self.store.upload(f"{name}/{part}", folder.path(step) / part)
            except FileNotFoundError as error:
                if isinstance(error, GaudiError):
                    raise
                continue  # a newer one has taken its place
            self._whole[kind].add(step)

    def _remove_checkpoints(self, kind: str, keep: int) -> None:
        """Remove the oldest checkpoints in the store, or all best ones but those of the copy, and tensors of none."""
        whole, here = self._whole[kind], self._list_here(kind)
        # The best one of the copy may have changed while it was sent; until the next is there, the last one stays.
        kept = set(sorted(whole)[-keep:] if kind == CHECKPOINTS else (whole & here or sorted(whole)[-1:]))
        for step in sorted((whole - kept) | (self._list_unfinished(kind) - whole - here)):
            name = f"{kind}/{CheckpointFolder(self.folder).path(step).name}"
            for part in (MANIFEST, TENSORS):
                self.on_file()
                self.store.remove(f"{name}/{part}")
            whole.discard(step)

    def _remove_former(self) -> None:
        """Remove the run that the store has, of which --clean has removed the copy: what it wrote, and nothing else."""
        record = json.loads(self.store.read(RUN_FILE))
        written = {name for name in record["files"] if isinstance(name, str)}
        manifests = [name for name in self._files if name.endswith(f"/{MANIFEST}") and _NAME.fullmatch(name)]
        tensors = [name for name in self._files if name.endswith(f"/{TENSORS}") and _NAME.fullmatch(name)]
        others = [name for name in self._list_others() if name in written]
        for name in (*manifests, *tensors, *others, RUN_FILE):
            self.on_file()
            self.store.remove(name)
        say(f"{self.url}: removed the run there")
        for whole in self._whole.values():
            whole.clear()
        self._files, self._stored_id = {}, None
        self._write_state({}, is_whole=False)

    def read_holder(self) -> str:
        """Return what tells this copy from all others in the lock of the run; who locks the copy is its one holder."""
        try:
            return read_text(self._holder_path)
        except OSError:
            self._holder_path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._holder_path, holder := secrets.token_hex(16))
            return holder

    def describe_missing(self) -> str:
        """Name the newest checkpoint of the copy that the store lacks; empty for none."""
        newest = max(self._list_here(CHECKPOINTS), default=-1)
        return f"checkpoint of step {newest}" if newest >= 0 and newest not in self._whole[CHECKPOINTS] else ""

    def _read_state(self) -> dict[str, list[Any]]:
        """Read time and size of each file as it was when it was the same in both places, and the stamp of the store."""
        files = self._read_document().get("files")
        entries = files.items() if isinstance(files, dict) else ()
        return {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 3}

    def _read_document(self) -> dict[str, Any]:
        """Read what is noted of the copy; nothing where that is of another URL."""
        try:
            document: dict[str, Any] = json.loads(read_text(self._state_path))
            return document if document["url"] == self.url else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write_state(self, files: Mapping[str, list[Any]], *, is_whole: bool = True, replaced: Any = None) -> None:
        """Note the files of the copy; `replaced`: after --clean, the ids of the run in the store and of that here."""
        document = {"url": self.url, "is_whole": is_whole, "files": dict(files), "replaced": replaced}
        self._state_path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._state_path, document, durable=False)

    def _make_room(self) -> None:
        """Remove copies of other runs that are whole in their stores and not in use, but for the newest."""
        for path in list_copies(self._state_path.parent)[LOCAL_RUNS:]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                state = json.loads(read_file(path))
                other = StoredRun(str(state["url"]), path.with_suffix(""))
                if state["is_whole"]:
                    with hold_lock(other._fetching, waiting=_refuse):
                        if other.is_idle() and not other._list_changed(other._read_state()):
                            shutil.rmtree(other.folder, ignore_errors=True)
                            for each in (path, other._holder_path):
                                each.unlink(missing_ok=True)


def _describe(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_mtime_ns, found.st_size]


def _is_dirty(path: Path, before: list[Any] | None) -> bool:
    """Return whether a file of the copy changed since it was the same in both places."""
    return before is None or _describe(path) != before[:2]


def _refuse() -> None:
    raise BlockingIOError


@contextlib.contextmanager
def _warning() -> Iterator[None]:
    try:
        yield
    except (DataError, MissingInputError) as error:
        warn(f"{error}")
