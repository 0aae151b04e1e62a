from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from gaudi_distributed.devices.machine import Machine, find_mounts

MakeMachine = Callable[..., Machine]

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 27 0:40 / /data rw - nfs4 server:/export rw,vers=4.2
41 27 8:1 /inner /data/my\040disk ro,relatime shared:1 master:2 - xfs /dev/sdb1 rw
42 40 0:41 / /data rw - tmpfs tmpfs rw,size=4k
a line that is none
43 27
"""


def test_lines_of_the_table_are_read_and_others_left_out(make_machine: MakeMachine) -> None:
    machine = make_machine({"proc/self/mountinfo": TABLE})
    kinds = ("proc", "ext4", "nfs4", "xfs", "tmpfs")
    found = [mount for kind in kinds for mount in find_mounts(machine, kind)]
    assert [str(point) for _, point in found] == ["/proc", "/", "/data", "/data/my disk", "/data"]
    assert found[3][0] == PurePosixPath("/inner")
    assert [*find_mounts(machine, "xfs", "ro")] == [*find_mounts(machine, "xfs", "rw")] == [found[3]]
    assert [*find_mounts(machine, "xfs", "discard")] == []
