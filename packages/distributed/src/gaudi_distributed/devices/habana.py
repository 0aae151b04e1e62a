"""Load the vendor's package for Gaudi, and set up the environment of its collectives.

No other module imports the vendor's package.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal, get_args

from gaudi_distributed.cluster.hosts import DEVICES_PER_SERVER, Cluster, read_regular_file
from gaudi_distributed.errors import ConfigurationError, DeviceError, MissingProgramError

# Between servers: over the Gaudis' own ports, over TCP on the hosts' interfaces, or over these by Horovod's
# hierarchical allreduce, which reduces within each server first.
ScaleOut = Literal["gaudi", "tcp", "hierarchical"]
SCALE_OUTS: tuple[ScaleOut, ...] = get_args(ScaleOut)

_HCL_PORT = 5332
_SWITCHES = ("HCCL_OVER_TCP", "HCCL_OVER_OFI", "HOROVOD_HIERARCHICAL_ALLREDUCE")


def hccl_environment(
    cluster: Cluster, scale_out: ScaleOut, interface: str | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables for HCCL between servers; `environ` is what the user has set, and has to agree.

    `interface` is the network interface of the hosts' traffic (a name, or several with commas between).

    Raises:
        ConfigurationError: one host has nothing to scale out to, the interface is the loopback, or a variable is no
            switch or says something else.
    """
    for name in _SWITCHES:
        if environ.get(name, "0") not in ("0", "1"):
            raise ConfigurationError(f"{name} is {environ[name]!r}", field=name, remedy="set it to 0 or 1, or unset it")
    if len(cluster.hosts) == 1:
        if scale_out != "gaudi":
            raise ConfigurationError(
                f"--scale_out {scale_out}: {cluster.hosts[0].name} is the only host",
                flag="--scale_out",
                remedy="name more hosts",
            )
        return {}
    variables: dict[str, str] = {}
    if scale_out == "tcp":
        variables["HCCL_OVER_TCP"] = "1"
    elif scale_out == "hierarchical":
        variables["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
    if interface is not None and scale_out != "gaudi":
        variables["HCCL_SOCKET_IFNAME"] = interface
    for name in (*_SWITCHES, "HCCL_SOCKET_IFNAME"):
        wanted = variables.get(name, "0" if name in _SWITCHES else environ.get(name))
        found = environ.get(name, wanted)
        if found != wanted:
            raise ConfigurationError(
                f"{name} is {found!r}, and --scale_out {scale_out} needs {wanted!r}", field=name, remedy="unset it"
            )
    used = variables.get("HCCL_SOCKET_IFNAME", environ.get("HCCL_SOCKET_IFNAME", ""))
    if any(name.strip() == "lo" for name in used.split(",")):
        raise ConfigurationError(
            f"HCCL_SOCKET_IFNAME is {used!r}: no other host is on the loopback",
            field="HCCL_SOCKET_IFNAME",
            remedy="name the interface between the hosts",
        )
    return variables


def module_environment(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a rank its Gaudi of an HLS1, before the vendor's module is loaded.

    Raises:
        ConfigurationError: the server has fewer Gaudis, or a variable names another one.
    """
    if not 0 <= local_rank < DEVICES_PER_SERVER:
        raise ConfigurationError(
            f"rank {local_rank} on its host: an HLS1 has {DEVICES_PER_SERVER} Gaudis",
            remedy=f"run at most {DEVICES_PER_SERVER} ranks there",
        )
    module = str(local_rank)
    if environ.get("HLS_MODULE_ID", module) != module:
        raise ConfigurationError(
            f"HLS_MODULE_ID is {environ['HLS_MODULE_ID']!r}, and rank {local_rank} of an HLS1 has {module}",
            field="HLS_MODULE_ID",
            remedy="unset it",
        )
    return {"HLS_MODULE_ID": module, "ID": module}


def hcl_config(cluster: Cluster, *, hierarchical: bool = False) -> str:
    """Return the JSON that HCL_CONFIG_PATH points to, for SynapseAI before HCCL.

    Ranks are counted on one host, or within each with `hierarchical`; else each has the IPv4 address of its host.

    Raises:
        ConfigurationError: a host has more ranks than Gaudis, differs from the others, or is no IPv4 address.
    """
    if cluster.most_slots > DEVICES_PER_SERVER:
        raise ConfigurationError(
            f"{cluster.most_slots} ranks on a host: an HLS1 has {DEVICES_PER_SERVER} Gaudis",
            remedy=f"run at most {DEVICES_PER_SERVER} there",
        )
    config: dict[str, Any] = {"HCL_PORT": _HCL_PORT, "HCL_TYPE": "HLS1"}
    if len(cluster.hosts) == 1 or hierarchical:
        if len({host.slots for host in cluster.hosts}) > 1:
            raise ConfigurationError(
                "hosts have different numbers of ranks", remedy="within hosts, HCL counts equal ones only"
            )
        config["HCL_COUNT"] = cluster.most_slots
    else:
        config["HCL_RANKS"] = names = [each.host for each in cluster.assign_ranks()]
        for name in names:
            try:
                IPv4Address(name)
            except ValueError:
                raise ConfigurationError(
                    f"host {name!r}: HCL knows hosts by IPv4 address", remedy="name it by that"
                ) from None
    return json.dumps(config, indent=4) + "\n"


def check_hcl_config(source: str, cluster: Cluster) -> None:
    """Check the JSON file that HCL_CONFIG_PATH names.

    Raises:
        MissingProgramError: it cannot be read.
        ConfigurationError: it is not for this cluster.
    """
    try:
        text = read_regular_file(Path(source), "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingProgramError(
            f"HCL_CONFIG_PATH {source}: cannot be read ({error})",
            field="HCL_CONFIG_PATH",
            path=source,
            remedy="write it, or unset it",
        ) from error
    try:
        content = json.loads(text)
        ranks = list(content["HCL_RANKS"]) if "HCL_RANKS" in content else int(content["HCL_COUNT"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise ConfigurationError(
            f"{source}: names neither HCL_COUNT nor HCL_RANKS ({error})", path=source, remedy="write it again"
        ) from error
    expected = [each.host for each in cluster.assign_ranks()]
    if ranks not in (expected, cluster.most_slots):
        raise ConfigurationError(
            f"{source}: is for {ranks if isinstance(ranks, int) else len(ranks)} ranks on a host or in all, this run "
            f"has {cluster.size} on {', '.join(host.name for host in cluster.hosts)}",
            path=source,
            remedy="write it again",
        )


def load_habana() -> None:
    """Register the Gaudi with TensorFlow.

    Look for the driver first, see `find_hpu_error`: if loading fails, asking TensorFlow for its devices afterwards
    aborts the process.

    Raises:
        DeviceError: the distribution habana-tensorflow is not installed, or its module does not load.
    """
    module = _import_habana("habana_frameworks.tensorflow", "device hpu", "--device")
    try:
        module.load_habana_module()
    except Exception as error:
        # Of any kind: without a driver it is an AttributeError that says nothing of drivers.
        raise DeviceError(
            f"device hpu: the vendor's module does not load ({type(error).__name__}: {' '.join(str(error).split())})",
            flag="--device",
            remedy="check with hl-smi that driver and SynapseAI 1.14 are there, and that TensorFlow is 2.15.0",
        ) from error


def make_strategy() -> Any:
    """Return an HPUStrategy over the workers of TF_CONFIG; the Gaudi is registered already. Not tested on hardware.

    Raises:
        DeviceError: the distribution habana-tensorflow is not installed.
    """
    what, instead = "distribution strategy hpu", ", or choose multi_worker"
    return _import_habana("habana_frameworks.tensorflow.distribute", what, instead=instead).HPUStrategy()


def _import_habana(name: str, what: str, flag: str | None = None, instead: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        remedy = "install habana-tensorflow 1.14 beside TensorFlow 2.15.0 on Python 3.10" + instead
        raise DeviceError(f"{what}: module {error.name} is missing", flag=flag, remedy=remedy) from error
