"""Start TensorFlow in processes of its own, for its variables have to be there before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gaudi_apps.runtime.tensorflow import warn_of_bf16
from gaudi_distributed.devices.machine import Processor

# Chooses a Gaudi, which is not here, and ends where TensorFlow would be imported.
START = """
import os, sys
from gaudi_apps.runtime import tensorflow
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.detection.application import make_settings
from gaudi_apps.detection.config import SSDConfig
from gaudi_distributed.cluster.rank_info import RankInfo

class End:
    def find_spec(self, name, path=None, target=None):
        if name == "tensorflow":
            names = ("HLS_MODULE_ID", "ID", "TF_RECIPE_CACHE_PATH", "TF_ENABLE_ONEDNN_OPTS")
            print([os.environ.get(name) for name in names])
            sys.exit()

sys.meta_path.insert(0, End())
rank, size = map(int, sys.argv[2:])
rank_info = RankInfo(rank, size, rank % 8, min(size, 8))
tensorflow.choose_device = lambda *asked, **options: sys.argv[1]
tensorflow.start_tensorflow(make_settings(SSDConfig(), Distribution(rank_info)).device)
"""


NAMES = ("HLS_MODULE_ID", "ID", "TF_ENABLE_ONEDNN_OPTS")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("device", "rank", "size", "environ", "expected"),
    [
        ("hpu", 0, 8, {}, "['0', '0', None, '1']"),
        ("hpu", 13, 16, {"TF_RECIPE_CACHE_PATH": "recipes"}, "['5', '5', 'recipes', '1']"),
        ("hpu", 0, 1, {"HLS_MODULE_ID": "3"}, "['3', None, None, '1']"),
        ("cpu", 1, 8, {}, "[None, None, None, '1']"),
        ("cpu", 0, 1, {"TF_ENABLE_ONEDNN_OPTS": "0"}, "[None, None, None, '0']"),
    ],
)
def test_tensorflow_begins_with_the_variables_of_rank_and_device(
    device: str, rank: int, size: int, environ: dict[str, str], expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, device, str(rank), str(size)],
        env={name: value for name, value in os.environ.items() if name not in NAMES} | environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr


@pytest.mark.costly
def test_another_ranks_gaudi_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, "hpu", "1", "8"],
        env={**os.environ, "HLS_MODULE_ID": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "HLS_MODULE_ID is '0', and rank 1 " in done.stderr
    assert "HLS1 has 1; unset" in done.stderr
    assert done.returncode


@pytest.mark.parametrize(
    ("instructions", "warned"),
    [("avx2", True), ("avx2 avx512f", True), ("avx512f avx512_bf16", False), ("amx_bf16", False), ("", False)],
)
def test_bf16_is_warned_of_where_the_processor_has_no_instructions_for_it(
    instructions: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_bf16(Processor("x86_64", "", frozenset(instructions.split()), 2, 2, 1))
    assert ("--dtype fp32" in capsys.readouterr().err) == warned
