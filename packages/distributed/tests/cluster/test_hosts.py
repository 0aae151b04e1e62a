"""Lists of hosts are read strictly, and what is wrong is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gaudi_distributed.cluster.hosts import (
    check_host,
    expand_node_list,
    expand_task_counts,
    find_cluster,
    join_port,
    parse_hostfile,
    parse_hosts,
)
from gaudi_distributed.errors import ConfigurationError, MissingProgramError


@pytest.mark.parametrize("name", ["a", "node-1.example.org", "10.0.0.1", "fe80::1", "A" * 63, "1a", "xn--bcher-kva"])
def test_hosts(name: str) -> None:
    check_host(name, "test")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "-a",
            "a-",
            "a_b",
            "a b",
            "a\n",
            "a;b",
            "$(a)",
            "a:1",
            ".a",
            "a.",
            "a..b",
            "A" * 64,
            "a" * 254,
            "é",
            "a@b",
        ),
        *("10.0.0.256", "10.0.1", "1.2.3.4.5", "0x7f.1", "٣", "fe80::1%eth0", "[::1]", ":::", "a/b", "a,b", "a\x00"),
    ],
)
def test_no_hosts(name: str) -> None:
    with pytest.raises(ConfigurationError, match="not a host"):
        check_host(name, "test")


def test_list() -> None:
    assert parse_hosts("a:2,b.c:1024,10.0.0.1:1,[::0:1]:3") == (("a", 2), ("b.c", 1024), ("10.0.0.1", 1), ("::1", 3))
    assert parse_hosts("a,[fe80::1]") == (("a", None), ("fe80::1", None))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:2,a:3", "'a' is named"),
        ("a:1,A:1", "'A' is named"),
        ("[::1]:1,[0::1]:1", "'::1' is named twice"),
        ("a:0", "'0' ranks"),
        ("a:1025", "'1025' ranks"),
        ("a:+1", r"'\+1' ranks"),
        ("a:²", "'²' ranks"),
        ("a: 2", "' 2' ranks"),
        ("a:", "'' ranks"),
        ("a:2:3", "'2:3' ranks"),
        ("", "'' is not"),
        ("a,", "'' is not"),
        ("a:2,b", "some have none"),
        ("::1", "not a host"),
        ("[::1", "not a host"),
        ("[a]:2", "not a host"),
        ("[::1]x", "not a host"),
    ],
)
def test_wrong_lists(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        parse_hosts(text)
    assert str(caught.value).startswith("--hosts: ")
    assert "\n" not in str(caught.value)


def test_hostfile() -> None:
    text = "# two servers\nnode1 slots=8\n\n  node2   slots=4  # the old one\r\n"
    assert parse_hostfile(text, "hosts") == (("node1", 8), ("node2", 4))
    assert parse_hostfile("a\nb", "hosts") == (("a", None), ("b", None))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("a slots=2\nb max-slots=3", "hosts: line 2: 'max-slots=3'"),
        ("a slots=2 b", "line 1: 'slots=2 b'"),
        ("a slots=", "hosts: line 1: '' ranks"),
        ("a:2", "line 1: 'a:2'"),
        ("-oProxyCommand=x slots=1", "line 1: '-oProxyCommand=x'"),
        ("a\na", "'a' is named"),
    ],
)
def test_wrong_hostfiles(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse_hostfile(text, "hosts")


def test_what_stands_after_a_host_is_told_in_few_letters() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_hostfile(f"a\nb {'x' * 5000}", "hosts")
    assert (caught.value.path, caught.value.record) == ("hosts", "line 2")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].example.org", ["n1.example.org", "n2.example.org"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert list(expand_node_list(text)) == names


@pytest.mark.parametrize(
    "text",
    ["", "n[", "n]", "n[]", "n[1-]", "n[2-1]", "n[a]", "n[1-99999]", "n[[1]]", "a,,b", ",a", "a b", "n[1],n1", "$(x)"],
)
def test_wrong_node_lists(text: str) -> None:
    with pytest.raises(ConfigurationError, match="SLURM_JOB_NODELIST: "):
        expand_node_list(text)


@pytest.mark.parametrize(
    "text", ["n[1-2000]m[1-2000]", "n[1-4000]m[1-4000]o[1-4000]", f"n[{'1-4000,' * 10000}1]", "n[1-4000],m[1-4000]"]
)
def test_a_node_list_cannot_fill_the_memory(text: str) -> None:
    with pytest.raises(ConfigurationError, match="more than 4096 hosts"):
        expand_node_list(text)


def test_counts_of_tasks_cannot_fill_the_memory() -> None:
    with pytest.raises(ConfigurationError, match="more than 4096 hosts"):
        expand_task_counts(",".join(["1(x999999)"] * 1000))


def test_task_counts() -> None:
    assert expand_task_counts("2(x3),1") == (2, 2, 2, 1)
    for text in ("", "2(x)", "x", "0", "2(3)"):
        with pytest.raises(ConfigurationError, match="SLURM_TASKS_PER_NODE: "):
            expand_task_counts(text)


def test_ports() -> None:
    assert join_port("a", 22) == "a:22"
    assert join_port("::1", 22) == "[::1]:22"


def test_a_pipe_is_no_hostfile(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(MissingProgramError) as caught:
        find_cluster({}, hostfile=tmp_path / "hosts")
    assert caught.value.path == str(tmp_path / "hosts")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_hostfile_may_have_comments_in_any_language(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "hosts"
    path.write_text("# Rechner für Übungen\na slots=2\r\nb slots=1 # 計算\n", encoding=encoding)
    assert find_cluster({}, hostfile=path)[0].size == 3
    path.write_text("rechner-ü slots=2\n", encoding=encoding)
    with pytest.raises(ConfigurationError) as caught:
        find_cluster({}, hostfile=path)
    assert caught.value.record == "rechner-ü"
