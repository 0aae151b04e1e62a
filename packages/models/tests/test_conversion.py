from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_models.errors import WeightsError
from gaudi_models.padding import PADDING_RULES
from gaudi_models.weights import WeightsMetadata, __main__, read_weights
from gaudi_models.weights.contents import write_tensors
from gaudi_models.weights.reading import convert_weights

KERNEL = np.random.default_rng(0).normal(size=[4, 3, 7, 7]).astype(np.float32)
TORCH: dict[str, Any] = {"conv1.weight": KERNEL, "bn1.gamma": np.ones(4, np.float32)}
OURS = {"conv1/kernel": KERNEL.transpose(2, 3, 1, 0), "conv1_bn/gamma": np.ones(4, np.float32)}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gaudi_models.weights", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def run_here(*arguments: object) -> int:
    """Run the program within this process, and return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["weights", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            __main__.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def assert_is(path: Path, metadata: WeightsMetadata) -> None:
    weights = read_weights(path)
    assert weights.metadata == metadata
    assert weights.tensors.keys() == OURS.keys()
    for name, values in OURS.items():
        np.testing.assert_array_equal(weights.tensors[name], values)


def test_the_submissions_pickle_becomes_safe(tmp_path: Path) -> None:
    source, target = tmp_path / "resnet34.pickle", tmp_path / "resnet34.safetensors"
    source.write_bytes(pickle.dumps({**TORCH, "epoch": 3}))
    done = run(source, target)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{source} (")
    assert {word for word in ("torchvision", "2 tensors", str(target)) if word not in first} == set()
    assert second.split()[0] == "epoch"
    assert_is(target, WeightsMetadata("symmetric"))


def test_what_is_known_of_the_model_is_kept(tmp_path: Path) -> None:
    metadata = WeightsMetadata("same_pool", ({"name": "bee"},), 300, "resnet34")
    write_tensors(OURS, tmp_path / "a.safetensors", metadata=metadata)
    convert_weights(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert_is(tmp_path / "b.safetensors", metadata)
    with pytest.raises(WeightsError, match="'same_pool', not 'symmetric'") as caught:
        convert_weights(tmp_path / "a.safetensors", tmp_path / "c.safetensors", padding="symmetric")
    assert (caught.value.path, caught.value.field) == (str(tmp_path / "a.safetensors"), "padding")


def test_a_padding_that_is_not_known_has_to_be_given(tmp_path: Path) -> None:
    source, target = tmp_path / "ours.npz", tmp_path / "ours.safetensors"
    np.savez(source, **OURS)
    with pytest.raises(WeightsError) as caught:
        convert_weights(source, target)
    assert (caught.value.path, caught.value.field) == (str(source), "padding")
    assert {rule for rule in PADDING_RULES if rule not in str(caught.value.remedy)} == set()
    assert not target.exists()
    assert run(source, target, "--padding", "same").returncode == 0
    assert_is(target, WeightsMetadata("same"))


def test_what_is_wrong_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile, damaged = tmp_path / "hostile.pickle", tmp_path / "damaged.pth"
    hostile.write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    damaged.write_bytes(b"PK\x03\x04")
    good = tmp_path / "good.pickle"
    good.write_bytes(pickle.dumps(TORCH))
    done = run(hostile, tmp_path / "x")  # what should not run is kept out of this process
    told = [(77, "os.system", done.returncode, done.stdout, done.stderr)]
    for status, arguments, words in (
        (66, (tmp_path / "none.pth", tmp_path / "x"), "none.pth"),
        (65, (damaged, tmp_path / "x"), "damaged.pth"),
        (65, (good, good), "good.pickle"),
        (74, (good, tmp_path / "no" / "x"), str(tmp_path / "no" / "x")),
        (64, (good,), "target"),
    ):
        told.append((status, words, run_here(*arguments), *capsys.readouterr()))
    for status, words, found, out, err in told:
        assert found == status, err
        assert words in err.splitlines()[-1]
        assert "Traceback" not in err
        assert out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.pth", "good.pickle", "hostile.pickle"]
