"""Check Gaudis and GPUs: drivers, devices, and the releases of driver, SynapseAI and TensorFlow."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.devices.selection import (
    HABANA_VENDOR,
    DeviceChoice,
    DeviceKind,
    choose_device,
    find_gpu_error,
    find_hpu_error,
    list_gaudis,
)
from gaudi_distributed.doctor.findings import Finding, fault, ok, run_program, warning_or_fault
from gaudi_distributed.errors import DeviceError

# The last release of the vendor's package for TensorFlow, and what it is made for.
HABANA_TENSORFLOW, ITS_TENSORFLOW = "1.14.0", "2.15.0"
_NVIDIA_VENDOR = "0x10de"
_SECONDS = 30.0


@dataclass(frozen=True)
class Gaudi:
    """The Gaudis of a machine, and their software.

    Attributes:
        cards: cards on the PCI bus.
        driver: the kernel module's version; "" where it does not tell one; None: it is not loaded.
        devices: status of each device that the driver shows, by name; "" where it does not tell one.
        synapse: whether libSynapse.so is found; meant only where there is a device.
        synapse_package: version of the system's package habanalabs-graph, None if that is not known.
    """

    cards: int
    driver: str | None
    devices: Mapping[str, str]
    synapse: bool
    synapse_package: str | None


def gather_gaudi(machine: Machine) -> Gaudi:
    """Return the data; imports nothing of the vendor's."""
    loaded = machine.path("/sys/module/habanalabs").is_dir()
    devices = {}
    places = list_gaudis(machine)
    places += [f"/sys/class/habanalabs/{name}" for name in machine.names("/sys/class/habanalabs", "hl[0-9]*")]
    for place in places:
        name = place.rpartition("/")[2]
        devices[name] = machine.read(f"{place}/device/status") or machine.read(f"{place}/status") or ""
    text = machine.read("/var/lib/dpkg/status") or ""
    package = re.search(r"^Package: habanalabs-graph\n(?:.+\n)*?Version: (\S+)", text, re.MULTILINE)
    return Gaudi(
        cards=_count_cards(machine, HABANA_VENDOR, ""),
        driver=machine.read("/sys/module/habanalabs/version") or "" if loaded else None,
        devices=devices,
        synapse="libSynapse.so" not in str(find_hpu_error(machine.root, machine.environ) or ""),
        synapse_package=package[1] if package else None,
    )


def check_device(asked: DeviceChoice, machine: Machine) -> tuple[DeviceKind, Finding]:
    """Return the device that a run would use, and whether it gets the one that was asked for."""
    try:
        device = choose_device(asked, root=machine.root, environ=machine.environ)
    except DeviceError as error:
        text, remedy = error.message.removeprefix("device "), error.remedy or ""
        return ("hpu" if asked == "hpu" else "gpu"), fault("device", text, remedy, asked=asked)
    why = {"hpu": "a Gaudi is there", "gpu": "a GPU is there", "cpu": "neither a Gaudi nor a GPU to be used is there"}
    reason = f"by --device auto: {why[device]}" if asked == "auto" else "as asked for"
    return device, ok("device", f"{device}, {reason}", device=device, asked=asked)


def check_gaudi(gaudi: Gaudi, device: DeviceKind) -> Finding:
    """Check driver and devices of Gaudis."""
    measured = {"cards": gaudi.cards, "driver": gaudi.driver, "devices": dict(gaudi.devices)}
    wanted = device == "hpu"
    if gaudi.driver is None and not gaudi.devices:
        if gaudi.cards or wanted:
            text = f"{gaudi.cards} cards on the PCI bus, and no driver habanalabs"
            return warning_or_fault(wanted, "Gaudi", text, "install and load habanalabs-dkms", **measured)
        return ok("Gaudi", "no card on the PCI bus, no driver habanalabs", **measured)
    text = f"driver {gaudi.driver or 'of unknown version'}, {len(gaudi.devices)} devices"
    if not gaudi.devices:
        return warning_or_fault(wanted, "Gaudi", text, "look at dmesg, and give the container the devices", **measured)
    ill = [f"{name} is {status}" for name, status in gaudi.devices.items() if status.lower() not in ("", "operational")]
    if ill:
        return warning_or_fault(wanted, "Gaudi", f"{text}, {', '.join(ill)}", "look at dmesg and hl-smi", **measured)
    return ok("Gaudi", text, **measured)


