from __future__ import annotations

import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from gaudi_apps.cli.flag_rules import parse_step_range
from gaudi_apps.runtime.tensorflow import TensorFlow
from gaudi_apps.training.callbacks import ProfilerTrace
from gaudi_datasets.errors import FlagError


@pytest.mark.parametrize(
    ("text", "steps"),
    [("0,0", []), ("1,1", [1]), (" 3, 6 ", [3, 4, 5, 6])],
)
def test_a_range_is_two_steps(text: str, steps: list[int]) -> None:
    assert list(parse_step_range(text)) == steps


@pytest.mark.parametrize("text", ["", "3", "5,3", "0,3", "-1,3", "1,2,3", "a,b", "1.5,3", "٣,٤"])
def test_another_text_is_named(text: str) -> None:
    with pytest.raises(FlagError, match=r"--profile .*: must be") as caught:
        parse_step_range(text)
    assert "\n" not in str(caught.value)


def list_traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("plugins/profile/*/*.xplane.pb"))


def make_callback(folder: Path, steps: range) -> ProfilerTrace:
    return ProfilerTrace(TensorFlow(), folder, steps, lambda: None)


def run_steps(folder: Path, steps: range, numbers: range) -> list[int]:
    """Return the number of traces that are there after each step, and after the end."""
    import tensorflow as tf

    counts = []
    with closing(make_callback(folder, steps)) as profiler:
        for step in numbers:
            profiler.on_step_begin(step)
            tf.matmul(tf.ones([8, 8]), tf.ones([8, 8]))
            profiler.on_step_end(step, {})
            counts.append(len(list_traces(folder)))
    return [*counts, len(list_traces(folder))]


@pytest.mark.parametrize(
    ("numbers", "counts"),
    [
        (range(1, 6), [0, 0, 1, 1, 1, 1]),
        (range(3, 6), [1, 1, 1, 1]),  # continued within
        (range(1, 3), [0, 0, 1]),  # over within
        (range(4, 6), [0, 0, 0]),  # continued after
    ],
)
def test_the_range_is_traced_as_far_as_the_run_has_it(tmp_path: Path, numbers: range, counts: list[int]) -> None:
    assert run_steps(tmp_path / "new", range(2, 4), numbers) == counts


def test_a_trace_names_its_steps_and_their_work(tmp_path: Path) -> None:
    run_steps(tmp_path, range(2, 4), range(1, 6))
    content = list_traces(tmp_path)[0].read_bytes()
    assert b"MatMul" in content
    assert b"step_num" in content


def test_a_run_that_fails_leaves_its_trace_and_the_profiler_free(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with suppress(RuntimeError), closing(make_callback(tmp_path / name, range(1, 6))) as profiler:
            profiler.on_step_begin(1)
            raise RuntimeError
        assert len(list_traces(tmp_path / name)) == 1


def test_no_range_imports_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gaudi_apps.runtime.tensorflow import TensorFlow\n"
        "from gaudi_apps.training.callbacks import ProfilerTrace\n"
        f"p = ProfilerTrace(TensorFlow(), Path({str(tmp_path)!r}), range(0), lambda: None)\n"
        "p.on_step_begin(1); p.on_step_end(1, {}); p.close()\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert list(tmp_path.iterdir()) == []
