"""An evaluator, whatever it evaluates: here, guesses of numbers, in plain NumPy."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_apps.inference.evaluator import (
    CONFUSED_CLASSES,
    MEASURED_BATCHES,
    Evaluator,
    ExportScore,
    cut_confusion,
    find_order,
    pack_arrays,
    unpack_arrays,
)
from gaudi_apps.inference.exported_models import ExportedModel, Inputs
from gaudi_apps.training.run_dir import RunFolder
from gaudi_apps.training.trainer import Score
from gaudi_datasets.errors import BadImageError, DataError
from gaudi_datasets.sampling import PADDING_ID, InputOptions, shard_indices
from gaudi_distributed import ConfigurationError, SingleProcess

run_ranks = runpy.run_path(str(Path(__file__).parents[1] / "ranks_in_threads.py"))["run_ranks"]
TRUTH = np.arange(7) % 3
Positions = npt.NDArray[np.int64]


class Seven:
    """A data set of seven images."""

    name = "seven"

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return 7

    def read(self, position: int) -> Any:
        return SimpleNamespace(encoded=bytes([position]))


class Guess:
    """A network in training, and the average of its weights: what it takes each image for."""

    def __init__(self, guesses: Sequence[int], averaged: Sequence[int]) -> None:
        self.guesses, self._averaged = np.array(guesses), np.array(averaged)

    def model(self) -> Positions:
        return self.guesses

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        kept, self.guesses = self.guesses, self._averaged
        yield
        self.guesses = kept


class GuessEvaluator(Evaluator[Positions]):
    """Scores guesses of seven images in batches of two, and records its calls."""

    metric = "right"

    def __init__(self, communicator: Any, fingerprint: str = "seven", folder: Path = Path("unused")) -> None:
        source: Any = Seven(fingerprint)
        options = InputOptions(2, rank=communicator.rank, size=communicator.size)
        super().__init__(source, options, RunFolder(folder), communicator, num_images=None)
        self.calls: list[Any] = []
        self.opened: list[Any] = []
        self.watch(self.calls.append)

    def open_network(self, model: Any) -> Any:
        self.opened.append(model)
        return model

    def read_batches(self, num_images: int) -> Iterator[dict[str, Any]]:
        positions = shard_indices(num_images, self._options)
        yield {"image_ids": np.where(positions < num_images, positions, PADDING_ID)}

    def predict(self, network: Any, batch: Any) -> dict[str, Positions]:
        return {"guesses": network()[batch["image_ids"]]}

    def read_outputs(self, outputs: Any, example: Any) -> dict[str, Positions]:
        return {"guesses": outputs["guesses"]}

    def compute(self, columns: dict[str, Positions]) -> Positions:
        assert list(columns) == ["guesses"]
        return columns["guesses"]

    def summarize(self, result: Positions) -> Score:
        right = float((result == TRUTH).mean())
        return Score(right, {"right": right}, f"{right:.2f} right")

    def write(self, result: Positions, step: int) -> None:
        self.calls.append((step, result.tolist()))


def make_task() -> Guess:
    """Its averaged weights are right in five of seven images, the others in none."""
    return Guess([9] * 7, [0, 1, 2, 0, 1, 0, 1])


class GuessModel(ExportedModel):
    """A model that takes image n for n modulo 3, but for the last one, and records the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__(lambda encoded: encoded[0])
        self.batches: list[int] = []

    def compute(self, inputs: Inputs) -> dict[str, Positions]:
        self.batches.append(len(inputs))
        return {"guesses": np.where(np.array(inputs) < 6, np.array(inputs) % 3, 9)}


def test_an_exported_model_is_scored_image_by_image_and_timed_in_batches(capsys: pytest.CaptureFixture[str]) -> None:
    model, evaluator = GuessModel(), GuessEvaluator(SingleProcess())
    score = evaluator.score_exported(model)
    assert (score.metric, score.value, dict(score.figures)) == ("right", 6 / 7, {"right": 6 / 7})
    assert (score.images, score.images_total, score.split, len(score.seconds)) == (7, 7, "val", 7)
    assert model.batches == [1] * 8 + [16] * 4
    document = score.to_document(replace(score, value=1.0))
    assert document["evaluation"]["lost"] == pytest.approx(1 / 7)
    assert (document["evaluation"]["of_network"], document["evaluation"]["right"]) == (1.0, 6 / 7)
    speed = document["speed"]
    assert speed["images_per_second"]["16"] == 16 / score.batch_seconds
    assert 0 < speed["latency_ms"]["p50"] <= speed["latency_ms"]["p99"]