def check_synapse(
    gaudi: Gaudi, habana_tensorflow: str | None, tensorflow: Mapping[str, str], device: DeviceKind
) -> Finding:
    """Check whether driver, SynapseAI, the vendor's package for TensorFlow and TensorFlow belong together.

    `habana_tensorflow` is the package's version, `tensorflow` versions by the names of TensorFlow's distributions.
    """
    versions = {
        "driver": gaudi.driver or None,
        "habanalabs-graph": gaudi.synapse_package,
        "habana-tensorflow": habana_tensorflow,
        **tensorflow,
    }
    measured = {name: version for name, version in versions.items() if version}
    shown = ", ".join(f"{name} {version}" for name, version in measured.items())
    wanted = device == "hpu"
    if not gaudi.devices and habana_tensorflow is None and not wanted:
        return ok("SynapseAI", "habana-tensorflow is not installed; without a Gaudi nothing needs it", **measured)
    if not wanted and not gaudi.devices:
        return ok("SynapseAI", f"{shown}; without a Gaudi nothing needs it", **measured)
    if not gaudi.synapse:
        remedy = "install habanalabs-graph, or put its folder into LD_LIBRARY_PATH"
        return warning_or_fault(wanted, "SynapseAI", "libSynapse.so is not found", remedy, **measured)
    remedy = (
        f"install habana-tensorflow {HABANA_TENSORFLOW}, its driver and SynapseAI, with TensorFlow {ITS_TENSORFLOW}"
    )
    if habana_tensorflow is None:
        return warning_or_fault(wanted, "SynapseAI", "habana-tensorflow is not installed", remedy, **measured)
    releases = {name: _release(version) for name, version in measured.items() if name not in tensorflow}
    if len(set(releases.values())) > 1:
        return warning_or_fault(wanted, "SynapseAI", f"of different releases: {shown}", remedy, **measured)
    made_for = _release(habana_tensorflow) != HABANA_TENSORFLOW or set(tensorflow.values()) == {ITS_TENSORFLOW}
    if not made_for:
        text = f"habana-tensorflow {habana_tensorflow} is made for TensorFlow {ITS_TENSORFLOW}: {shown}"
        return warning_or_fault(wanted, "SynapseAI", text, f"install TensorFlow {ITS_TENSORFLOW}", **measured)
    return ok("SynapseAI", shown, **measured)


def check_gpu(machine: Machine, device: DeviceKind) -> Finding:
    """Check driver and devices of GPUs; nvidia-smi is asked where NVIDIA's driver is loaded."""
    text = machine.read("/proc/driver/nvidia/version")
    version = re.search(r"Kernel Module(?: for \S+)?\s+([0-9.]+)", text or "")
    driver = None if text is None else version[1] if version else ""
    cards = _count_cards(machine, _NVIDIA_VENDOR, "0x03")
    models = []
    for name in machine.names("/proc/driver/nvidia/gpus"):
        model = re.search(r"^Model:\s*(.+)$", machine.read(f"/proc/driver/nvidia/gpus/{name}/information") or "", re.M)
        models.append(model[1].strip() if model else name)
    listed, error_message = None, ""
    program = shutil.which("nvidia-smi", path=machine.environ.get("PATH", ""))
    if driver is not None and program is not None:
        query = ["--query-gpu=name,memory.total", "--format=csv,noheader"]
        output, error_message = run_program([program, *query], machine.environ, _SECONDS)
        listed = None if error_message else output.splitlines()
    measured = {"cards": cards, "driver": driver, "models": models, "nvidia_smi": listed}
    wanted = device == "gpu"
    if driver is None:
        if machine.path("/dev/kfd").exists():
            return ok("GPU", "AMD's driver (/dev/kfd) is there; its devices are not looked at", **measured)
        text = f"{cards or 'no'} card{'s' if cards > 1 else ''} of NVIDIA on the PCI bus, no driver"
        if cards or wanted:
            return warning_or_fault(wanted, "GPU", text, "install NVIDIA's driver, or choose --device cpu", **measured)
        return ok("GPU", text, **measured)
    text = f"NVIDIA's driver {driver or 'of unknown version'}, {', '.join(listed or models) or 'no device'}"
    if error_message:
        remedy = "reboot, or install driver and nvidia-smi of one version"
        return warning_or_fault(wanted, "GPU", f"{text}; nvidia-smi: {error_message}", remedy, **measured)
    hidden = find_gpu_error(machine.root, machine.environ)
    if wanted and hidden is not None:
        return fault("GPU", hidden.message.removeprefix("device gpu: "), hidden.remedy or "", **measured)
    return ok("GPU", text, **measured)


def _count_cards(machine: Machine, vendor: str, kind: str) -> int:
    """Return how many PCI devices are of a vendor, and of a class that begins like this."""
    places = [f"/sys/bus/pci/devices/{name}" for name in machine.names("/sys/bus/pci/devices")]
    return sum(
        machine.read(f"{place}/vendor") == vendor and (machine.read(f"{place}/class") or "").startswith(kind)
        for place in places
    )


def _release(version: str) -> str:
    """Return the first three numbers: 1.14.0 of 1.14.0.493 and of 1.14.0-493."""
    return ".".join(re.split("[^0-9]+", version)[:3])
