"""Real ranks on this machine: every way to open a communicator gives the same, and bitwise the same on every rank."""

from __future__ import annotations

import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_distributed import SingleProcess

README = Path(__file__).resolve().parents[2] / "packages" / "distributed" / "README.md"
SCRIPT = Path(__file__).with_name("communicator_script.py")
ENGINES = {"mpi": "horovod", "gloo": "horovod", "multi_worker": "multi_worker"}
SHAPES = ((), (7,), (3, 5), (300, 1000), (64,), (1, 1, 1, 2))
GROUPED = ("groups", "groups_in_graph", "groups_by_rows", "groups_of_one")

Results = list[dict[str, list[np.ndarray[Any, Any]]]]


SHORT = (("gloo", 2), ("multi_worker", 2), ("mpi", 4))  # they stand for the rest where time counts


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((way, size), marks=() if (way, size) in SHORT else pytest.mark.whole, id=f"{way}-{size}")
        for size in (2, 4)
        for way in ENGINES
    ],
)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_ranks: Callable[..., str]
) -> Results:
    """Return the results of each rank, by rank and name."""
    way, size = request.param
    folder = tmp_path_factory.mktemp(f"{way}_{size}")
    start_ranks(way, size, [str(SCRIPT), str(folder), ENGINES[way]])
    return [read(folder / f"rank_{rank}.npz") for rank in range(size)]


def read(path: Path) -> dict[str, list[np.ndarray[Any, Any]]]:
    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    with np.load(path) as archive:
        for key in archive.files:
            found.setdefault(key.split("/")[0], []).append(archive[key])
    return found


def inputs(rank: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(100 + rank)
    return [generator.normal(size=shape).astype(np.float32) for shape in SHAPES]


def mean_inputs(ranks: range) -> list[np.ndarray[Any, Any]]:
    return [
        np.mean([each.astype(np.float64) for each in same], axis=0) for same in zip(*map(inputs, ranks), strict=True)
    ]


def assert_close(actual: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]], *, atol: float) -> None:
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, atol=atol)


def test_ranks_are_bitwise_equal(results: Results) -> None:
    first = results[0]
    for other in results[1:]:
        assert other.keys() == first.keys()
        for name in first.keys() - set(GROUPED):
            for mine, theirs in zip(first[name], other[name], strict=True):
                assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes()), name


def test_means_and_sums(results: Results) -> None:
    size = len(results)
    means = mean_inputs(range(size))
    found = results[0]
    assert_close(found["mean"], means, atol=1e-6)
    assert_close(found["sum"][:-1], [size * mean for mean in means], atol=1e-5)
    assert found["sum"][-1].tolist() == [size * (size - 1) // 2, size]
    assert [each.tobytes() for each in found["mean"]] == [each.tobytes() for each in found["mean_again"]]


def test_graphs(results: Results) -> None:
    means = mean_inputs(range(len(results)))
    found = results[0]["in_graph"]
    assert_close(found[: len(means)], [2 * mean for mean in means], atol=1e-6)
    assert_close(found[len(means) :], means[:2], atol=1e-6)
    assert {each.dtype.name for each in found[len(means) :]} == {"float64"}
    assert_close(results[0]["in_loop"], means[2:3], atol=1e-6)


def test_compression_keeps_the_type_and_sixteen_bits(results: Results) -> None:
    means = mean_inputs(range(len(results)))
    found = results[0]["compressed"]
    assert_close(found[:-1], means, atol=4e-3)
    assert {each.dtype.name for each in found[:-1]} == {"float32"}
    # It did travel in 16 bits, but for what is not float32.
    assert np.abs(found[3] - means[3]).max() > 1e-5
    assert_close(found[-1:], means[1:2], atol=1e-6)
    # A sum of 40000 over the ranks is no number in 16 bits; the mean is.
    np.testing.assert_allclose(results[0]["large"][0], [40000, 1e-3], rtol=1e-3)


def test_broadcasts_keep_every_bit(results: Results) -> None:
    size = len(results)
    special = [np.array([-0.0, np.nan, np.inf, 1e-45, rank], np.float32) for rank in (0, size - 1)]
    for name, root, bits in (("from_first", 0, special[0]), ("from_last", size - 1, special[1])):
        expected = [*inputs(root), bits]
        for found in results:
            assert [each.tobytes() for each in found[name][: len(expected)]] == [each.tobytes() for each in expected]
    kinds = results[-1]["from_first"][-6:]
    assert [kind.tolist() for kind in kinds] == [[0, 3]] * 5 + [[True]]
    assert [kind.dtype.name for kind in kinds] == ["int64", "float64", "uint8", "int32", "float16", "bool"]
    assert results[-1]["of_array"][0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_groups(results: Results) -> None:
    for rank, found in enumerate(results):
        first = rank // 2 * 2
        expected = [2 * mean for mean in mean_inputs(range(first, first + 2))[:3]]
        assert_close(found["groups"], expected, atol=1e-6)
        assert_close(found["groups_in_graph"], expected, atol=1e-6)
        assert_close(found["groups_of_one"], inputs(rank)[:3], atol=0)
        for name in ("groups", "groups_in_graph", "groups_by_rows"):
            assert [each.tobytes() for each in found[name]] == [each.tobytes() for each in results[first]["groups"]]


def test_gather_is_by_rank(results: Results) -> None:
    for found in results:
        assert [each.tolist() for each in found["gathered"]] == [list(range(5 * rank)) for rank in range(len(results))]


def test_disagreement_names_field_ranks_and_values(results: Results) -> None:
    others = "rank 1" if len(results) == 2 else "ranks 1, 2, 3"
    for found in results:
        field, message = map(str, found["disagreement"])
        assert field == "configuration.batch_size"
        assert message.endswith(f"{field}: rank 0: 4; {others}: 2")


def test_batch_norm_over_ranks_is_that_of_all_images(results: Results) -> None:
    """Three steps with everything over the ranks are those of one process with all images."""
    expected = runpy.run_path(str(SCRIPT))["train"](SingleProcess())["trained"]
    found = results[0]["trained"]
    difference = np.sqrt(sum(np.square(a - b).sum() for a, b in zip(found, expected, strict=True)))
    assert difference / np.sqrt(sum(np.square(b).sum() for b in expected)) < 1e-5


def test_the_program_of_the_readme_is_several_ranks_where_gaudi_run_starts_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("".join(re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)))
    launch = ("-m", "gaudi_distributed.launch", "--np", "2", "--backend", "gloo", "--", sys.executable, str(program))
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {f"rank {rank} of 2: sum 2, 2 answers" for rank in range(2)} <= {*done.stdout.splitlines()}


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("".join(re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)))
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        launch = ("--np", "2", "--backend", "multi_worker", "--first_port", str(taken.getsockname()[1]))
        words = ("-m", "gaudi_distributed.launch", *launch, sys.executable, str(program))
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=1800)
    assert done.returncode
    # The port behind it, that of rank 1, may be another program's.
    (error,) = [line for line in done.stderr.splitlines() if "cannot listen" in line and "for rank 0," in line]
    assert all(named in error for named in ("TF_CONFIG", "--first_port"))
