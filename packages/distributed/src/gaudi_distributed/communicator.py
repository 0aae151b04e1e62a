"""What a training loop needs of the other ranks; the loop never asks which kind it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Tensor = TypeVar("Tensor")


class Communicator(Protocol):
    """Ranks 0 to size - 1 that reduce, broadcast and gather together; one process is one rank with one device.

    Every rank makes the same calls in the same order, with tensors of the same shapes and types. What a call returns
    is bitwise equal on all ranks. `allreduce` works eagerly and inside tf.function, the others eagerly only.
    """

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1."""

    @property
    def size(self) -> int:
        """How many processes train together, at least 1."""

    @property
    def local_rank(self) -> int:
        """This process among those of its host, 0 to local_size - 1."""

    @property
    def local_size(self) -> int:
        """How many of the processes run on this host, at least 1."""

    def allreduce(self, tensors: Sequence[Tensor], *, average: bool = True, compressed: bool = False) -> list[Tensor]:
        """Return, on every rank, the mean over the ranks of each tensor, or its sum without `average`.

        `compressed` lets float32 tensors travel in the 16 bits that the run was opened with, if it was: for
        gradients only.
        """

    def broadcast(self, tensors: Sequence[Tensor], *, root: int = 0) -> list[Tensor]:
        """Return, on every rank, the tensors of rank `root`; ValueError for a root outside 0..size-1."""

    def gather(self, content: bytes) -> list[bytes]:
        """Return, on every rank, the content of each rank, by rank; contents may differ in length."""

    def barrier(self) -> None:
        """Return once every rank has come here."""

    def close(self) -> None:
        """End the communication of this rank; nothing else is called afterwards."""


class SingleProcess:
    """The communicator of one process alone: everything is its own already."""

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def size(self) -> int:
        """1."""
        return 1

    @property
    def local_rank(self) -> int:
        """0."""
        return 0

    @property
    def local_size(self) -> int:
        """1."""
        return 1

    def allreduce(self, tensors: Sequence[Tensor], *, average: bool = True, compressed: bool = False) -> list[Tensor]:
        """Return the tensors as they are: the mean and the sum over one rank."""
        del average, compressed
        return list(tensors)

    def broadcast(self, tensors: Sequence[Tensor], *, root: int = 0) -> list[Tensor]:
        """Return the tensors as they are; ValueError for a root other than 0."""
        check_root(root, 1)
        return list(tensors)

    def gather(self, content: bytes) -> list[bytes]:
        """Return the content alone."""
        return [content]

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing."""


def check_root(root: int, size: int) -> None:
    """Raise ValueError unless `root` is one of `size` ranks."""
    if not 0 <= root < size:
        raise ValueError(f"root is {root}; the ranks are 0 to {size - 1}")
