"""A training step of ResNeXt-101 32x4d in the fastest precision: ours against PyTorch; batch 8, or 2 without bf16."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.against_former import choose_dtype
from benchmarks.matrix_peak import build_product, share_of_peak
from benchmarks.measurement import Figure, choose_amount, compare, describe_rates, interleave, main
from benchmarks.resnet_step import build_ours, make_batch
from benchmarks.torch_process import start_torch

BATCH = choose_amount(8)
REPEATS = 12
LEAST = {"bf16": 1.5}


def run(budget_seconds: float) -> Iterator[Figure]:
    """Both in turns, and matrix products with them."""
    dtype = choose_dtype()
    images, labels = make_batch(BATCH, dtype)
    ours, operations = build_ours("resnext101", dtype)
    with start_torch("resnext101", dtype, BATCH) as torch_step:
        candidates = {
            "product": build_product(dtype),
            "ours": lambda: float(ours(images, labels)),
            "torch": torch_step,
        }
        timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    share = share_of_peak(timings, "ours", "product", BATCH * operations)
    del timings["product"]
    name = f"ResNeXt-101 step, {dtype}, batch {BATCH}"
    yield compare(
        f"{name}: ours over torch",
        timings,
        "torch",
        "ours",
        least=LEAST.get(dtype),
        note=describe_rates(timings, BATCH),
    )
    yield Figure(f"{name}: share of the matrix peak", **share)


if __name__ == "__main__":
    main(run)
