"""Limits by control groups of version 1, of version 2, of both at once, and in containers that see a part only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gaudi_distributed.devices.machine import Machine, read_memory_limit, read_processor_quota

MakeMachine = Callable[..., Machine]

GIB = 1 << 30
# Version 1 beside an unused version 2, as systems without systemd mount them.
VERSION_1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/jobs/7\n2:cpuacct:/\n1:cpu:/\n0::/\n",
    "proc/self/mountinfo": (
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    ),
}
NO_LIMIT = "9223372036854771712\n"
VERSION_2 = {
    "proc/self/cgroup": "0::/user.slice/run.scope\n",
    "proc/self/mountinfo": "29 22 0:25 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
}
# Docker with version 1: the container sees its own group as the top of the hierarchy.
DOCKER = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/4f0c\n3:memory:/docker/4f0c\n",
    "proc/self/mountinfo": (
        "801 800 0:31 /docker/4f0c /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:15 - cgroup cgroup rw,cpu,cpuacct\n"
        "802 800 0:33 /docker/4f0c /sys/fs/cgroup/memory ro,nosuid master:17 - cgroup cgroup rw,memory\n"
    ),
}


def test_version_1_takes_the_group_or_one_above_it_that_leaves_least(make_machine: MakeMachine) -> None:
    memory = "sys/fs/cgroup/memory"
    files = {
        **VERSION_1,
        f"{memory}/memory.limit_in_bytes": NO_LIMIT,
        f"{memory}/memory.usage_in_bytes": "1\n",
        f"{memory}/jobs/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{memory}/jobs/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{memory}/jobs/memory.stat": f"cache 5\ninactive_file 7\ntotal_inactive_file {GIB}\n",
        f"{memory}/jobs/7/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{memory}/jobs/7/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    machine = make_machine(files)
    assert read_memory_limit(machine) == (4 * GIB, 2 * GIB)
    assert read_processor_quota(machine) is None


def test_version_1_without_limits(make_machine: MakeMachine) -> None:
    files = {
        f"sys/fs/cgroup/memory/{name}": NO_LIMIT for name in ("memory.limit_in_bytes", "jobs/memory.limit_in_bytes")
    }
    assert read_memory_limit(make_machine({**VERSION_1, **files})) is None


def test_version_2(make_machine: MakeMachine) -> None:
    top = "sys/fs/cgroup/user.slice"
    files = {
        **VERSION_2,
        f"{top}/memory.max": "max\n",
        f"{top}/cpu.max": "max 100000\n",
        f"{top}/run.scope/memory.max": f"{2 * GIB}\n",
        f"{top}/run.scope/memory.current": f"{3 * GIB}\n",
        f"{top}/run.scope/memory.stat": "anon 1\ninactive_file 0\n",
        f"{top}/run.scope/cpu.max": "150000 100000\n",
    }
    machine = make_machine(files)
    assert read_memory_limit(machine) == (2 * GIB, 0)
    assert read_processor_quota(machine) == 1.5


def test_a_container_sees_its_own_group_as_the_top(make_machine: MakeMachine) -> None:
    files = {
        **DOCKER,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    machine = make_machine(files)
    assert read_memory_limit(machine) == (GIB, GIB)
    assert read_processor_quota(machine) == 0.5


@pytest.mark.parametrize(
    "membership",
    ["", "nonsense\n", "0::/../../etc\n", "0::\n", "4:memory\n", "0::/gone\n", "\x00\xff\n"],
)
def test_odd_memberships_are_no_limit(make_machine: MakeMachine, membership: str) -> None:
    machine = make_machine(
        {**VERSION_2, "proc/self/cgroup": membership, "etc/memory.max": "1\n", "etc/memory.current": "1"}
    )
    assert read_memory_limit(machine) is None
    assert read_processor_quota(machine) is None


@pytest.mark.parametrize("text", ["", "max", "1", "0 0", "-5 100000", "many 100000", "1 2 3"])
def test_odd_quotas_are_none(make_machine: MakeMachine, text: str) -> None:
    files = {**VERSION_2, "sys/fs/cgroup/cpu.max": text, "sys/fs/cgroup/memory.max": text}
    assert read_processor_quota(make_machine(files)) is None
    assert read_memory_limit(make_machine(files)) is None


def test_nothing_is_there(make_machine: MakeMachine) -> None:
    assert read_memory_limit(make_machine({})) is None
