from __future__ import annotations

import resource

from gaudi_distributed.doctor.system import Limits, gather_limits, judge_files, judge_locked


def test_limits_of_this_process() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert gather_limits().files == (None if files == resource.RLIM_INFINITY else files)


def test_open_files() -> None:
    assert judge_files(Limits(1024, 4096, None)).level == "warning"
    assert judge_files(Limits(65536, None, None)).text == "65536 may be open at once, any number if asked for"
    assert judge_files(Limits(None, None, None)).level == "ok"


def test_locked_memory_matters_to_a_gaudi() -> None:
    assert judge_locked(Limits(1, 1, 8 << 20), "cpu").text == "8.0 MiB; a run on the cpu over TCP locks none"
    assert judge_locked(Limits(1, 1, 8 << 20), "hpu").level == "warning"
    assert judge_locked(Limits(1, 1, None), "hpu").level == "ok"
