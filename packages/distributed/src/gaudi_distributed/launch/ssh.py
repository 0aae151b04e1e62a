"""How another host is reached: keys only, and only a host whose key is known."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from gaudi_distributed.errors import ConfigurationError

SSH_PORT = 22
# Where the originals' containers listen.
CONTAINER_SSH_PORT = 3022
# Nobody is asked for anything, an unknown host is refused, and one that no longer answers is given up in 30 s.
_OPTIONS = (
    *("BatchMode=yes", "StrictHostKeyChecking=yes"),
    *("ConnectTimeout=30", "ServerAliveInterval=10", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True)
class Ssh:
    """Port, and ssh's own configuration file where another than the user's is meant (for keys and known hosts).

    Raises:
        ConfigurationError: no such port, or a file name that mpirun would take apart.
    """

    port: int = SSH_PORT
    config: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigurationError(f"ssh port {self.port}; choose one of 1 to 65535")
        if self.config is not None and (self.config.startswith("-") or not _is_plain(self.config)):
            raise ConfigurationError(
                f"--ssh_config {self.config!r}: mpirun takes apart names with blanks or quotes; rename it"
            )

    @property
    def options(self) -> tuple[str, ...]:
        """Arguments that say so to ssh, whatever its configuration files say."""
        config = () if self.config is None else ("-F", self.config)
        return (*config, "-p", str(self.port), *(word for option in _OPTIONS for word in ("-o", option)))

    def reach(self, host: str, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the arguments that run `command` on the host; the shell there gets its words quoted."""
        return ("ssh", "-T", *self.options, "--", host, shlex.join(command))


def _is_plain(text: str) -> bool:
    return text.isprintable() and not any(letter in text for letter in " \"'\\")
