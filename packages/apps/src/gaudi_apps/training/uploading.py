"""Upload a run in the background, and hold the lock of its URL, while it trains; see `stored_runs`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from gaudi_apps.runtime.errors import FailureReporter, RunInUseError, StoppedError, warn
from gaudi_apps.training.run_dir import LOCK
from gaudi_apps.training.stored_runs import StoredRun, open_stored_run
from gaudi_apps.training.trainer import Callback, Score
from gaudi_datasets.errors import GaudiError
from gaudi_datasets.fetching.uploads import StoreLock
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.runtime.session import Session

_PERIOD_SECONDS = 30.0  # between two looks for files that changed
_FIRST_WAIT_SECONDS, _MOST_WAIT_SECONDS = 2.0, 120.0  # between two attempts after failures


class Uploads(Callback):
    """Have what a run wrote uploaded in the background, and end the training where another has taken its place.

    Args:
        run: at a URL; the caller keeps other processes out of its copy.
        keep: number of checkpoints that the store keeps.
        cleans: whether --clean was given.
    """

    def __init__(self, run: StoredRun, keep: int, *, cleans: bool = False) -> None:
        self._run, self._keep, self._cleans = run, keep, cleans
        self._lock = StoreLock(run.store, LOCK, run.read_holder())
        self._wake, self._stop, self._end = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._is_lost = False

    def on_train_begin(self) -> None:
        """Begin to upload."""
        self._thread = threading.Thread(target=self._upload_all, name="uploads", daemon=True)
        self._thread.start()

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Raise RunInUseError if another training has taken over the lock in the store."""
        self._require_lock()

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Have the scores uploaded."""
        self._wake.set()

    def on_checkpoint(self, step: int) -> None:
        """Have the checkpoint uploaded."""
        self._wake.set()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the run in the store within a context.

        Raises:
            RunInUseError: another training holds it.
        """

        def tell(holder: Mapping[str, Any]) -> None:
            say(
                f"{self._run.url}: {_describe(holder)} trains there, by its lock;"
                f" waiting {self._lock.seconds:.0f} s for a sign of life",
                error=True,
            )

        if (holder := self._lock.acquire(tell)) is not None:
            raise self._make_error(holder)
        renewing = threading.Thread(target=self._renew_all, name="lock", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            self._end.set()
            renewing.join()
            with contextlib.suppress(GaudiError):  # it lapses by itself
                self._lock.release()

    @contextlib.contextmanager
    def completed(self, reporter: FailureReporter) -> Iterator[None]:
        """Upload what is left at the end of a context, also where the run was stopped.

        Raises:
            AccessError, TransferError: the store has not all; it names what is missing.
        """
        try:
            yield
        except StoppedError:
            self._complete(reporter)
            raise
        except Exception:
            if self._thread is not None and not self._is_lost:
                self._end_thread()
                with contextlib.suppress(GaudiError):
                    self._upload_once()
            raise
        else:
            self._complete(reporter)
        finally:
            self._stop.set()
            self._run.on_file = lambda: None

    def _complete(self, reporter: FailureReporter) -> None:
        self._run.on_file = partial(reporter.begin, "upload")
        self._run.on_file()
        with reporter.noting_stops():  # a scheduler may send its signal again
            self._end_thread()
            self._require_lock()
            try:
                self._run.upload(self._keep)
            except GaudiError as error:
                missing = self._run.describe_missing() or "what the run wrote last"
                command = "the same command" + " without --clean" * self._cleans
                raise type(error)(
                    f"{error.args[0]}; {missing} is not in the store, but in {self._run.folder}",
                    path=error.path,
                    field=error.field,
                    remedy=f"{error.remedy}; {command} uploads the rest",
                ) from None
        say(f"{self._run.url}: the run is there")

    def _end_thread(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _upload_all(self) -> None:
        """Upload after each wake-up, and after a while without one, until it is to stop; name what fails."""
        wait = _FIRST_WAIT_SECONDS
        while not self._stop.is_set():
            if self._is_lost or self._upload_once(f"; tried again within {wait:.0f} s"):
                wait = _FIRST_WAIT_SECONDS
                self._wake.wait(_PERIOD_SECONDS)
            else:
                self._stop.wait(wait)
                wait = min(2 * wait, _MOST_WAIT_SECONDS)
            self._wake.clear()

    def _upload_once(self, outlook: str = "") -> bool:
        """Upload what changed; return False, having warned, if that fails."""
        try:
            self._run.upload(self._keep)
        except (GaudiError, OSError) as error:
            warn(f"{error}{outlook}")
            return False
        return True

    def _renew_all(self) -> None:
        """Renew the lock until the end; a store that does not answer now may do later."""
        while not self._end.wait(self._lock.seconds / 4):
            with contextlib.suppress(GaudiError):
                if not self._lock.renew():
                    self._is_lost = True
                    return

    def _require_lock(self) -> None:
        if self._is_lost:
            raise self._make_error({})

    def _make_error(self, holder: Mapping[str, Any]) -> RunInUseError:
        return RunInUseError(
            f"{_describe(holder)} trains there",
            path=self._run.url,
            remedy=f"wait for its end or give another --model_dir, or remove {LOCK} there if it has ended",
        )


def _describe(holder: Mapping[str, Any]) -> str:
    if not holder:
        return "another training"
    return f"process {holder.get('process', '?')} on {holder.get('host', '?')} since {holder.get('began', '?')}"


@contextlib.contextmanager
def lock_stored_run(session: Session, url: str) -> Iterator[Uploads]:
    """Keep other trainings out of a run at a URL within a context, fetch it before, and upload it until the end.

    Raises:
        RunInUseError: another process trains there.
        AccessError, TransferError: the store has not all at the end; it names what is missing.
    """
    run = open_stored_run(url)
    with contextlib.ExitStack() as stack:
        with run.excluding_fetches():
            stack.enter_context(session.folder.lock())
        uploads = Uploads(run, session.settings.keep_checkpoints, cleans=session.settings.clean)
        stack.enter_context(uploads.locked())
        if session.settings.clean:
            run.find_stored(begins=True)
        else:
            run.fetch(None, begins=True)
        run.begin()
        say(f"{url}: its copy on this machine is {run.folder}")
        stack.enter_context(uploads.completed(session.reporter))
        yield uploads
