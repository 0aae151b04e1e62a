"""How a rank comes under supervision: gaudi-run's, or without it that of rank 0."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping

from gaudi_distributed.communicator import Communicator
from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.place import Place
from gaudi_distributed.supervision.bounds import read_bounds
from gaudi_distributed.supervision.causes import Cause
from gaudi_distributed.supervision.coordinator import COORDINATOR, TOKEN, Coordinator
from gaudi_distributed.supervision.member import Keeper, Member

Announce = Callable[[str], None]


def join_supervision(place: Place, environ: Mapping[str, str], announce: Announce) -> Member | None:
    """Join the coordinator that gaudi-run's variables name; None: there are none of them.

    It needs no communication between ranks, so join before that is opened: a rank lost meanwhile is seen, too.

    Args:
        place: of this rank.
        environ: of this process.
        announce: shows a line on standard error, as the end of the run; called on rank 0 if the launcher is lost.

    Raises:
        ConfigurationError: only one of the two variables is there, or one is wrong.
        PeerLostError: nobody answers there.
    """
    endpoint, token = environ.get(COORDINATOR, ""), environ.get(TOKEN, "")
    if not endpoint and not token:
        return None
    host, _, port = endpoint.rpartition(":")
    if not token or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"{COORDINATOR} is {endpoint!r} and {TOKEN} is {'set' if token else 'not'}; gaudi-run sets both, the first "
            "as host:port; unset them, or start the run through gaudi-run"
        )
    return Member(place, Keeper(host.strip("[]"), int(port)), token, announce)


def host_supervision(
    communicator: Communicator, place: Place, environ: Mapping[str, str], announce: Announce
) -> Member | None:
    """Without gaudi-run, rank 0 opens the coordinator; all ranks call this together. None: a rank that is alone.

    Rank 0 shows what ended the run. If it is rank 0 that is lost, the next rank does: rank 1, or, where rank 0 fell
    silent and its machine may be lost with others, the first rank of another machine.

    Args:
        communicator: of the run.
        place: of this rank.
        environ: of this process; see `read_bounds`.
        announce: shows a line on standard error, as the end of the run.

    Raises:
        ConfigurationError: rank 0 finds no address that the others could reach.
        PeerLostError: rank 0 cannot be reached.
    """
    if communicator.size == 1:
        return None
    bounds = read_bounds(environ)
    hosts = [content.decode() for content in communicator.gather(place.host.encode())]
    coordinator: Coordinator | None = None
    said = {"fault": "", "host": "", "port": 0, "token": ""}
    if place.rank == 0:
        try:
            address = "127.0.0.1" if place.local_size == place.size else _find_address(hosts[place.local_size :])
            coordinator = Coordinator(
                place.size, address=address, bounds=bounds, on_cause=lambda cause: announce(cause.describe())
            )
            said |= {"host": address, "port": coordinator.port, "token": coordinator.token}
        except OSError as error:
            said["fault"] = f"{error}"
    said = json.loads(communicator.gather(json.dumps(said).encode())[0])
    if said["fault"]:
        raise ConfigurationError(
            f"rank 0 on {hosts[0]}: finds no address at which {hosts[-1]} could reach it ({said['fault']}); "
            "make the name known to both, or start the run through gaudi-run"
        )
    other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)
    keeper = Keeper(said["host"], said["port"], rank=0, name=hosts[0], speaker=1, speaker_of_silence=other)
    if coordinator is None:
        return Member(place, keeper, said["token"], announce)
    return _HostingMember(place, keeper, announce, coordinator)


def _find_address(others: list[str]) -> str:
    """Address of the interface from which packets go to the first of the other machines."""
    family, kind, _, _, address = socket.getaddrinfo(others[0], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


class _HostingMember(Member):
    """Rank 0, whose process stays until no other rank needs its coordinator."""

    def __init__(self, place: Place, keeper: Keeper, announce: Announce, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        super().__init__(place, keeper, coordinator.token, announce)

    def report(self, text: str, status: int, *, certain: bool = True) -> Cause:
        """Report an error of this rank, and wait until the line about what ended the run is shown."""
        cause = super().report(text, status, certain=certain)
        self._coordinator.wait(self._bounds.leave_seconds)
        return cause

    def leave(self, text: str = "", status: int = 0) -> Cause | None:
        """Say that this rank is done, and wait for the others."""
        super().leave(text, status)
        self._coordinator.wait()
        return self._coordinator.cause

    def _end(self, cause: Cause) -> None:
        """Stay until the others have heard of it."""
        time.sleep(self._bounds.leave_seconds)
        super()._end(cause)
