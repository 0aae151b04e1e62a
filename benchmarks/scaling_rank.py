"""One rank of scaling.py; rank 0 writes what all measured, as JSON. Arguments: OUTPUT SECONDS."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.collectives_rank import open_horovod, time_in_turns
from gaudi_distributed import CommunicationOptions

NETWORK, CLASSES, SIDE, BATCH = "resnet18", 100, 32, 4
FEWEST, MOST = 3, 20  # rounds
STREAM_BYTES, HOPS = 32 << 20, 100


def main(output: Path, seconds: float) -> None:
    """Measure in turns, as often as there is time for, on all ranks alike."""
    communicator = open_horovod(CommunicationOptions("horovod"))
    import tensorflow as tf

    # As many ranks as cores, or more: each computes by one thread.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    from gaudi_models import build_classifier

    model = build_classifier(NETWORK, CLASSES, image_size=SIDE)
    images, variables = tf.random.stateless_normal([BATCH, SIDE, SIDE, 3], [1, 0]), model.trainable_variables

    def compute() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(images, training=True)))
        return tape.gradient(loss, variables)

    several = communicator.size > 1
    gradients = [tf.random.stateless_normal(each.shape, [communicator.rank, 0]) for each in variables]
    candidates: dict[str, Callable[[], Any]] = {
        "alone": tf.function(compute),
        "step": tf.function(lambda: communicator.allreduce(compute()) if several else compute()),
    }
    if several:
        candidates["allreduce"] = tf.function(lambda: communicator.allreduce(gradients))
    for function in candidates.values():
        function()
    links: dict[str, list[float]] = {"byte": [], "latency": []}

    def end_round() -> None:
        for name, value in measure_ring(communicator).items() if several else ():
            links[name].append(value)

    timings = time_in_turns(communicator, candidates, FEWEST, MOST, seconds, end_round)
    found = [json.loads(each) for each in communicator.gather(json.dumps({**timings, **links}).encode())]
    if communicator.rank == 0:
        sent = sum(each.shape.num_elements() for each in variables) * 4
        output.write_text(json.dumps({"bytes": sent, "ranks": found}), encoding="utf-8")
    communicator.barrier()
    communicator.close()


def measure_ring(communicator: Any) -> dict[str, float]:
    """Measure a ring of plain TCP connections between all ranks, which send at the same time.

    Returns:
        ``byte``: seconds of a byte where each rank sends to the next one and receives as many; ``latency``: seconds
        of a message from one rank to the next, without others on the way.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = [int(port) for port in communicator.gather(str(server.getsockname()[1]).encode())]
        following = socket.create_connection(("127.0.0.1", ports[(communicator.rank + 1) % len(ports)]))
        before, _ = server.accept()
    with following, before:
        for each in (following, before):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        block = bytearray(1 << 20)
        for _ in range(2):  # the first one grows the buffers of the kernel
            communicator.barrier()
            started = time.perf_counter()
            sender = threading.Thread(target=following.sendall, args=(bytes(STREAM_BYTES),))
            sender.start()
            left = STREAM_BYTES
            while left:
                left -= before.recv_into(block, min(left, len(block)))
            sender.join()
            streamed = time.perf_counter() - started
        communicator.barrier()
        started = time.perf_counter()
        for _ in range(HOPS):
            if communicator.rank:
                following.sendall(before.recv(1))
            else:
                following.sendall(b".")
                before.recv(1)
        hop = (time.perf_counter() - started) / HOPS / len(ports)
        communicator.barrier()
    return {"byte": streamed / STREAM_BYTES, "latency": hop}


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
