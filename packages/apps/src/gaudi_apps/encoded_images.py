"""Encoded images kept in memory, where they fit, and the user told either way."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from gaudi_datasets.caching import decide_cache
from gaudi_datasets.sampling import InputOptions


class SizedSource(Protocol):
    """A data set that knows how large it is."""

    @property
    def num_bytes(self) -> int:
        """Of all encoded images together."""


def keep_if_it_fits(source: SizedSource, options: InputOptions, processes: int) -> InputOptions:
    """The options with the decision in them, which is printed; so many processes of this machine keep the images."""
    decision = decide_cache(source.num_bytes, processes=processes)
    print(decision.describe())
    return replace(options, cache_encoded=decision.keeps)
