"""A training step of ResNeXt-101 32x4d, bf16, batch 8: ours against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.matrix_peak import build_product, share_of_peak
from benchmarks.measurement import Figure, compare, describe_rates, interleave, main
from benchmarks.resnet_step import build_ours, make_batch
from benchmarks.torch_process import start_torch

BATCH = 8
REPEATS = 12
LEAST = 1.5


def run(budget_seconds: float) -> Iterator[Figure]:
    """Both in turns, and matrix products with them."""
    images, labels = make_batch(BATCH, "bf16")
    ours, operations = build_ours("resnext101", "bf16")
    with start_torch("resnext101", "bf16", BATCH) as torch_step:
        candidates = {
            "product": build_product("bf16"),
            "ours": lambda: float(ours(images, labels)),
            "torch": torch_step,
        }
        timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    share = share_of_peak(timings, "ours", "product", BATCH * operations)
    del timings["product"]
    name = f"ResNeXt-101 step, bf16, batch {BATCH}"
    yield compare(
        f"{name}: ours over torch", timings, "torch", "ours", least=LEAST, note=describe_rates(timings, BATCH)
    )
    yield Figure(f"{name}: share of the matrix peak", **share)


if __name__ == "__main__":
    main(run)
