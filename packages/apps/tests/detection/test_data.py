"""The images that the flags of the detector name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.detection.config import SSDConfig
from gaudi_apps.detection.data import choose_processes, count_processes, open_source
from gaudi_apps.runtime.settings import ThreadFlag
from gaudi_datasets.detection.layouts import open_data
from gaudi_datasets.errors import FlagError
from gaudi_datasets.layouts.checking import check_when_read

SPLITS = ("train", "val")
Write = Callable[[Path, str], None]


def name_files(root: Path) -> SSDConfig:
    """Return flags that name the files of both splits."""
    named: dict[str, Any] = {f"{name}_images": str(root / name) for name in SPLITS}
    named |= {f"{name}_annotations": str(root / "annotations" / f"instances_{name}.json") for name in SPLITS}
    config = SSDConfig()
    return replace(config, data=replace(config.data, **named))


@pytest.mark.parametrize("split", SPLITS)
def test_files_of_flags_are_read_as_those_of_a_folder(tmp_path: Path, split: str, write_turned_split: Write) -> None:
    for name in SPLITS:
        write_turned_split(tmp_path, name)
    boxes = open_source(name_files(tmp_path), "val" if split == "val" else "train").read(0).boxes_yxyx
    np.testing.assert_array_equal(boxes, open_data(tmp_path).sources[split].read(0).boxes_yxyx)
    expected = [0.7, 0.65, 0.9, 0.9] if split == "val" else [0.1, 0.7, 0.35, 0.9]
    np.testing.assert_allclose(boxes, [expected], atol=1e-6)


def test_an_evaluation_needs_no_training_images(tmp_path: Path, write_turned_split: Write) -> None:
    write_turned_split(tmp_path, "val")
    boxes = open_source(name_files(tmp_path), "val").read(0).boxes_yxyx
    np.testing.assert_allclose(boxes, [[0.1, 0.1, 0.3, 0.35]], atol=1e-6)


def test_files_of_the_other_split_are_opened_for_images_that_need_them_alone(
    tmp_path: Path, write_turned_split: Write
) -> None:
    write_turned_split(tmp_path, "train")
    (tmp_path / "annotations" / "instances_val.json").write_text("damaged")
    assert open_source(name_files(tmp_path), "train").read(0).boxes_yxyx.shape == (1, 4)


@pytest.mark.parametrize(("threads", "processes"), [(1, 0), (2, 0), (3, 0), (4, 2), (16, 14)])
def test_processes_leave_processors_to_the_first_one(threads: int, processes: int) -> None:
    assert count_processes(threads) == processes


def test_ranks_of_a_machine_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaudi_apps.detection.data.count_processors", lambda: 96)
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    assert count_processes(16, ranks=8) == 10
    monkeypatch.setattr("os.cpu_count", lambda: 192)  # a launcher has given this rank its own
    assert count_processes(16, ranks=8) == 14


def test_processes_are_chosen_by_flags_and_device(tmp_path: Path, write_turned_split: Write) -> None:
    for name in SPLITS:
        write_turned_split(tmp_path, name)
    config = name_files(tmp_path)
    source = open_source(config, "train")
    cases: tuple[tuple[ThreadFlag, int], ...] = (("auto", 0), (0, 0), (3, 3))
    for given, expected in cases:  # on a CPU threads keep up
        chosen = replace(config, device=replace(config.device, loader_processes=given, device="cpu"))
        assert choose_processes(chosen, source, threads=16) == expected
    chosen = replace(config, device=replace(config.device, loader_processes=3))
    with pytest.raises(FlagError) as error:
        choose_processes(chosen, check_when_read(source, "skip"), threads=16)
    assert error.value.flag == "--loader_processes"
