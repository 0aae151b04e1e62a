"""Compare what a GPU computes in TF32 with what the CPU computes in float32, see `parity`; in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.card import GPU, open_card
from benchmarks.gpu.parity import compare_devices, list_networks, list_operations
from benchmarks.measurement import Figure, main


def run(budget_seconds: float) -> Iterator[Figure]:
    """Compare the card with the CPU."""
    del budget_seconds
    open_card()
    yield from compare_devices(GPU, {**list_operations(), **list_networks()}, ("tf32",))


if __name__ == "__main__":
    main(run)
