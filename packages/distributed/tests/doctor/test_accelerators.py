"""Gaudis and GPUs, as their drivers show them in files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gaudi_distributed.devices import selection as devices
from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.accelerators import (
    Gaudi,
    check_device,
    check_gaudi,
    check_gpu,
    check_synapse,
    gather_gaudi,
)
from gaudi_distributed.doctor.findings import Finding

MakeMachine = Callable[..., Machine]

DPKG = """Package: habanalabs-dkms
Status: install ok installed
Version: 1.13.0-463

Package: habanalabs-graph
Status: install ok installed
Architecture: amd64
Version: 1.14.0-493
Depends: libc6

Package: zlib1g
Version: 1:1.2.13
"""
GAUDI = {
    "sys/module/habanalabs/version": "1.14.0-6ecd8aa\n",
    "sys/class/accel/accel0/device/status": "Operational\n",
    "sys/class/accel/accel1/device/status": "Operational\n",
    "sys/class/accel/accel_controlD0/": "",
    "sys/bus/pci/devices/0000:33:00.0/vendor": "0x1da3\n",
    "sys/bus/pci/devices/0000:33:00.0/class": "0x120000\n",
    "usr/lib/habanalabs/libSynapse.so": "",
    "var/lib/dpkg/status": DPKG,
}
NVIDIA = {
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  12.3\n"
    ),
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA A10G\nIRQ:   \t\t 42\nDevice Minor: \t 0\n",
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
    "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
}
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build  (builder@host)\n"
CARD_WITHOUT_DRIVER = {name: text for name, text in GAUDI.items() if "pci" in name}
WHOLE = Gaudi(8, "1.14.0-6ecd8aa", {"accel0": "Operational"}, True, "1.14.0-493")
NONE = Gaudi(0, None, {}, True, None)


@pytest.fixture(autouse=True)
def _full_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_is_installed", lambda name: name == "tensorflow")


def show(finding: Finding) -> tuple[str, str]:
    return finding.level, finding.text


def test_gaudis_that_the_driver_shows(make_machine: MakeMachine) -> None:
    machine = make_machine(GAUDI)
    gaudi = gather_gaudi(machine)
    assert gaudi == Gaudi(1, "1.14.0-6ecd8aa", {"accel0": "Operational", "accel1": "Operational"}, True, "1.14.0-493")
    assert show(check_gaudi(gaudi, "hpu")) == ("ok", "driver 1.14.0-6ecd8aa, 2 devices")
    device, finding = check_device("auto", machine)
    assert (device, finding.level) == ("hpu", "ok")


def test_an_older_driver_shows_them_elsewhere(make_machine: MakeMachine) -> None:
    files = {"sys/module/habanalabs/": "", "sys/class/habanalabs/hl0/status": "Malfunction\n"}
    gaudi = gather_gaudi(make_machine(files))
    assert (gaudi.driver, gaudi.devices) == ("", {"hl0": "Malfunction"})
    for device, level in (("hpu", "fault"), ("cpu", "warning")):
        finding = check_gaudi(gaudi, device)  # type: ignore[arg-type]
        assert (finding.level, finding.measured["devices"]) == (level, {"hl0": "Malfunction"})
        assert "hl0 is Malfunction" in finding.text


def test_a_card_without_a_driver(make_machine: MakeMachine) -> None:
    gaudi = gather_gaudi(make_machine(CARD_WITHOUT_DRIVER))
    finding = check_gaudi(gaudi, "cpu")
    assert (finding.level, finding.measured["cards"], finding.measured["driver"]) == ("warning", 1, None)
    assert check_gaudi(gaudi, "hpu").level == "fault"
    loaded = replace(gaudi, driver="1.14.0")
    assert show(check_gaudi(loaded, "hpu")) == ("fault", "driver 1.14.0, 0 devices")


def test_nothing_is_there(make_machine: MakeMachine) -> None:
    machine = make_machine({})
    assert gather_gaudi(machine) == NONE
    assert check_gaudi(NONE, "cpu").level == "ok"
    assert show(check_device("auto", machine)[1])[0] == "ok"
    assert check_gpu(machine, "cpu").level == "ok"


@pytest.mark.parametrize(
    ("gaudi", "habana", "tensorflow", "level", "words"),
    [
        (WHOLE, "1.14.0.493", "2.15.0", "ok", "habana-tensorflow 1.14.0.493, tensorflow 2.15.0"),
        (WHOLE, "1.14.0.493", "2.15.1", "fault", "for TensorFlow 2.15.0"),
        (WHOLE, None, "2.15.0", "fault", "habana-tensorflow is not"),
        (replace(WHOLE, driver="1.13.0-463"), "1.14.0.493", "2.15.0", "fault", "of different releases"),
        (replace(WHOLE, synapse_package="1.12.1-10"), "1.14.0.493", "2.15.0", "fault", "of different releases"),
        (replace(WHOLE, synapse_package=None, driver=""), "1.14.0.493", "2.15.0", "ok", "habana-tensorflow 1.14.0.493"),
        (replace(WHOLE, synapse=False), "1.14.0.493", "2.15.0", "fault", "libSynapse.so is not"),
    ],
)
def test_driver_synapse_and_tensorflow(
    gaudi: Gaudi, habana: str | None, tensorflow: str, level: str, words: str
) -> None:
    finding = check_synapse(gaudi, habana, {"tensorflow": tensorflow}, "hpu")
    assert finding.level == level
    assert words in finding.text


def test_without_a_gaudi_synapse_does_not_matter() -> None:
    assert check_synapse(NONE, None, {"tensorflow": "2.21.0"}, "cpu").level == "ok"
    assert check_synapse(NONE, "1.14.0.493", {"tensorflow": "2.15.1"}, "cpu").level == "ok"
    assert check_synapse(NONE, None, {}, "hpu").level == "fault"


def test_gpus_that_the_driver_shows(make_machine: MakeMachine) -> None:
    machine = make_machine(NVIDIA)
    finding = check_gpu(machine, "gpu")
    assert show(finding) == ("ok", "NVIDIA's driver 535.129.03, NVIDIA A10G")
    assert finding.measured == {"cards": 1, "driver": "535.129.03", "models": ["NVIDIA A10G"], "nvidia_smi": None}
    for text, driver in ((OPEN_DRIVER, "540.4.0"), ("?", "")):
        machine = make_machine({"proc/driver/nvidia/version": text})
        assert check_gpu(machine, "gpu").measured["driver"] == driver


@pytest.mark.parametrize(
    ("script", "level", "words"),
    [
        (
            'test "$*" = "--query-gpu=name,memory.total --format=csv,noheader" && echo "NVIDIA A10G, 23028 MiB"',
            "ok",
            "A10G, 23028 MiB",
        ),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch' ; exit 18", "fault", "NVML"),
        ("echo >&2 one; echo >&2 'no permission'; exit 1", "fault", "no permission"),
    ],
)
def test_nvidia_smi_is_asked(make_machine: MakeMachine, script: str, level: str, words: str) -> None:
    machine = make_machine({**NVIDIA, "bin/nvidia-smi": f"#!/bin/sh\n{script}\n"})
    machine.path("bin/nvidia-smi").chmod(0o755)
    asked = make_machine({}, PATH=str(machine.path("bin")))
    finding = check_gpu(asked, "gpu")
    assert finding.level == level
    assert words in finding.text


def test_a_gpu_without_a_driver_or_hidden(make_machine: MakeMachine) -> None:
    cards = {name: text for name, text in NVIDIA.items() if "pci" in name}
    machine = make_machine(cards)
    finding = check_gpu(machine, "cpu")
    assert (finding.level, finding.measured["cards"], finding.measured["driver"]) == ("warning", 1, None)
    assert show(check_device("gpu", machine)[1])[0] == "fault"
    hidden = make_machine(NVIDIA, CUDA_VISIBLE_DEVICES="-1")
    assert check_gpu(hidden, "gpu").level == "fault"


def test_amds_driver_is_seen(make_machine: MakeMachine) -> None:
    machine = make_machine({"dev/kfd": ""})
    assert show(check_gpu(machine, "gpu"))[1].startswith("AMD's driver (/dev/kfd)")
