"""Take part in an elastic run: a worker asks the launcher for its rank in the next round.

The launcher keeps Gloo's meeting point, a store of names and values over HTTP; what is said here goes through it, too.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from itertools import count

from gaudi_distributed.errors import ConfigurationError, PeerLostError

WORKER = "GAUDI_RUN_WORKER"
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
SCOPE = "/gaudi_run"
# What Horovod itself looks up when it is begun anew in its elastic mode: the same numbers once more.
HOROVOD_SCOPE = "/rank_and_size"
CYCLE_VARIABLE, FUSION_VARIABLE = "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"
_POLL_SECONDS, _HEARTBEAT_SECONDS, _TIMEOUT = 0.1, 1.0, 30.0


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a worker of an elastic run."""
    return WORKER in environ


class RendezvousClient:
    """Ask the launcher for this worker's next rank.

    Raises:
        ConfigurationError: the variables are not those of a launcher, or Horovod could not begin a second time.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        missing = [name for name in (ADDRESS, PORT) if name not in environ]
        if missing or not environ[PORT].isdecimal() or not environ[WORKER].isdecimal():
            raise ConfigurationError(
                f"{WORKER} is {environ[WORKER]!r} and {', '.join(missing) or PORT} not as gaudi-run sets it",
                field=WORKER,
                remedy="start the run through gaudi-run, or unset it",
            )
        if CYCLE_VARIABLE in environ:
            # With this and the other both fixed, nothing is left to tune, and Horovod 0.28.1 writes past the end of it.
            raise ConfigurationError(
                f"{CYCLE_VARIABLE} is set, and {FUSION_VARIABLE} is for every run; with both, Horovod ends by signal "
                "11 when the processes change",
                field=CYCLE_VARIABLE,
                remedy="unset the first",
            )
        self._worker = environ[WORKER]
        self._address = environ[ADDRESS], int(environ[PORT])
        self._round = 0
        threading.Thread(target=self._give_signs_of_life, name="heartbeats", daemon=True).start()

    def _give_signs_of_life(self) -> None:
        """Send heartbeats, by whose lack the launcher knows of a worker that is frozen, be it the only one."""
        for number in count():
            # Of a loss of the launcher the main thread knows.
            with contextlib.suppress(PeerLostError):
                self._request("PUT", f"{SCOPE}/beat_{self._worker}", b"%d" % number)
            time.sleep(_HEARTBEAT_SECONDS)

    def next_assignment(self) -> dict[str, str] | None:
        """Wait for the next round and return the environment variables of this worker's rank.

        None means that the worker is no longer needed.

        Raises:
            PeerLostError: the launcher is gone.
        """
        self._request("PUT", f"{SCOPE}/ask_{self._worker}", b"1")
        while True:
            answer = json.loads(self._request("GET", f"{SCOPE}/assignment_{self._worker}") or b'{"round": 0}')
            if answer["round"] > self._round:
                self._round = answer["round"]
                variables: dict[str, str] | None = answer["variables"]
                return variables
            time.sleep(_POLL_SECONDS)

    def hosts_updated(self) -> bool:
        """Return whether workers wait to join, or some are to leave."""
        return self._request("GET", f"{SCOPE}/changing") == b"1"

    def _request(self, method: str, path: str, content: bytes | None = None) -> bytes:
        """Return the value of a path; empty if there is none."""
        import http.client  # 15 ms, which --help does not need

        connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT)
        try:
            connection.request(method, path, content)
            answer = connection.getresponse()
            value = answer.read()
            return value if answer.status == http.client.OK else b""
        except (OSError, http.client.HTTPException) as error:
            raise PeerLostError(
                f"worker {self._worker}: the launcher at {self._address[0]}:{self._address[1]} does not answer "
                f"({error})",
                remedy="the same command continues from the last checkpoint",
            ) from error
        finally:
            connection.close()
