"""What a training loop needs of the other ranks; the loop never asks which kind it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Tensor = TypeVar("Tensor")


class Communicator(Protocol):
    """Ranks 0 to size - 1 that reduce and broadcast tensors (or arrays) together.

    Every rank makes the same calls in the same order, with tensors of the same shapes and types.
    """

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1."""

    @property
    def size(self) -> int:
        """How many processes train together, at least 1."""

    def allreduce(self, tensors: Sequence[Tensor], *, average: bool = True) -> list[Tensor]:
        """Return, on every rank, the mean over the ranks of each tensor, or its sum without `average`."""

    def broadcast(self, tensors: Sequence[Tensor], *, root: int = 0) -> list[Tensor]:
        """Return, on every rank, the tensors of rank `root`; ValueError for a root outside 0..size-1."""

    def barrier(self) -> None:
        """Return once every rank has come here."""


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

    def allreduce(self, tensors: Sequence[Tensor], *, average: bool = True) -> list[Tensor]:
        """Return the tensors as they are: the mean and the sum over one rank."""
        del average
        return list(tensors)

    def broadcast(self, tensors: Sequence[Tensor], *, root: int = 0) -> list[Tensor]:
        """Return the tensors as they are; ValueError for a root other than 0."""
        if root != 0:
            raise ValueError(f"root is {root}; a single process has rank 0 only")
        return list(tensors)

    def barrier(self) -> None:
        """Return at once."""
