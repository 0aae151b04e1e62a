from __future__ import annotations

import resource

from gaudi_distributed.doctor.system import Limits, check_files, check_locked, gather_limits


def test_limits_of_this_process() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert gather_limits().files == (None if files == resource.RLIM_INFINITY else files)


def test_open_files() -> None:
    assert check_files(Limits(1024, 4096, None)).level == "warning"
    assert check_files(Limits(65536, None, None)).measured == {"soft": 65536, "hard": None}
    assert check_files(Limits(None, None, None)).level == "ok"


def test_locked_memory_matters_to_a_gaudi() -> None:
    assert check_locked(Limits(1, 1, 8 << 20), "cpu").text.startswith("8.0 MiB")
    assert check_locked(Limits(1, 1, 8 << 20), "hpu").level == "warning"
    assert check_locked(Limits(1, 1, None), "hpu").level == "ok"
