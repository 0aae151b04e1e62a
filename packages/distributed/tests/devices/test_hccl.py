"""Variables and configuration for Habana's libraries follow from the cluster, and contradictions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.cluster.hosts import Cluster, Host
from gaudi_distributed.devices.habana import check_hcl_config, hccl_environment, hcl_config, module_environment
from gaudi_distributed.errors import ConfigurationError, MissingProgramError

ONE = Cluster((Host("localhost", 8),))
TWO = Cluster((Host("10.0.0.1", 2), Host("10.0.0.2", 2)))


@pytest.mark.parametrize(
    ("cluster", "scale_out", "interface", "expected"),
    [
        (ONE, "gaudi", None, {}),
        (TWO, "gaudi", "eth0", {}),
        (TWO, "tcp", None, {"HCCL_OVER_TCP": "1"}),
        (TWO, "tcp", "eth0", {"HCCL_OVER_TCP": "1", "HCCL_SOCKET_IFNAME": "eth0"}),
        (TWO, "hierarchical", "eth0", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HCCL_SOCKET_IFNAME": "eth0"}),
    ],
)
def test_variables(cluster: Cluster, scale_out: Any, interface: str | None, expected: dict[str, str]) -> None:
    assert hccl_environment(cluster, scale_out, interface, {}) == expected
    assert hccl_environment(cluster, scale_out, interface, expected) == expected


@pytest.mark.parametrize(
    ("cluster", "scale_out", "interface", "environ", "words"),
    [
        (ONE, "tcp", None, {}, "--scale_out tcp: localhost"),
        (TWO, "gaudi", None, {"HCCL_OVER_TCP": "yes"}, "HCCL_OVER_TCP is 'yes'"),
        (TWO, "gaudi", None, {"HCCL_OVER_TCP": "1"}, "--scale_out gaudi needs '0'"),
        (TWO, "tcp", None, {"HCCL_OVER_TCP": "0"}, "needs '1'"),
        (TWO, "tcp", None, {"HCCL_OVER_OFI": "1"}, "HCCL_OVER_OFI is '1'"),
        (TWO, "tcp", None, {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, "HOROVOD_HIERARCHICAL_ALLREDUCE is '1'"),
        (TWO, "hierarchical", None, {"HCCL_OVER_TCP": "1"}, "HCCL_OVER_TCP is '1'"),
        (TWO, "tcp", "eth0", {"HCCL_SOCKET_IFNAME": "eth1"}, "HCCL_SOCKET_IFNAME is 'eth1'"),
        (TWO, "tcp", "lo", {}, "on the loopback"),
        (TWO, "tcp", None, {"HCCL_SOCKET_IFNAME": "eth0,lo"}, "on the loopback"),
    ],
)
def test_contradictions(
    cluster: Cluster, scale_out: Any, interface: str | None, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        hccl_environment(cluster, scale_out, interface, environ)


def test_modules() -> None:
    assert module_environment(5, {}) == {"HLS_MODULE_ID": "5", "ID": "5"}
    for rank, environ in ((8, {}), (-1, {}), (0, {"HLS_MODULE_ID": "1"})):
        with pytest.raises(ConfigurationError):
            module_environment(rank, environ)


def test_hcl_config() -> None:
    assert json.loads(hcl_config(ONE)) == {"HCL_PORT": 5332, "HCL_TYPE": "HLS1", "HCL_COUNT": 8}
    ranks = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
    assert json.loads(hcl_config(TWO)) == {"HCL_PORT": 5332, "HCL_TYPE": "HLS1", "HCL_RANKS": ranks}
    assert json.loads(hcl_config(TWO, hierarchical=True))["HCL_COUNT"] == 2


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        (Cluster((Host("localhost", 9),)), {}, "HLS1 has 8"),
        (Cluster((Host("a"), Host("b"))), {}, "host 'a': HCL"),
        (Cluster((Host("a", 1), Host("b", 2))), {"hierarchical": True}, "different numbers"),
    ],
)
def test_wrong_hcl_configs(cluster: Cluster, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        hcl_config(cluster, **options)


def test_a_config_for_other_hosts_is_found(tmp_path: Path) -> None:
    path = tmp_path / "hcl.json"
    for cluster in (ONE, TWO):
        path.write_text(hcl_config(cluster))
        check_hcl_config(str(path), cluster)
    values = ('"HCL_RANKS": ["10.0.0.1"]', '"HCL_RANKS": null', '"HCL_RANKS": 1.5', '"HCL_COUNT": 1e999')
    for text in (hcl_config(ONE), "{}", "[]", "no", *(f"{{{value}}}" for value in values)):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"hcl\.json: "):
            check_hcl_config(str(path), TWO)
    with pytest.raises(MissingProgramError):
        check_hcl_config(str(tmp_path / "none.json"), TWO)
