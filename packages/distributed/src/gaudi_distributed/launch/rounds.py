"""Which workers take part in a run while hosts come and go, and as which rank; it is told what happens and the time.

A round lasts until a worker is lost or others wait to join. Then all of it ask for the next one, in which those that
were there keep their order, so that rank 0 has the state. The number of ranks always divides the most there may be:
what so many share, a global batch, the others share, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """A worker's part in a round, in Horovod's numbers."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers by name, in the order in which Horovod reads them."""
        names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        return {name: getattr(self, name) for name in names}


class Rounds:
    """The workers, and their rounds.

    Args:
        least: ranks that a round needs.
        most: ranks that it may have; a round has as many as divide this.
    """

    def __init__(self, least: int, most: int) -> None:
        self.number = 0
        self._least, self._most = least, most
        self._hosts: dict[int, str] = {}
        self._waiting: dict[int, float] = {}
        self._members: list[int] = []

    @property
    def members(self) -> tuple[int, ...]:
        """Workers of this round that still run, by rank."""
        return tuple(self._members)

    @property
    def is_on(self) -> bool:
        """Whether some worker of this round does not wait for the next one."""
        return any(worker not in self._waiting for worker in self._members)

    def count_on(self, host: str) -> int:
        """How many workers run on a host."""
        return Counter(self._hosts.values())[host]

    def host_of(self, worker: int) -> str:
        """Where a worker runs."""
        return self._hosts[worker]

    @property
    def count(self) -> int:
        """How many workers run."""
        return len(self._hosts)

    def start(self, worker: int, host: str) -> None:
        """A worker was started."""
        self._hosts[worker] = host

    def ask(self, worker: int, now: float) -> None:
        """A worker waits for the next round."""
        if worker in self._hosts:
            self._waiting.setdefault(worker, now)

    def end(self, worker: int) -> None:
        """A worker has ended."""
        self._hosts.pop(worker, None)
        self._waiting.pop(worker, None)
        if worker in self._members:
            self._members.remove(worker)

    def find_unlisted(self, hosts: Iterable[str]) -> list[int]:
        """Workers on hosts that are not named any more."""
        listed = set(hosts)
        return [worker for worker, host in self._hosts.items() if host not in listed]

    def is_changing(self, hosts: Iterable[str]) -> bool:
        """Whether a new round would have other workers than this one."""
        return self._choose(hosts) not in ([], self._members)

    def form(self, hosts: Iterable[str], now: float) -> dict[int, Seat] | None:
        """Begin the next round once all of this one wait for it, or all that were started for the first one.

        Returns:
            the seats by worker; None: not yet, or there are too few.
        """
        hosts = list(hosts)
        needed = self._members or (list(self._hosts) if self.number == 0 else [])
        if not set(needed) <= self._waiting.keys() or not (chosen := self._choose(hosts)):
            return None
        self._members = chosen
        self.number += 1
        for worker in chosen:
            del self._waiting[worker]
        return self._seat(chosen)

    def find_late(self, now: float, patience: float) -> list[int]:
        """Workers of this round that others have waited for so many seconds."""
        since = min((self._waiting[worker] for worker in self._members if worker in self._waiting), default=now)
        return [worker for worker in self._members if worker not in self._waiting and now - since > patience]

    def _choose(self, hosts: Iterable[str]) -> list[int]:
        """Those of the next round, by rank: first those of this one, then those that wait; none if too few."""
        listed = set(hosts)
        known = [*self._members, *sorted(self._waiting.keys() - set(self._members))]
        able = [worker for worker in known if self._hosts[worker] in listed]
        sizes = (size for size in range(min(len(able), self._most), 0, -1) if self._most % size == 0)
        size = next(sizes, 0)
        return able[:size] if size >= self._least else []

    def _seat(self, chosen: list[int]) -> dict[int, Seat]:
        by_host: dict[str, list[int]] = {}
        for worker in chosen:
            by_host.setdefault(self._hosts[worker], []).append(worker)
        seats = {}
        for rank, worker in enumerate(chosen):
            host = self._hosts[worker]
            local_rank = by_host[host].index(worker)
            across = [name for name, workers in by_host.items() if len(workers) > local_rank]
            seats[worker] = Seat(
                host, rank, len(chosen), local_rank, len(by_host[host]), across.index(host), len(across)
            )
        return seats
