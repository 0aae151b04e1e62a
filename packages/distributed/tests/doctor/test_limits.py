from __future__ import annotations

import resource

from gaudi_distributed.doctor.system import check_files, check_locked

INFINITE = resource.RLIM_INFINITY


def test_limits_of_this_process() -> None:
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert check_files(files, most_files).measured["soft"] == (None if files == INFINITE else files)


def test_open_files() -> None:
    assert check_files(1024, 4096).level == "warning"
    assert check_files(65536, INFINITE).measured == {"soft": 65536, "hard": None}
    assert check_files(INFINITE, INFINITE).level == "ok"


def test_locked_memory_matters_to_a_gaudi() -> None:
    assert check_locked(8 << 20, "cpu").text.startswith("8.0 MiB")
    assert check_locked(8 << 20, "hpu").level == "warning"
    assert check_locked(INFINITE, "hpu").level == "ok"
