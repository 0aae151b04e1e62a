"""The device is chosen by looking at a machine, here a folder that plays one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from gaudi_distributed import DeviceError, DeviceKind, choose_device, open_device
from gaudi_distributed.devices import selection as devices
from gaudi_distributed.devices.selection import count_devices


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


GAUDI = ("sys/class/accel/accel0", "usr/lib/habanalabs/libSynapse.so")


@pytest.fixture(autouse=True)
def _full_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_is_installed", lambda name: name == "tensorflow")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), "cpu"),
        (("dev/nvidia0",), "gpu"),
        (("dev/kfd",), "gpu"),
        (GAUDI, "hpu"),
        ((*GAUDI, "dev/nvidia0"), "hpu"),
        (GAUDI[:1], "cpu"),
        (GAUDI[1:], "cpu"),
    ],
)
def test_auto_takes_hpu_before_gpu_before_cpu(tmp_path: Path, names: tuple[str, ...], expected: str) -> None:
    assert choose_device("auto", root=make(tmp_path, *names), environ={}) == expected


def test_auto_takes_the_cpu_when_tensorflow_has_no_gpu_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_is_installed", lambda name: name == "tensorflow-cpu")
    assert choose_device("auto", root=make(tmp_path, "dev/nvidia0"), environ={}) == "cpu"


@pytest.mark.parametrize("asked", ["cpu", "gpu", "hpu"])
def test_what_is_asked_for_and_there_is_taken(tmp_path: Path, asked: str) -> None:
    assert choose_device(asked, root=make(tmp_path, *GAUDI, "dev/nvidia0"), environ={}) == asked


@pytest.mark.parametrize(
    ("asked", "names", "environ", "words"),
    [
        ("hpu", (), {}, "sys/class/accel/accel0"),
        (
            "hpu",
            GAUDI[:1],
            {"LD_LIBRARY_PATH": "/opt/elsewhere"},
            "none of /opt/elsewhere",
        ),
        ("gpu", (), {}, "is visible"),
        (
            "gpu",
            ("dev/nvidia0",),
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "CUDA_VISIBLE_DEVICES='-1'",
        ),
        ("tpu", (), {}, "device is 'tpu'"),
    ],
)
def test_what_is_not_there_is_one_line(
    tmp_path: Path, asked: str, names: tuple[str, ...], environ: dict[str, str], words: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        choose_device(asked, root=make(tmp_path, *names), environ=environ)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 78


def test_synapse_is_found_through_the_library_path(tmp_path: Path) -> None:
    make(tmp_path, GAUDI[0], "opt/synapse/libSynapse.so")
    environ = {"LD_LIBRARY_PATH": f":{tmp_path}/opt/synapse"}
    assert choose_device("hpu", root=tmp_path, environ=environ) == "hpu"


@pytest.mark.skipif(Path("/sys/class/accel/accel0").exists(), reason="has an accelerator")
def test_opening_hpu_without_a_driver_loads_no_vendor_module() -> None:
    with pytest.raises(DeviceError, match="no Gaudi driver"):
        open_device("hpu")
    assert "habana_frameworks" not in sys.modules


class FakeTensorFlow(ModuleType):
    """Stands for TensorFlow's list of GPUs, and remembers what is set; the package is tested without the real one."""

    __version__ = "2.15.1"

    def __init__(self, gpus: list[str]) -> None:
        super().__init__("tensorflow")
        self.calls: list[tuple[object, ...]] = []
        self.config = SimpleNamespace(
            list_physical_devices=lambda kind: gpus if kind == "GPU" else ["CPU:0"],
            set_visible_devices=lambda shown, kind: self.calls.append(("show", shown, kind)),
            experimental=SimpleNamespace(set_memory_growth=lambda gpu, on: self.calls.append(("grow", gpu, on))),
        )


@pytest.mark.parametrize(
    ("kind", "or_cpu", "gpus", "opened", "calls"),
    [
        ("cpu", False, ["GPU:0"], "cpu", [("show", [], "GPU")]),
        ("gpu", False, ["GPU:0", "GPU:1"], "gpu", [("show", ["GPU:0"], "GPU"), ("grow", "GPU:0", True)]),
        ("gpu", True, [], "cpu", [("show", [], "GPU")]),
    ],
)
def test_opening_tells_tensorflow(
    monkeypatch: pytest.MonkeyPatch,
    kind: DeviceKind,
    or_cpu: bool,
    gpus: list[str],
    opened: str,
    calls: list[tuple[object, ...]],
) -> None:
    tensorflow = FakeTensorFlow(gpus)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    assert open_device(kind, or_cpu=or_cpu) == opened
    assert tensorflow.calls == calls


def test_a_gpu_that_tensorflow_does_not_list_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", FakeTensorFlow([]))
    with pytest.raises(DeviceError, match=r"TensorFlow 2\.15\.1 lists"):
        open_device("gpu")


@pytest.mark.parametrize(
    ("gpus", "local_rank", "used"), [(["GPU:0", "GPU:1"], 1, "GPU:1"), (["GPU:0"], 3, "GPU:0")], ids=["all", "chosen"]
)
def test_each_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], local_rank: int, used: str
) -> None:
    tensorflow = FakeTensorFlow(gpus)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    open_device("gpu", local_rank=local_rank)
    assert tensorflow.calls == [("show", [used], "GPU"), ("grow", used, True)]


def test_more_processes_than_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", FakeTensorFlow(["GPU:0", "GPU:1"]))
    with pytest.raises(DeviceError, match="TensorFlow lists 2"):
        open_device("gpu", local_rank=2)


def test_devices_are_counted(tmp_path: Path) -> None:
    for name in ("sys/class/accel/accel0", "sys/class/accel/accel1", "dev/nvidia0", "dev/nvidia1", "dev/nvidia2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dev/nvidiactl").touch()
    (tmp_path / "dev/nvidia-uvm").touch()
    assert [count_devices(kind, root=tmp_path, environ={}) for kind in ("cpu", "gpu", "hpu")] == [1, 3, 2]
    assert count_devices("gpu", root=tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0,2"}) == 2


def test_an_accelerator_of_another_vendor_is_no_gaudi(tmp_path: Path) -> None:
    for name in GAUDI:
        (tmp_path / name).mkdir(parents=True)
    vendor = tmp_path / GAUDI[0] / "device" / "vendor"
    vendor.parent.mkdir()
    for text, count, device in (("0x1da3\n", 1, "hpu"), ("0x8086\n", 0, "cpu")):
        vendor.write_text(text)
        assert count_devices("hpu", root=tmp_path, environ={}) == count
        assert choose_device("auto", root=tmp_path, environ={}) == device


def test_choosing_imports_neither_tensorflow_nor_a_vendor_module() -> None:
    code = (
        "import sys, gaudi_distributed as d; d.choose_precision('bf16', d.choose_device('auto'));"
        "print(sorted({'tensorflow', 'habana_frameworks', 'horovod', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
