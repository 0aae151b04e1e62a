"""What a launch would run: one argument a line, as `--dry-run` shows it, or the command lines of each host."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gaudi_distributed.launch.plan import LaunchPlan, Process


@dataclass(frozen=True)
class CommandLine:
    """A command line that a launch starts.

    Attributes:
        hosts: the hosts of its ranks.
        first_rank: the lowest of its ranks.
        last_rank: the highest; each rank between is a process of this command, unless it starts them all itself.
        argv: the program and its arguments.
        reach: the arguments that reach the host; empty for this machine.
    """

    hosts: tuple[str, ...]
    first_rank: int
    last_rank: int
    argv: tuple[str, ...]
    reach: tuple[str, ...] = ()


def list_command_lines(plan: LaunchPlan, processes: Sequence[Process]) -> tuple[CommandLine, ...]:
    """Return the command lines: one of each host, or the one that starts the ranks of all hosts."""
    if any(process.rank is None for process in processes):
        hosts = tuple(host.name for host in plan.cluster.hosts)
        return tuple(CommandLine(hosts, 0, plan.cluster.size - 1, each.argv, each.reach) for each in processes)
    lines, first = [], 0
    for host in plan.cluster.hosts:
        process = processes[first]
        lines.append(CommandLine((host.name,), first, first + host.slots - 1, process.argv, process.reach))
        first += host.slots
    return tuple(lines)


def describe_processes(processes: Iterable[Process]) -> str:
    """Return the text: of each process what reaches its host, its arguments, and its variables.

    Values are shown of variables that the launch sets, and of no others. A word that is not plain to the eye is shown
    as a JSON string.
    """
    return "\n".join("\n".join(_describe(process)) + "\n" for process in processes)


def _describe(process: Process) -> Iterable[str]:
    yield process.name
    if process.reach:
        yield "  by way of"
        yield from (f"    {_show(word)}" for word in process.reach)
    yield "  arguments"
    yield from (f"    {_show(word)}" for word in process.argv)
    if process.processors:
        yield f"  processors {','.join(map(str, process.processors))}"
    if process.environment:
        yield "  variables set"
        yield from (f"    {name}={_show(value)}" for name, value in sorted(process.environment.items()))
    if process.made:
        yield "  variables made when it starts"
        yield from (f"    {name}" for name in process.made)
    if process.forwarded:
        yield "  variables forwarded"
        yield from (f"    {name}" for name in process.forwarded)


def _show(word: str) -> str:
    plain = word.isprintable() and word == word.strip() and word and not word.startswith('"')
    return word if plain else json.dumps(word)
