"""What a launch would run, one argument a line, as `--dry-run` shows it."""

from __future__ import annotations

import json
from collections.abc import Iterable

from gaudi_distributed.launch.plan import Process


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
