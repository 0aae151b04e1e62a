"""Which benchmarks there are, in the order in which they run, and how a run's time is dealt to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Shares of the time. Some measure by rounds, as many as there is time for; others need what they need.
SHARES: Mapping[str, float] = {
    "matrix_peak": 0.5,
    "ssd_step": 6,
    "resnet_step": 5,
    "resnext_step": 3,
    "memory": 3,
    "ssd_loss": 1.5,
    "ssd_inference": 2.5,
    "coco_scoring": 4,
    "end_to_end": 3,
    "startup": 3,
    "growth": 2.5,
    "detection_input": 2.5,
    "input_shares": 2,
    "classification_input": 3,
    "mxnet_input": 2,
    "mxnet_loss": 1,
    "mxnet_step": 3,
    "conversion": 3,
    "loader_memory": 3,
    "record_index": 1.5,
    "grouped_convolution": 1.5,
    "optimizers": 1.5,
    "collectives": 2.5,
    "gathering": 0.5,
    "weak_scaling": 4,
    "simulated_ranks": 1.5,
    "gloo_start": 1.5,
    "scaling": 2.5,
    "serving": 5,
}
# Of one GPU, in benchmarks/gpu.
GPU_SHARES: Mapping[str, float] = {
    "parity": 2,
    "parity_tf32": 1.5,
    "ssd_step": 5,
    "resnet_step": 5,
    "resnext_step": 2.5,
    "input_speed": 2,
    "training": 2,
    "resume": 2,
    "op_tests": 4,
}
NEED_TORCH = frozenset({"memory", "ssd_step", "resnet_step", "resnext_step"})


def deal_seconds(
    name: str, following: Sequence[str], seconds_left: float, shares: Mapping[str, float] = SHARES
) -> float:
    """Share out the seconds that are left for a benchmark and the following ones."""
    return seconds_left * shares[name] / sum(shares[each] for each in (name, *following))
