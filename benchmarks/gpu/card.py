"""The card: whether TensorFlow can use one, and what nvidia-smi reads of it; no setting is ever changed."""

from __future__ import annotations

import subprocess

from gaudi_distributed import DeviceError, choose_device, open_device

GPU = "/GPU:0"
CPU = "/CPU:0"
QUERY = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw")


def open_card() -> None:
    """Let TensorFlow use one GPU, with memory as it is needed.

    Raises:
        DeviceError: there is none, or TensorFlow lists none.
    """
    open_device(choose_device("gpu"))


def use_tf32(used: bool) -> None:
    """Let products and convolutions of float32 have the 10 bits of TF32, as TensorFlow does by itself, or all 23."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(used)


def read_card() -> dict[str, str]:
    """Read name, driver, memory, clocks and power of the first card as they are now; empty without nvidia-smi."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERY, map(str.strip, done.stdout.splitlines()[0].split(",")), strict=True))


def describe_clocks() -> str:
    """Describe the clocks and the power now, for a note."""
    card = read_card()
    return f"SM {card['clocks.sm']}, {card['power.draw']}" if card else "clocks unknown"


def describe_card() -> str:
    """Describe the card in a line.

    Raises:
        DeviceError: nvidia-smi does not answer.
    """
    card = read_card()
    if not card:
        raise DeviceError("device gpu: nvidia-smi does not answer", remedy="install NVIDIA's driver with it")
    return (
        f"{card['name']}, {card['memory.total']}, driver {card['driver_version']}, "
        f"SM at most {card['clocks.max.sm']}, memory {card['clocks.mem']}"
    )
