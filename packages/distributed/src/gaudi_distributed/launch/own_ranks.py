"""Launches without MPI: each rank is a process of its own, here or over ssh, for Horovod's Gloo or tf.distribute."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gaudi_distributed.cluster import RankPlace
from gaudi_distributed.elastic import WORKER
from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.launch.plan import RENDEZVOUS, LaunchPlan, Process
from gaudi_distributed.opening import ENGINE_VARIABLE
from gaudi_distributed.place import write_tf_config
from gaudi_distributed.supervision.coordinator import COORDINATOR, TOKEN

# What workers that come and go wait for each other: a new one imports TensorFlow meanwhile.
GLOO_SECONDS = 60


def plan_gloo(plan: LaunchPlan) -> list[Process]:
    """Return the processes of Horovod with Gloo, with the variables that horovodrun sets.

    Not by horovodrun itself, which switches host key checks off and puts the whole environment into shell commands.
    """

    def variables(place: RankPlace) -> dict[str, str]:
        hosts = plan.cluster.hosts
        across = [index for index, host in enumerate(hosts) if host.slots > place.local_rank]
        numbers = {
            "RANK": place.rank,
            "SIZE": plan.cluster.size,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_SIZE": place.host.slots,
            "CROSS_RANK": across.index(place.host_index),
            "CROSS_SIZE": len(across),
        }
        interface = "lo" if plan.is_local else plan.interface
        return {
            **{f"HOROVOD_{name}": str(number) for name, number in numbers.items()},
            "HOROVOD_HOSTNAME": place.host.name,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            **({} if interface is None else {"HOROVOD_GLOO_IFACE": interface}),
        }

    if plan.interface is not None and "/" in plan.interface:
        raise ConfigurationError(f"--interface {plan.interface}: Gloo needs the name of an interface, like eth0")
    return _plan(plan, variables, RENDEZVOUS)


def plan_multi_worker(plan: LaunchPlan) -> list[Process]:
    """Return the processes of tf.distribute, each with its TF_CONFIG."""
    workers = plan.cluster.workers
    return _plan(plan, lambda place: {"TF_CONFIG": write_tf_config(workers, place.rank)})


def _plan(
    plan: LaunchPlan, variables: Callable[[RankPlace], Mapping[str, str]], made: tuple[str, ...] = ()
) -> list[Process]:
    processes = []
    for place in plan.cluster.places():
        here = place.host.name in plan.local_hosts
        bound = plan.binding.processors
        processes.append(
            Process(
                name=f"rank {place.rank} on {place.host.name}",
                argv=plan.command,
                environment={**plan.environment, **variables(place)},
                forwarded=tuple(sorted({*plan.forwarded, *(plan.kept if here else ())})),
                made=(COORDINATOR, TOKEN, *made),
                reach=() if here else plan.ssh.reach(place.host.name, plan.guard),
                processors=bound[place.local_rank] if place.local_rank < len(bound) else (),
                rank=place.rank,
            )
        )
    return processes


def plan_worker(plan: LaunchPlan, host: str, worker: int, *, is_here: bool) -> Process:
    """Return a worker of a run whose hosts come and go; it asks for its rank, see `gaudi_distributed.elastic`."""
    interface = "lo" if plan.interface is None else plan.interface
    variables = {
        ENGINE_VARIABLE: "horovod",
        WORKER: str(worker),
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_SECONDS),
    }
    return Process(
        name=f"worker {worker} on {host}",
        argv=plan.command,
        environment={**plan.environment, **variables},
        forwarded=tuple(sorted({*plan.forwarded, *(plan.kept if is_here else ())})),
        made=RENDEZVOUS,
        reach=() if is_here else plan.ssh.reach(host, plan.guard),
        rank=worker,
    )
