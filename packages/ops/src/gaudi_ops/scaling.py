"""Predict the cost of training on many ranks: formulas in plain Python, which need neither NumPy nor ranks.

Sizes are in bytes, times in seconds, bandwidths in bytes a second, in one direction. docs/scaling.md has an example.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 (a message
costs its latency and its bytes); Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", 2009 (rings); Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018
(rings within hosts and between them); Shi et al., "A DAG Model of Synchronous Stochastic Gradient Descent in
Distributed Deep Learning", 2018 (overlap with the backward pass).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Links(NamedTuple):
    """The connections of some ranks, equally many of them on each host.

    Attributes:
        ranks: in all.
        ranks_per_host: of them.
        network: bandwidth of a host to others, which its ranks share.
        local: bandwidth of a rank to another one of its host.
        latency: of a message, besides its bytes.
        wait: until an exchange begins, once all ranks are ready.
    """

    ranks: int
    ranks_per_host: int
    network: float
    local: float
    latency: float
    wait: float = 0.0

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return -(-self.ranks // self.ranks_per_host)

    @property
    def slowest(self) -> float:
        """Return the bandwidth of a ring or a tree over all ranks, which is that of its slowest link."""
        return self.local if self.hosts == 1 else min(self.local, self.network)


class Step(NamedTuple):
    """The work of a rank in a step, and what it sends.

    Attributes:
        buckets: of gradients: the share of the backward pass after which one is ready, and its bytes.
        statistics: bytes of moving statistics, which are ready before the backward pass.
        sums: bytes of each sum of batch norms over a group of ranks, which all others wait for.
        group: ranks of such a group; 1: nothing is summed, 0: all ranks.
        hierarchical: all is reduced within hosts first.
        seconds: of the step on one rank alone.
        backward_share: of these, the share of the backward pass.
    """

    buckets: Sequence[tuple[float, int]]
    statistics: int
    sums: Sequence[int] = ()
    group: int = 1
    hierarchical: bool = False
    seconds: float = 0.0
    backward_share: float = 2 / 3


class Prediction(NamedTuple):
    """The cost of a step in seconds: of all-reduces, of their part during the backward pass, of batch norms, in all.

    Its efficiency is the speed of a rank, as a share of that of one rank alone.
    """

    allreduce: float
    hidden: float
    batch_norm: float
    step: float
    efficiency: float


def ring_seconds(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Return the time of an all-reduce in a ring: 2 (n - 1) messages in turn, each of an n-th of the bytes."""
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def allreduce_seconds(size: float, links: Links, *, hierarchical: bool = False) -> float:
    """Return the time of an all-reduce in one ring, or, `hierarchical`, in rings within hosts and then between them.

    Between hosts, each rank of a host reduces its own part of the bytes, by its share of the host's network: together
    they take the time of one ring of hosts for all bytes.
    """
    if links.ranks == 1:
        return 0.0
    if not hierarchical or links.hosts == 1:
        return links.wait + ring_seconds(size, links.ranks, links.slowest, links.latency)
    within = ring_seconds(size, links.ranks_per_host, links.local, links.latency)
    return links.wait + within + ring_seconds(size, links.hosts, links.network, links.latency)


def exposed_seconds(transfers: Iterable[tuple[float, float]], backward: float) -> float:
    """Return the time after the backward pass until all transfers are done, which go one after the other.

    Args:
        transfers: seconds after the begin of the backward pass at which each is ready, and those that it takes.
        backward: seconds of the backward pass.
    """
    end = 0.0
    for ready, seconds in sorted(transfers):
        end = max(end, ready) + seconds
    return max(0.0, end - backward)


def batch_norm_seconds(step: Step, links: Links) -> float:
    """Return the time of sums within groups of neighbouring ranks, which all groups make at the same time, in rings.

    A host has whole groups, or a group whole hosts; else groups reach over the border of a host, and wait for its
    network. A `hierarchical` sum is one over all ranks, with a row of its bytes for each group.
    """
    group = min(step.group or links.ranks, links.ranks)
    if step.hierarchical or group == links.ranks:
        rows = links.ranks // group if group > 1 else 0
        return sum(allreduce_seconds(rows * size, links, hierarchical=step.hierarchical) for size in step.sums if rows)
    together = links.ranks_per_host if group % links.ranks_per_host == 0 else 1
    own = links._replace(ranks=group, ranks_per_host=together if links.ranks_per_host % group else group)
    return sum(allreduce_seconds(size, own) for size in step.sums)


def predict_step(step: Step, links: Links) -> Prediction:
    """Predict a step on all ranks, each of which computes as much as one alone: weak scaling."""
    backward = step.backward_share * step.seconds
    transfers = [
        (share * backward, allreduce_seconds(size, links, hierarchical=step.hierarchical))
        for share, size in ((0.0, step.statistics), *step.buckets)
    ]
    allreduce, exposed = sum(seconds for _, seconds in transfers), exposed_seconds(transfers, backward)
    batch_norm = batch_norm_seconds(step, links)
    whole = step.seconds + exposed + batch_norm
    return Prediction(allreduce, allreduce - exposed, batch_norm, whole, step.seconds / whole if whole else 1.0)


def broadcast_seconds(size: float, messages: int, links: Links) -> float:
    """Return the time in which one rank gives all others its tensors, each a message, along a binomial tree."""
    rounds = (links.ranks - 1).bit_length()
    return rounds * (messages * links.latency + size / links.slowest) + messages * links.wait * bool(rounds)


def start_seconds(size: float, messages: int, joining: float, links: Links) -> float:
    """Return what a start takes beyond that of one rank: ranks join one by one, and get the state of rank 0."""
    return joining * (links.ranks - 1) + broadcast_seconds(size, messages, links)


def checkpoint_seconds(size: float, disk: float, hashing: float, links: Links) -> float:
    """Return the time of a checkpoint: rank 0 hashes and writes it, then all ranks hash their state and compare.

    The comparison gathers counts and hashes of 32 bytes and one, each along a ring.
    """
    alone = size / hashing + size / disk
    if links.ranks == 1:
        return alone
    gather = 2 * links.wait + (links.ranks - 1) * (2 * links.latency + (8 + 33) / links.slowest)
    return alone + size / hashing + gather
