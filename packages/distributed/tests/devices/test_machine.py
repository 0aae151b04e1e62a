"""Files that are missing, may not be read, are folders, or are not text."""

from __future__ import annotations

import os
from collections.abc import Callable

from gaudi_distributed.devices.machine import MAX_BYTES, Machine

MakeMachine = Callable[..., Machine]


def test_reading(make_machine: MakeMachine) -> None:
    machine = make_machine({"proc/number": " 42\n", "proc/text": "12 kB", "proc/folder/": "", "proc/big": "9" * 21})
    assert machine.read("/proc/number") == "42"
    assert [machine.read_number(f"/proc/{name}") for name in ("number", "text", "folder", "none", "big")] == [
        42,
        None,
        None,
        None,
        None,
    ]
    assert machine.names("/proc") == ["big", "folder", "number", "text"]
    assert machine.names("/nowhere") == []


def test_bytes_that_are_no_text_and_files_without_end(make_machine: MakeMachine) -> None:
    machine = make_machine({"sys/": ""})
    machine.path("/sys/odd").write_bytes(b"\xff\xfea")
    assert machine.read("/sys/odd") == "\ufffd\ufffda"
    machine.path("/sys/endless").symlink_to("/dev/zero")
    assert len(machine.read("/sys/endless") or "") == MAX_BYTES
    machine.path("/sys/loop").symlink_to("loop")
    assert machine.read("/sys/loop") is None


def test_what_may_not_or_cannot_be_read(make_machine: MakeMachine) -> None:
    machine = make_machine({"sys/secret": "1", "sys/closed/a": "1"})
    machine.path("/sys/secret").chmod(0)
    machine.path("/sys/closed").chmod(0)
    may = os.geteuid() == 0  # root may read everything of these
    assert machine.read("/sys/secret") == ("1" if may else None)
    assert machine.names("/sys/closed") == (["a"] if may else [])
    machine.path("/sys/closed").chmod(0o700)
    # Its first page is mapped by nobody.
    assert Machine().read("/proc/self/mem") is None