def test_images_of_an_exported_model_are_counted_and_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(400)
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 4)
    monkeypatch.setattr("gaudi_apps.inference.evaluator.time", clock)
    evaluator, shown = GuessEvaluator(SingleProcess()), list[tuple[int, int]]()
    evaluator.show = lambda done, total: shown.append((done, total))
    columns, seconds = evaluator.run_exported(GuessModel(), [5, 6])
    assert (columns["guesses"].tolist(), seconds, shown) == ([2, 9], [0.25, 0.25], [(1, 2), (2, 2)])
    assert len(evaluator.run_exported(GuessModel(), shows=False)[1]) == 7
    assert len(shown) == 2
    evaluator.show = None
    assert len(evaluator.run_exported(GuessModel())[1]) == 7
    assert evaluator.score(make_task(), 1).value == 5 / 7


def test_rates_and_latencies_are_of_the_seconds_that_were_measured() -> None:
    seconds = [0.004, 0.001, 0.003, 0.002]
    score = ExportScore("right", 0.5, {}, "val", 4, 9, seconds, batch=16, batch_seconds=0.02)
    document = score.to_document(replace(score, value=0.75, seconds=[0.5]))
    speed = document["speed"]
    assert speed["images_per_second"] == pytest.approx({"1": 400, "16": 800})
    assert speed["of_network"] == 2
    assert speed["latency_ms"] == pytest.approx({"p50": 2.5, "p99": 3.97})
    assert (document["evaluation"]["images"], document["evaluation"]["images_total"]) == (4, 9)
    assert document["evaluation"]["lost"] == 0.25


