"""Records of shards that are in a store alone, each read by a range, and ahead of who asks for it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future

import google_crc32c

from gaudi_datasets.errors import DataError
from gaudi_datasets.fetching.stores import Store
from gaudi_datasets.records.tfrecords import RecordPlace

_AT_ONCE = 32  # requests under way: 640 a second at 50 ms each, as many as there are connections
_MOST_BYTES = 2**28  # that are ahead; what is expected beyond is read when it is asked for


class RangedReader:
    """Reads records of some shards of a store; those that are expected are on their way before they are asked for.

    Args:
        store: has the shards.
        folder: of the shards in it; empty for its own.
        names: of the shards.
    """

    def __init__(self, store: Store, folder: str, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self._store, self._prefix = store, f"{folder}/" if folder else ""
        self._ahead: dict[RecordPlace, deque[Future[bytes]]] = {}  # a small set comes around again meanwhile
        self._bytes_ahead = 0
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[tuple[RecordPlace, Future[bytes]]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def expect(self, places: Iterable[RecordPlace]) -> None:
        """Begin to read records that will be asked for, in this order; those of other shards are left out."""
        with self._lock:
            for place in places:
                if place.path.name not in self.names:
                    continue
                if self._bytes_ahead + place.length > _MOST_BYTES:
                    return
                self._bytes_ahead += place.length
                future = Future[bytes]()
                self._ahead.setdefault(place, deque()).append(future)
                self._asked.put((place, future))
            if self._ahead and not self._threads:
                # Not of a pool, for whose end a program would wait while a store does not answer.
                self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(_AT_ONCE)]
                for thread in self._threads:
                    thread.start()

    def read(self, place: RecordPlace) -> bytes:
        """Read one record and verify its checksum.

        Raises:
            DataError: the content is not what was written.
            AccessError, TransferError, MissingInputError: as by `Store`.
        """
        with self._lock:
            future = None
            if futures := self._ahead.get(place):
                future, self._bytes_ahead = futures.popleft(), self._bytes_ahead - place.length
                if not futures:
                    del self._ahead[place]
            elif self._bytes_ahead > _MOST_BYTES // 2:  # of somebody who has ended
                for each in itertools.chain.from_iterable(self._ahead.values()):
                    each.cancel()
                self._ahead, self._bytes_ahead = {}, 0
        return self._fetch(place) if future is None else future.result()

    def _work(self) -> None:
        while True:
            place, future = self._asked.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._fetch(place))
                except BaseException as error:  # raised where the record is asked for
                    future.set_exception(error)

    def _fetch(self, place: RecordPlace) -> bytes:
        name = f"{self._prefix}{place.path.name}"
        for _ in range(2):  # once more, in case it was damaged on its way
            content = self._store.read_piece((name, place.offset, place.offset + place.length))
            if google_crc32c.value(content) == place.checksum:
                return content
        raise DataError(
            "its checksum is wrong, so it was replaced or is damaged",
            path=self._store.name(name),
            record=f"record {place.number}",
            remedy="copy or convert it again",
        )
