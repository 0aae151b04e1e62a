"""One rank: a step of MXNet's narrow detector with batch norm over a group, written to FOLDER/rank_R.npz.

Arguments: FOLDER, ranks of a group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
import numpy.typing as npt
from narrow_program import narrow  # type: ignore[import-not-found]

from gaudi_distributed import detect_rank
from gaudi_distributed.comm.horovod_mxnet_engine import HorovodMXNetCommunicator
from gaudi_models.padding import SSD_PADDINGS
from gaudi_models.weights import WeightsFile

narrow()
from gaudi_models.mxnet.ssd import SSD, build_ssd  # noqa: E402 - which is made narrow before
from gaudi_models.mxnet.weights import name_parameters  # noqa: E402

Arrays = dict[str, npt.NDArray[Any]]


def main() -> None:
    folder, group_size = Path(sys.argv[1]), int(sys.argv[2])
    communicator = HorovodMXNetCommunicator(detect_rank(os.environ), group_size)
    net = build(communicator.sum_within(group_size))
    results = take_step(net, make_images(hvd.size())[hvd.rank()][None])
    for name in [name for name in results if name.startswith("gradient")]:
        results[name] = hvd.allreduce(mx.nd.array(results[name]), name=name).asnumpy()
    np.savez(folder / f"rank_{hvd.rank()}.npz", **results)
    communicator.close()


def make_images(count: int) -> npt.NDArray[np.float32]:
    """Normalised images of other sizes of contrast, so that no two have the same statistics."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=[count, 3, 300, 300]) * rng.uniform(0.3, 3, [count, 3, 1, 1])
    return images.astype(np.float32)


def build(reduce_statistics: Callable[[Any, str], Any] | None) -> SSD:
    """Build the same detector in every process."""
    from gaudi_models.mxnet.weights import assign_weights, read_tensors

    net = build_ssd(3, depth=18, reduce_statistics=reduce_statistics)
    net.initialize()
    rng = np.random.default_rng(1)
    tensors = {}
    for name, values in read_tensors(net).items():
        scale = np.sqrt(1.5 / np.prod(values.shape[:3])) if values.ndim == 4 else 0.1
        drawn = rng.normal(0, scale, values.shape)
        tensors[name] = (1 + drawn if name.endswith(("gamma", "variance")) else drawn).astype(np.float32)
    assign_weights(net, WeightsFile("drawn", tensors, SSD_PADDINGS["symmetric"], {}))
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def take_step(net: SSD, images: npt.NDArray[np.float32]) -> Arrays:
    """Logits of a training step, gradients of the mean of their squares, and moving statistics after it."""
    with mx.autograd.record():
        logits, offsets = net(mx.nd.array(images))
        loss = mx.nd.mean(mx.nd.square(logits)) + mx.nd.mean(mx.nd.square(offsets))
    loss.backward()
    parameters = name_parameters(net)
    gradients = {f"gradient {n}": p.grad().asnumpy() for n, p in parameters.items() if p.grad_req != "null"}
    moving = {f"moving {n}": p.data().asnumpy() for n, p in parameters.items() if p.grad_req == "null"}
    return {"logits": logits.asnumpy(), **gradients, **moving}


if __name__ == "__main__":
    main()