@pytest.mark.parametrize(("size", "images", "batches"), [(1, 7, 4), (1, 100, 5), (3, 100, 5), (3, 8, 2), (1, 2, 1)])
def test_an_image_takes_the_time_between_batches_after_the_first(
    size: int, images: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by three seconds for each batch; the first one is not timed, for it is compiled."""
    predicted: list[list[int]] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + 3 * sum(map(len, predicted)) / 2)
    monkeypatch.setattr("gaudi_apps.inference.evaluator.time", clock)

    class Batches(GuessEvaluator):
        def read_batches(self, num_images: int) -> Iterator[dict[str, Any]]:
            for start in range(0, num_images, 2 * size):
                yield {"image_ids": np.arange(start, start + 2) % 7}

        def predict(self, network: Any, batch: Any) -> dict[str, Positions]:
            predicted.append(batch["image_ids"].tolist())
            return super().predict(network, batch)

    evaluator = Batches(SingleProcess())
    evaluator._options, evaluator._total = InputOptions(2, size=size), images
    assert evaluator.measure(make_task()) == pytest.approx(3 / (2 * size))
    assert len(predicted) == max(2, batches) <= MEASURED_BATCHES
    assert evaluator.calls == ["evaluation"] * batches


def test_an_image_that_an_exported_model_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(encoded: bytes) -> int:
        if encoded[0] == 5:
            raise BadImageError("is refused", remedy="leave it out")
        return encoded[0]

    model = GuessModel()
    monkeypatch.setattr(model, "prepare", refuse)
    with pytest.raises(BadImageError) as caught:
        GuessEvaluator(SingleProcess()).run_exported(model)
    assert (caught.value.record, caught.value.remedy) == ("seven: record 5", "leave it out")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_ranks_have_the_score_of_all_images(size: int) -> None:
    def score(communicator: Any) -> Any:
        evaluator, task = GuessEvaluator(communicator), make_task()
        return evaluator.report(task, 4), task.guesses.tolist(), evaluator.calls

    results = run_ranks(size, score)
    for rank, (found, guesses, calls) in enumerate(results):
        assert found == Score(5 / 7, {"right": 5 / 7}, "0.71 right")
        assert guesses == [9] * 7
        assert calls == ["evaluation", "scoring", *([] if rank else [(4, [0, 1, 2, 0, 1, 0, 1])])]


@pytest.mark.parametrize("size", [1, 3])
def test_rank_0_alone_shows_how_many_of_its_images_are_evaluated(size: int) -> None:
    def score(communicator: Any) -> Any:
        evaluator, shown = GuessEvaluator(communicator), list[tuple[int, int]]()
        if evaluator.show is not None:
            evaluator.show = lambda done, total: shown.append((done, total))
        evaluator.score(make_task(), 4)
        return shown

    own = -(-7 // size)
    first, *others = run_ranks(size, score)
    assert first == [(0, own), (own, own)]
    assert others == [[]] * (size - 1)


def test_a_step_is_evaluated_once() -> None:
    evaluator, task = GuessEvaluator(SingleProcess()), make_task()
    assert [evaluator.score(task, step).value for step in (2, 2)] == [5 / 7] * 2
    assert evaluator.calls == ["evaluation", "scoring"]
    better = Guess([9] * 7, TRUTH.tolist())
    assert [evaluator.score(better, step).value for step in (2, 3)] == [5 / 7, 1.0]
    assert evaluator.score(better, 4).value == 1.0
    assert evaluator.calls == ["evaluation", "scoring"] * 3
    # A network is prepared once as long as the task is the same.
    assert evaluator.opened == [task.model, better.model]


def test_ranks_that_score_on_other_images_are_refused() -> None:
    results = run_ranks(2, lambda communicator: GuessEvaluator(communicator, f"seven of {communicator.rank}"))
    assert [type(result) for result in results] == [ConfigurationError] * 2


@pytest.mark.parametrize(
    ("trained", "count"),
    [({"0": "a", "1": "b", "9": "c"}, "2"), ({"2:0": "a", "1:2": "other"}, "1"), ({"1": "other"}, None), ([], None)],
)
def test_images_that_the_run_was_trained_on_are_told(
    trained: Any, count: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Listed(Seven):
        def list_files(self) -> dict[str, str]:
            return {"0": "a", "1": "b", "2": "d"}

    (tmp_path / "training_data.json").write_text(json.dumps({"files": trained}))
    evaluator = GuessEvaluator(SingleProcess(), folder=tmp_path)
    evaluator.use_source(Listed("listed"), "test")
    evaluator.compare_with_run({})
    assert re.findall(r"trained on (\d+)", capsys.readouterr().err) == ([count] if count else [])


@pytest.mark.parametrize(
    ("split", "fingerprint", "names"), [("test", "other", ["3"]), ("test", "listed", []), ("val", "other", [])]
)
def test_images_that_are_not_those_of_the_run_are_named(
    split: str, fingerprint: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Listed(Seven):
        def list_files(self) -> dict[str, str]:
            return {"0": "a", "1": "b"}

    files = {"0": "a", "1": "b", "3": "d"}
    RunFolder(tmp_path).write_validation(split, {"fingerprint": fingerprint, "classes": [], "files": files})
    evaluator = GuessEvaluator(SingleProcess(), folder=tmp_path)
    evaluator.use_source(Listed("listed"), "test")
    evaluator.compare_with_run({})
    told = capsys.readouterr().err
    assert re.findall('data: "(.)"', told) == names
    assert bool(told) == bool(names)


def test_the_classes_that_are_confused_most_are_shown_in_their_order() -> None:
    names = [str(number) for number in range(CONFUSED_CLASSES + 3)]
    matrix = np.zeros([len(names) + 1] * 2, np.int64)
    np.fill_diagonal(matrix, 50)
    for number in range(3, len(names)):
        matrix[number, -1] = 1  # missed once each, but for the first three
    matrix[1, 2] = 2  # and two of these are confused with each other, twice
    cut = cut_confusion(matrix, names)
    assert cut["names"] == ["1", "2", *names[3:-2]]
    assert (cut["background"], cut["left_out"]) == (True, 3)
    assert cut["matrix"][0] == [50, 2, *[0] * (CONFUSED_CLASSES - 1)]
    assert cut["matrix"][2] == [0, 0, 50, *[0] * (CONFUSED_CLASSES - 3), 1]
    assert cut["matrix"][-1] == [0] * CONFUSED_CLASSES + [50]
    few = cut_confusion(np.array([[4, 1], [0, 6]]), ["a", "b"])
    assert few == {"names": ["a", "b"], "background": False, "matrix": [[4, 1], [0, 6]], "left_out": 0}


def test_images_are_put_in_the_order_of_the_data_set() -> None:
    positions = [np.array([0, 1, 4, 5]), np.array([2, 3, 6])]
    assert find_order(positions).tolist() == [0, 1, 4, 5, 2, 3, 6]
    assert find_order([np.array([2, 0, 1])]).tolist() == [1, 2, 0]


@pytest.mark.parametrize("second", [[], [0], [3], [4], [2, 2]])
def test_images_that_are_missing_or_scored_twice_are_refused(second: list[int]) -> None:
    with pytest.raises(DataError):
        find_order([np.array([0, 1, 3]), np.array(second, np.int64)])


def test_arrays_are_packed_with_their_types_and_nothing_but_numbers() -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "positions": np.array([3, 1], np.int64),
        "scores": np.zeros((0, 5), np.float32),
        "total": np.array(7),
    }
    unpacked = unpack_arrays(pack_arrays(arrays))
    assert unpacked.keys() == arrays.keys()
    for name, values in arrays.items():
        assert unpacked[name].dtype == values.dtype
        np.testing.assert_array_equal(unpacked[name], values)
    objects = io.BytesIO()
    np.savez(objects, a=np.array([{}]))
    with pytest.raises(ValueError, match="allow_pickle"):
        unpack_arrays(objects.getvalue())
