"""Processors as /proc/cpuinfo tells them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gaudi_distributed.devices.machine import Machine, Processor, gather_processor
from gaudi_distributed.devices.selection import DeviceKind
from gaudi_distributed.doctor.system import check_bf16, check_cores, check_processor

MakeMachine = Callable[..., Machine]

CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse2 avx fma avx2 avx512f avx512_bf16
bugs\t\t: spectre_v1

processor\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx fma avx2 avx512f avx512_bf16
"""
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\n"
SERVER = Processor("x86_64", "Xeon", frozenset({"avx", "avx512f", "avx512_bf16", "amx_bf16"}), 8, 8, 4)


def test_what_the_kernel_tells(make_machine: MakeMachine) -> None:
    topology = {f"sys/devices/system/cpu/cpu{number}/topology/core_id": "0\n" for number in (0, 1)}
    found = gather_processor(make_machine({"proc/cpuinfo": CPUINFO, **topology}), {0, 1}, "x86_64")
    assert (found.model, found.logical, found.usable, found.cores, found.quota) == ("AMD EPYC", 2, 2, 1, None)
    assert check_processor(found).measured["instructions"] == ["avx", "avx2", "fma", "avx512f", "avx512_bf16"]
    assert check_processor(found).level == "ok"


def test_processors_that_tell_little(make_machine: MakeMachine) -> None:
    arm = gather_processor(make_machine({"proc/cpuinfo": ARM}), {0}, "aarch64")
    assert check_processor(arm).level == "ok"
    assert check_processor(arm).measured["instructions"] == []
    hidden = gather_processor(make_machine({"proc/cpuinfo": "\x00:"}), {0, 3}, "x86_64")
    assert check_processor(hidden).level == "warning"
    assert (hidden.logical, hidden.cores) == (2, 2)


def test_without_avx_tensorflow_does_not_start() -> None:
    finding = check_processor(replace(SERVER, flags=frozenset({"sse2"})))
    assert finding.level == "fault"
    assert "no AVX" in finding.text


@pytest.mark.parametrize(
    ("changes", "ranks", "level", "words"),
    [
        ({}, 4, "ok", "4 cores, for 4 ranks"),
        ({"usable": 2, "cores": 1}, 1, "ok", "1 core, for 1 rank"),
        ({}, 5, "warning", "for 5 ranks"),
        ({"quota": 1.5}, 1, "warning", "time to 1.5"),
        ({"quota": 8.0}, 1, "ok", "time of 8"),
    ],
)
def test_cores(changes: dict[str, Any], ranks: int, level: str, words: str) -> None:
    finding = check_cores(replace(SERVER, **changes), ranks)
    assert finding.level == level
    assert words in finding.text
    assert bool(finding.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("flags", "device", "onednn", "level", "words"),
    [
        ("avx512f avx512_bf16 amx_bf16", "cpu", True, "ok", "by AMX"),
        ("avx512f avx512_bf16", "cpu", True, "ok", "by AVX512_BF16"),
        ("avx512f avx512_bf16", "cpu", False, "warning", "TF_ENABLE_ONEDNN_OPTS"),
        ("avx512f", "cpu", True, "warning", "converted to fp32"),
        ("avx2", "cpu", True, "warning", "no instruction"),
        ("avx2", "hpu", True, "ok", "the hpu"),
    ],
)
def test_bf16(flags: str, device: DeviceKind, onednn: bool, level: str, words: str) -> None:
    finding = check_bf16(replace(SERVER, flags=frozenset(flags.split()), onednn=onednn), device)
    assert finding.level == level
    assert words in finding.text


def test_onednn_is_switched_off_by_its_variable(make_machine: MakeMachine) -> None:
    assert not gather_processor(make_machine({}, TF_ENABLE_ONEDNN_OPTS="0"), {0}).onednn
    assert gather_processor(make_machine({}, TF_ENABLE_ONEDNN_OPTS="1"), {0}).onednn
