from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

from gaudi_apps.mxnet.application import make_settings
from gaudi_apps.mxnet.config import DeviceFlags, SSDMXNetConfig
from gaudi_apps.mxnet.framework import MXNet, require_support
from gaudi_apps.runtime.settings import Distribution
from gaudi_datasets.errors import MissingExtraError
from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.errors import DeviceError
from gaudi_models.mxnet import Layout, Precision
from gaudi_ops.program import NO_THREAD


def test_a_cpu_trains_channels_first_in_float32() -> None:
    require_support(mx.cpu(), "fp32", "NCHW")


@pytest.mark.parametrize(("precision", "layout"), [("fp32", "NHWC"), ("fp16", "NCHW"), ("fp16", "NHWC")])
def test_what_a_cpu_cannot_do_is_told_with_what_it_can(precision: Precision, layout: Layout) -> None:
    with pytest.raises(DeviceError) as caught:
        require_support(mx.cpu(), precision, layout)
    assert str(caught.value).startswith(f"cpu(0): MXNet cannot train {precision} with {layout} there (")
    assert "; use fp32 with NCHW" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 78
    # Nothing of it comes up later.
    mx.nd.waitall()


def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(DeviceError, match=r"gpu\(99\): MXNet cannot train fp16 with NHWC there \(.+\); use another"):
        require_support(mx.gpu(99), "fp16", "NHWC")


@pytest.mark.costly
def test_a_process_that_was_refused_ends_without_noise() -> None:
    code = """
import mxnet as mx
from gaudi_datasets.errors import MissingExtraError
from gaudi_distributed.errors import DeviceError
from gaudi_apps.mxnet.framework import require_support
try:
    require_support(mx.cpu(), "fp32", "NHWC")
except DeviceError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.costly
def test_a_thread_without_a_place_for_its_stack_is_too_little_memory() -> None:
    """MXNet's engine, which has not all of its threads, would let others wait for ever."""
    code = """
import resource
from pathlib import Path
import gaudi_models.mxnet.layers, mxnet as mx
from gaudi_apps.mxnet.framework import require_support
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 2**22, held + 2**22))
try:
    require_support(mx.cpu(), "fp32", "NCHW")
except MemoryError as error:
    print(error)
"""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, NO_THREAD, "")


@pytest.mark.parametrize(("precision", "factor"), [("fp32", 1), ("bf16", 1), ("fp16", 128)])
def test_only_float16_scales_the_loss(precision: Precision, factor: float) -> None:
    framework = MXNet(SSDMXNetConfig(device=DeviceFlags(precision=precision)))
    framework.precision = precision
    assert framework.loss_scale == factor


@pytest.mark.parametrize("size", [1, 2])
def test_settings_say_if_a_process_is_a_rank(size: int) -> None:
    """Ranks on processors ask each other less often what is ready."""
    settings = make_settings(SSDMXNetConfig(), Distribution(RankInfo(size=size)))
    assert settings.device.is_rank == (size > 1)


@pytest.mark.parametrize(
    ("size", "bn_group", "expected"), [(1, 1, {}), (2, 1, {}), (2, 2, {"HOROVOD_CYCLE_TIME": "1"})]
)
def test_ranks_that_sum_within_layers_poll_often(
    monkeypatch: pytest.MonkeyPatch, size: int, bn_group: Any, expected: dict[str, str]
) -> None:
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    config = SSDMXNetConfig()
    config = replace(config, distribution=replace(config.distribution, bn_group=bn_group))
    assert make_settings(config, Distribution(RankInfo(size=size))).distribution.environment == expected
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "7")
    kept = dict.fromkeys(expected, "7")
    assert make_settings(config, Distribution(RankInfo(size=size))).distribution.environment == kept


@pytest.mark.costly
def test_without_mxnet_the_program_names_the_extra(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["mxnet"] = None
from gaudi_apps.ssd_mxnet_train import main
main(["--synthetic", "--steps", "1", "--model_dir", sys.argv[1]])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (MissingExtraError.exit_status, "")
    assert "pip install 'gaudi-apps[mxnet]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
