"""Define the flags of the server, and of the layouts for servers of others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from gaudi_apps.cli.flags import SERVED_NAME, RuntimeFlag
from gaudi_datasets.commands.data_flags import Debug

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class ServeFlags:
    """Name what is served, where, and the limits of what clients may ask."""

    model_dir: Annotated[str, tyro.conf.arg(aliases=["-md"])]
    """folder of a run, a checkpoint, or an export as safetensors; or its URL, such as s3://bucket/run"""
    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0: all of this machine, behind something that asks who calls"""
    port: int = 8080
    """port to listen on; 0: any that is free, which is printed"""
    runtime: RuntimeFlag = "tensorflow"
    """what computes: the network, or the fastest export of the run that was evaluated for its checkpoint"""
    score_threshold: float | None = None
    """of a detector: least score of a detection, .05 to 1 (default: .3)"""
    top: int | None = None
    """of a classifier: classes that are named of an image, 1 to 5 (default: 5)"""
    max_batch: int = 8
    """images that are computed at once, at most"""
    max_delay_ms: float = 5.0
    """milliseconds that an image waits for others while nothing is computed, at most"""
    max_queue: int = 64
    """images that wait for their answer, at most; more are refused with 429"""
    max_megabytes: float = 16.0
    """size of an image file, at most (10**6 bytes); larger ones are refused with 413"""
    max_megapixels: float = 25.0
    """pixels of an image in millions, at most; larger ones are refused with 413"""
    timeout_s: float = 10.0
    """seconds in which a request has to arrive (408), be answered (503), and its answer be taken, each"""
    decoders: int = 2
    """threads that decode and draw images"""
    debug: Debug = False

    def __post_init__(self) -> None:
        for message in self._find_faults():
            raise ValueError(message)

    def _find_faults(self) -> Iterator[str]:
        if not self.host.strip():  # the system takes it for all addresses
            yield f"--host {self.host!r}: must be an address or a name; 0.0.0.0 is all of this machine"
        if not 0 <= self.port <= 65535:
            yield f"--port {self.port}: must be 0 to 65535"
        if self.score_threshold is not None and not 0.05 <= self.score_threshold <= 1:
            yield f"--score_threshold {self.score_threshold:g}: must be .05 to 1"
        if self.top is not None and not 1 <= self.top <= 5:
            yield f"--top {self.top}: must be 1 to 5"
        if not 0 <= self.max_delay_ms <= 10_000:
            yield f"--max_delay_ms {self.max_delay_ms:g}: must be 0 to 10000"
        for flag, most in (("max_batch", 256), ("max_queue", 10_000), ("decoders", 64)):
            if not 1 <= (value := getattr(self, flag)) <= most:
                yield f"--{flag} {value}: must be 1 to {most}"
        # Above 67 million pixels, what checks images decodes them before it has judged them.
        for flag, most in (("max_megabytes", 1000), ("max_megapixels", 67), ("timeout_s", 3600)):
            if not 0.001 <= (value := getattr(self, flag)) <= most:
                yield f"--{flag} {value:g}: must be .001 to {most}"


@dataclass(frozen=True)
class LayoutFlags:
    """Name which export is laid out for which server, and how."""

    export: str
    """folder of an export, or its URL: of saved_model for both servers, of onnx for Triton"""
    server: Literal["tensorflow_serving", "triton"]
    """whose layout is written"""
    output_dir: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """folder of models, which the server is given; others that are there stay"""
    name: str = "model"
    """name of the model in requests"""
    version: int = 1
    """its version, a number"""
    max_batch: int | None = None
    """images that Triton computes at once, at most (default: 8)"""
    max_delay_ms: float | None = None
    """milliseconds that Triton waits for more images, at most (default: 5)"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if not SERVED_NAME.fullmatch(self.name):
            raise ValueError(f"--name {self.name}: must be letters, digits, dots, dashes and underscores, 100 at most")
        for flag, low, most in (("version", 1, 2**31 - 1), ("max_batch", 1, 256), ("max_delay_ms", 0, 10_000)):
            value = getattr(self, flag)
            if value is not None and not low <= value <= most:
                raise ValueError(f"--{flag} {value:g}: must be {low} to {most}")
            if value is not None and flag != "version" and self.server != "triton":
                raise ValueError(f"--{flag}: is of Triton; TensorFlow Serving has a file of its own for batches")
