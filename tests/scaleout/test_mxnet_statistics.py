"""Batch norm over groups of ranks in MXNet, through Horovod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("mxnet_statistics_script.py")

ALONE = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import mxnet_statistics_script as script
images = script.make_images(int(sys.argv[3]))
for number, group in enumerate(np.split(images, int(sys.argv[4]))):
    np.savez(f"{sys.argv[2]}/group_{number}.npz", **script.take_step(script.build(None), group))
"""


@pytest.mark.parametrize(
    ("way", "size", "group_size"), [pytest.param("gloo", 2, 2, marks=pytest.mark.whole), ("mpi", 2, 2), ("gloo", 4, 2)]
)
def test_a_group_computes_what_one_process_does_with_all_its_images(
    tmp_path: Path, start_ranks: Any, way: str, size: int, group_size: int
) -> None:
    groups = size // group_size
    arguments = [str(SCRIPT.parent), str(tmp_path), str(size), str(groups)]
    subprocess.run([sys.executable, "-c", ALONE, *arguments], check=True, timeout=1800)
    start_ranks(way, size, [str(SCRIPT), str(tmp_path), str(group_size)])
    ranks = [np.load(tmp_path / f"rank_{rank}.npz") for rank in range(size)]
    alone = [np.load(tmp_path / f"group_{number}.npz") for number in range(groups)]
    for number, expected in enumerate(alone):
        members = ranks[number * group_size : (number + 1) * group_size]
        logits = np.concatenate([member["logits"] for member in members])
        np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
        for name in [name for name in expected.files if name.startswith("moving")]:
            np.testing.assert_allclose(members[0][name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
            for member in members:
                np.testing.assert_array_equal(member[name], members[0][name], err_msg=name)
    for name in [name for name in ranks[0].files if name.startswith("gradient")]:
        mean = np.mean([expected[name] for expected in alone], axis=0)
        distance = np.linalg.norm(ranks[0][name] - mean) / (np.linalg.norm(mean) + 1e-6)
        assert distance < 1e-2, name  # float32 through 20 layers
        for rank in ranks:
            np.testing.assert_array_equal(rank[name], ranks[0][name], err_msg=name)
