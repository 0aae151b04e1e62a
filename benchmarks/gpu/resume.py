"""A run of the detector on a GPU that is killed and continued: it ends with the same bits as one that went through.

With `--deterministic`, in both precisions, by the programs' own mode verify-resume.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.gpu.card import open_card
from benchmarks.gpu.programs import find_records, run_program
from benchmarks.measurement import Figure, main

STEPS, KILLS, BATCH = 12, 2, 16


def run(budget_seconds: float) -> Iterator[Figure]:
    """Prove it for bf16 and fp32."""
    del budget_seconds
    open_card()
    for dtype in ("bf16", "fp32"):
        yield verify(dtype, "gpu")


def verify(dtype: str, device: str) -> Figure:
    """Kill and continue a run on a device."""
    flags = ("--batch_size", BATCH, "--steps", STEPS, "--kills", KILLS, "--deterministic", "--device", device)
    text = run_program(
        "gaudi_apps.ssd_train", "--mode", "verify-resume", "--data_dir", find_records(), "--dtype", dtype, *flags
    )
    found = re.search(r"killed (\d+) times?: the same", text)
    kills = float(found[1]) if found else 0.0
    return Figure(f"resume, {dtype}: kills without another bit", kills, "kills", least=1.0)


if __name__ == "__main__":
    main(run)
