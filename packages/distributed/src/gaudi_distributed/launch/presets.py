"""Find launches by name. Programs register theirs as entry points, since the launcher stands below them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args

from gaudi_distributed.devices.habana import ScaleOut
from gaudi_distributed.errors import ConfigurationError, FlagError
from gaudi_distributed.launch.processes import Backend

Accelerator = Literal["none", "gpu", "hpu"]
ACCELERATORS: tuple[Accelerator, ...] = get_args(Accelerator)
# Entry points of this group are mappings from names to presets.
PRESET_GROUP = "gaudi_distributed.presets"
_PROGRAMS = "the presets of training programs come with gaudi-apps, which is not installed: pip install gaudi-apps"


@dataclass(frozen=True)
class Preset:
    """Describe a launch.

    Attributes:
        about: one line for `--help`.
        hosts: number of machines.
        slots: number of ranks, and of devices, on each.
        accelerator: kind of device.
        scale_out: network between Gaudis of several machines.
        backend: starts the ranks; None: the default.
        command: program and arguments, before those of the user; empty: any program.
        result: name of a successful run in its line of results; None: no such line is printed.
        lane: of containers/, whose image has what the command needs where there is no Gaudi.
    """

    about: str
    hosts: int
    slots: int
    accelerator: Accelerator = "hpu"
    scale_out: ScaleOut = "gaudi"
    backend: Backend | None = None
    command: tuple[str, ...] = ()
    result: str | None = None
    lane: str = "default"

    @property
    def ranks(self) -> int:
        """Return the number of ranks on all hosts."""
        return self.hosts * self.slots

    def complete(self, command: tuple[str, ...], name: str) -> tuple[str, ...]:
        """Return the preset's command followed by the user's arguments; FlagError if they name two programs."""
        if not self.command or not command:
            return self.command or command
        if command[0] != self.command[0]:
            raise FlagError(
                f"--preset {name} runs {self.command[0]}, not {command[0]}",
                flag="--preset",
                remedy="name that program, or none",
            )
        return self.command + command[1:]


SERVERS: Mapping[str, Preset] = MappingProxyType(
    {
        "habana-8": Preset("8 Gaudis of one server, any program", 1, 8),
        "habana-16": Preset("two servers of 8, over the Gaudis' own ports", 2, 8),
        "habana-16-tcp": Preset("two servers of 8, HCCL over TCP", 2, 8, scale_out="tcp"),
        "habana-16-hierarchical": Preset("two servers of 8, hierarchical allreduce", 2, 8, scale_out="hierarchical"),
    }
)


@cache
def load_presets() -> Mapping[str, Preset]:
    """Return all presets by name: those of servers, then those of the programs that are installed."""
    presets = dict(SERVERS)
    for registered in load_entry_points(PRESET_GROUP):
        presets |= registered
    return MappingProxyType(presets)


def find_preset(name: str) -> Preset:
    """Return the preset of that name; FlagError lists the names there are."""
    presets = load_presets()
    if name not in presets:
        remedy = f"choose one of {', '.join(presets)}"
        missing = "" if len(presets) > len(SERVERS) else f"; {_PROGRAMS}"
        raise FlagError(f"--preset {name!r}: does not exist", flag="--preset", remedy=f"{remedy}{missing}")
    return presets[name]


def describe_presets() -> str:
    """Return the list of presets for `--help`."""
    lines = "\n".join(f"  {name:24}{preset.about}" for name, preset in load_presets().items())
    return f"presets:\n{lines}"


def load_entry_points(group: str) -> Iterator[Any]:
    """Yield what the installed distributions registered in a group, by the names of the entry points.

    Raises:
        ConfigurationError: one cannot be imported.
    """
    from importlib.metadata import entry_points  # 30 ms, which most launches do not need

    for entry in sorted(entry_points(group=group)):
        try:
            yield entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                f"entry point {entry.value} of {group}: cannot be loaded ({error})",
                remedy="install its distribution again",
            ) from error
