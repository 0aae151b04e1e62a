"""Flags of a few values that may be written in any case, as the original program took them."""

from __future__ import annotations

from collections.abc import Sequence

from tyro.constructors import PrimitiveConstructorSpec


def choose_among(*choices: str) -> PrimitiveConstructorSpec[str]:
    """What tyro needs to read one of some values, whatever the case of its letters."""
    by_folded = {choice.casefold(): choice for choice in choices}

    def read(words: Sequence[str]) -> str:
        found = by_folded.get(words[0].casefold())
        if found is None:
            raise ValueError(f"{words[0]}: must be one of {', '.join(choices)}")
        return found

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(choices) + "}",
        instance_from_str=read,
        is_instance=lambda value: value in choices,
        str_from_instance=lambda value: [value],
    )
