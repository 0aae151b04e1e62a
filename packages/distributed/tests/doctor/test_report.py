"""The table, the JSON, and the exit status."""

from __future__ import annotations

import json

import pytest

from gaudi_distributed.doctor.findings import (
    Finding,
    exit_status,
    fault,
    find_worst,
    format_bytes,
    format_json,
    format_table,
    ok,
    warning,
)

FINDINGS = [ok("cores", "4", count=4), warning("disk", "5 GiB free", "free some"), fault("MPI", "none", "install it")]


def test_table() -> None:
    assert format_table(FINDINGS, "node1").splitlines() == [
        "ok       cores  4",
        "warning  disk   5 GiB free",
        "                -> free some",
        "fault    MPI    none",
        "                -> install it",
        "node1: 1 ok, 1 warning, 1 fault",
    ]
    assert format_table(FINDINGS[:1], "node1").endswith("node1: 1 ok, 0 warnings, 0 faults\n")


def test_what_hosts_say_gives_a_terminal_no_orders() -> None:
    table = format_table([fault("host b", "\x1b[2Jbad\nfault  x\u202e", "a\tb")], "n\x07")
    assert table.splitlines() == [
        "fault    host b  ?[2Jbad fault x?",
        "                 -> a b",
        "n?: 0 ok, 0 warnings, 1 fault",
    ]


def test_json() -> None:
    document = json.loads(format_json(FINDINGS, "node1"))
    assert (document["host"], document["level"], document["exit_status"]) == ("node1", "fault", 78)
    assert document["checks"][0] == {
        "check": "cores",
        "level": "ok",
        "text": "4",
        "remedy": None,
        "facts": {"count": 4},
    }


@pytest.mark.parametrize(
    ("count", "worst", "status"), [(0, "ok", 0), (1, "ok", 0), (2, "warning", 0), (3, "fault", 78)]
)
def test_the_worst_decides(count: int, worst: str, status: int) -> None:
    findings: list[Finding] = FINDINGS[:count]
    assert find_worst(findings) == worst
    assert exit_status(findings) == status


def test_bytes() -> None:
    assert [format_bytes(count) for count in (0, 1023, 1536, 3 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]
