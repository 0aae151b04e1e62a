"""The communicator of MXNet's programs, over real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

SCRIPT = Path(__file__).with_name("mxnet_communicator_script.py")
SHAPES = 3


@pytest.mark.parametrize(("way", "size"), [pytest.param("gloo", 2, marks=pytest.mark.whole), ("gloo", 4), ("mpi", 2)])
def test_all_ranks_get_the_same(tmp_path: Path, start_ranks: Callable[..., str], way: str, size: int) -> None:
    start_ranks(way, size, [str(SCRIPT), str(tmp_path)])
    ranks = [np.load(tmp_path / f"rank_{rank}.npz") for rank in range(size)]
    for number in range(SHAPES):
        own = [rank_tensors(rank)[number] for rank in range(size)]
        expected = {"mean": np.mean(own, axis=0), "sum": np.sum(own, axis=0), "last": own[-1]}
        for name, values in expected.items():
            for found in ranks:
                np.testing.assert_allclose(found[f"{name}_{number}"], values, rtol=1e-6, atol=1e-6)
                np.testing.assert_array_equal(found[f"{name}_{number}"], ranks[0][f"{name}_{number}"])
        for rank, found in enumerate(ranks):
            first = rank // 2 * 2
            np.testing.assert_allclose(found[f"pair_{number}"], own[first] + own[first + 1], rtol=1e-6, atol=1e-6)


def rank_tensors(rank: int) -> list[npt.NDArray[np.float32]]:
    """Compute the values of a rank as the script does, which is no module that a test could import."""
    generator = np.random.default_rng(100 + rank)
    return [generator.normal(size=shape).astype(np.float32) for shape in ((3,), (2, 5), (1, 1, 4))]
