"""A worker asks for its next rank."""

from __future__ import annotations

import json
import threading

import pytest

from gaudi_distributed.cluster.rendezvous import (
    ADDRESS,
    PORT,
    SCOPE,
    STORE_TOKEN,
    WORKER,
    RendezvousClient,
    RendezvousServer,
    is_elastic,
)
from gaudi_distributed.errors import ConfigurationError, PeerLostError


def tell(rendezvous: RendezvousServer, number: int, variables: dict[str, str] | None) -> None:
    with rendezvous.lock:
        rendezvous.values[f"{SCOPE}/assignment_3"] = json.dumps({"round": number, "variables": variables}).encode()


def test_assignments_of_rounds() -> None:
    with RendezvousServer("127.0.0.1") as rendezvous:
        client = RendezvousClient({WORKER: "3", **rendezvous.environment})
        tell(rendezvous, 1, {"HOROVOD_RANK": "0"})
        assert client.next_assignment() == {"HOROVOD_RANK": "0"}
        assert f"{SCOPE}/ask_3" in rendezvous.values
        # The assignment of a round that is over is none: it waits for the next one.
        timer = threading.Timer(0.3, tell, [rendezvous, 2, {"HOROVOD_RANK": "1"}])
        timer.start()
        assert client.next_assignment() == {"HOROVOD_RANK": "1"}
        tell(rendezvous, 3, None)
        assert client.next_assignment() is None
        timer.join()


def test_changes() -> None:
    with RendezvousServer("127.0.0.1") as rendezvous:
        client = RendezvousClient({WORKER: "3", **rendezvous.environment})
        assert not client.hosts_updated()
        for value, expected in ((b"0", False), (b"1", True)):
            with rendezvous.lock:
                rendezvous.values[f"{SCOPE}/changing"] = value
            assert client.hosts_updated() == expected


def test_who_is_asked_to_end_leaves_alone_unless_all_stop() -> None:
    with RendezvousServer("127.0.0.1") as rendezvous:
        client = RendezvousClient({WORKER: "3", **rendezvous.environment})
        assert client.leave()
        assert rendezvous.values[f"{SCOPE}/leave_3"]
        with rendezvous.lock:
            rendezvous.values[f"{SCOPE}/stopping"] = b"1"
        assert not client.leave()
    assert not client.leave()  # nobody answers


def test_who_waits_and_is_asked_to_end_says_so() -> None:
    with RendezvousServer("127.0.0.1") as rendezvous:
        client = RendezvousClient({WORKER: "3", **rendezvous.environment})
        timer = threading.Timer(0.5, tell, [rendezvous, 1, None])
        timer.start()
        assert client.next_assignment(lambda: True) is None
        assert f"{SCOPE}/leave_3" in rendezvous.values
        timer.join()


def test_launcher_that_is_gone() -> None:
    with RendezvousServer("127.0.0.1") as rendezvous:
        client = RendezvousClient({WORKER: "3", **rendezvous.environment})
    with pytest.raises(PeerLostError, match="worker 3: the launcher"):
        client.next_assignment()


@pytest.mark.parametrize(
    "environ",
    [
        {WORKER: "3"},
        {WORKER: "3", ADDRESS: "127.0.0.1", STORE_TOKEN: "x"},
        {WORKER: "3", ADDRESS: "127.0.0.1", PORT: "1"},
        {WORKER: "3", ADDRESS: "127.0.0.1", PORT: "x", STORE_TOKEN: "x"},
        {WORKER: "x", ADDRESS: "127.0.0.1", PORT: "1", STORE_TOKEN: "x"},
    ],
)
def test_variables_that_are_not_a_launchers(environ: dict[str, str]) -> None:
    assert is_elastic(environ)
    with pytest.raises(ConfigurationError, match="GAUDI_RUN_WORKER is"):
        RendezvousClient(environ)


def test_what_would_crash_at_the_second_beginning_is_refused_at_the_first() -> None:
    with pytest.raises(ConfigurationError, match="CYCLE_TIME is set"):
        RendezvousClient({WORKER: "3", ADDRESS: "127.0.0.1", PORT: "1", STORE_TOKEN: "x", "HOROVOD_CYCLE_TIME": "5"})


def test_other_processes_are_no_workers() -> None:
    assert not is_elastic({ADDRESS: "127.0.0.1", PORT: "1"})
