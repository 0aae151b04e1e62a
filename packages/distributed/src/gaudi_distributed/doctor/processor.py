"""The processor: cores that a run may use, instructions that TensorFlow needs, and whether bfloat16 is fast."""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass

from gaudi_distributed.cores import read_topology
from gaudi_distributed.devices import DeviceKind
from gaudi_distributed.doctor.control_groups import read_processor_quota
from gaudi_distributed.doctor.findings import Finding, fault, ok, warning
from gaudi_distributed.doctor.machine import Machine


@dataclass(frozen=True)
class Processor:
    """What the kernel says of it.

    Attributes:
        architecture: like "x86_64".
        model: its name; "" where that is not told.
        flags: names of its instructions; empty where they are not told.
        logical: logical processors of the machine.
        usable: those that this process may use.
        cores: physical cores that these are of.
        quota: processors' time that control groups give at most; None: all.
        onednn: whether TensorFlow's kernels by oneDNN, which know bfloat16, are left on.
    """

    architecture: str
    model: str
    flags: frozenset[str]
    logical: int
    usable: int
    cores: int
    quota: float | None = None
    onednn: bool = True


def gather_processor(machine: Machine, usable: Collection[int], architecture: str | None = None) -> Processor:
    """Return the facts; `usable` are the numbers of the logical processors that may be used."""
    text = machine.read("/proc/cpuinfo") or ""
    lines = [line.partition(":") for line in text.splitlines()]
    values: dict[str, str] = {}
    for name, _, value in lines:
        values.setdefault(name.strip(), value.strip())
    return Processor(
        architecture=architecture or platform.machine(),
        model=values.get("model name", ""),
        flags=frozenset(values.get("flags", "").split()),
        logical=max(sum(name.strip() == "processor" for name, _, _ in lines), len(usable)),
        usable=len(usable),
        cores=read_topology(machine.root, usable).cores,
        quota=read_processor_quota(machine),
        onednn=machine.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") not in ("0", "false", "False"),
    )


def judge_processor(processor: Processor) -> Finding:
    """Judge its instructions: TensorFlow's packages for x86-64 are built with AVX."""
    name = processor.model or "a processor without a name"
    known = [flag for flag in ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if flag in processor.flags]
    facts = {"model": processor.model, "architecture": processor.architecture, "instructions": known}
    if processor.architecture == "x86_64" and not processor.flags:
        return warning("processor", f"{name}; /proc/cpuinfo does not tell its instructions", "mount /proc", **facts)
    if processor.architecture == "x86_64" and "avx" not in processor.flags:
        remedy = "take another machine, or build TensorFlow for this one"
        return fault(
            "processor", f"{name}: has no AVX, without which TensorFlow's packages do not start", remedy, **facts
        )
    return ok("processor", f"{name}, {processor.architecture}: {' '.join(known) or 'no AVX'}", **facts)


def judge_cores(processor: Processor, ranks: int) -> Finding:
    """Judge the number of cores against the ranks on this machine."""
    facts = {
        "logical": processor.logical,
        "usable": processor.usable,
        "cores": processor.cores,
        "quota": processor.quota,
    }
    text = f"{processor.usable} of {processor.logical} logical processors may be used, {_count(processor.cores)}"
    if processor.quota is not None and processor.quota < processor.usable:
        text += f"; a control group gives the time of {processor.quota:g}"
        remedy = "give the container as many processors as it may use, by --cpuset-cpus in place of --cpus"
        return warning("cores", text, remedy, **facts)
    text += "" if processor.quota is None else f", time of {processor.quota:g} by a control group"
    if ranks > processor.cores:
        remedy = f"start at most {processor.cores} ranks here, or expect none of them to be bound to cores"
        return warning("cores", f"{text}, for {ranks} ranks", remedy, **facts)
    return ok("cores", f"{text}, for {ranks} {'rank' if ranks == 1 else 'ranks'}", **facts)


def judge_bf16(processor: Processor, device: DeviceKind) -> Finding:
    """Judge whether --dtype bf16 is faster than fp32 where the processor computes.

    oneDNN computes in bfloat16 with AMX (by tiles) or AVX512_BF16 (by dot products); with other AVX-512 it converts to
    fp32 and back, and without AVX-512 TensorFlow does that one value after another.
    """
    flags = processor.flags
    by = "AMX" if "amx_bf16" in flags else "AVX512_BF16" if "avx512_bf16" in flags else None
    facts = {"by": by, "onednn": processor.onednn}
    if device != "cpu":
        return ok("bf16", f"computed by the {device}", **facts)
    if by is not None and processor.onednn:
        return ok("bf16", f"fast on this processor, by {by}: choose --dtype bf16", **facts)
    if by is not None:
        text = f"the processor has {by}, and TF_ENABLE_ONEDNN_OPTS switches off what uses it"
        return warning("bf16", text, "unset TF_ENABLE_ONEDNN_OPTS", **facts)
    how = "converted to fp32 and back" if "avx512f" in flags else "computed by no instruction of this processor"
    return warning("bf16", f"slow on this processor: {how}", "choose --dtype fp32 on it", **facts)


def _count(cores: int) -> str:
    return f"{cores} core{'' if cores == 1 else 's'}"
