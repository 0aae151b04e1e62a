from __future__ import annotations

from pathlib import Path

from gaudi_distributed.devices.machine import describe_jemalloc, find_jemalloc, preload_jemalloc


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_version_2_comes_before_1_and_the_users_folders_before_others(tmp_path: Path) -> None:
    assert find_jemalloc({}, tmp_path) is None
    assert "LD_LIBRARY_PATH, /usr/lib/x86_64-linux-gnu, /usr/lib64" in describe_jemalloc({}, tmp_path)
    touch(tmp_path, "opt/libjemalloc.so.1", "usr/lib64/libjemalloc.so.1")
    environ = {"LD_LIBRARY_PATH": ":/nowhere:/opt"}
    assert find_jemalloc({}, tmp_path) == tmp_path / "usr/lib64/libjemalloc.so.1"
    assert find_jemalloc(environ, tmp_path) == tmp_path / "opt/libjemalloc.so.1"
    touch(tmp_path, "usr/lib64/libjemalloc.so.2", "usr/lib/x86_64-linux-gnu/libjemalloc.so.2")
    found = tmp_path / "usr/lib/x86_64-linux-gnu/libjemalloc.so.2"
    assert find_jemalloc(environ, tmp_path) == found
    assert f"LD_PRELOAD={found} " in describe_jemalloc({}, tmp_path)
    assert describe_jemalloc({"LD_PRELOAD": "/x/libjemalloc.so.2"}, tmp_path).startswith("jemalloc: used")


def test_it_is_preloaded_before_other_libraries_and_once(tmp_path: Path) -> None:
    assert preload_jemalloc({}, tmp_path) == {}
    touch(tmp_path, "usr/lib64/libjemalloc.so.2")
    found = tmp_path / "usr/lib64/libjemalloc.so.2"
    assert preload_jemalloc({}, tmp_path) == {"LD_PRELOAD": str(found)}
    assert preload_jemalloc({"LD_PRELOAD": "/x.so"}, tmp_path) == {"LD_PRELOAD": f"{found}:/x.so"}
    assert preload_jemalloc({"LD_PRELOAD": "/x/libjemalloc.so.2"}, tmp_path) == {}
