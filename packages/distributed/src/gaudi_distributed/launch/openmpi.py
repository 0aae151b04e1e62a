"""A launch by Open MPI: one mpirun, which starts the ranks here and, through its daemons, elsewhere."""

from __future__ import annotations

from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.hosts import is_ipv6
from gaudi_distributed.launch.plan import LaunchPlan, Process
from gaudi_distributed.supervision.coordinator import COORDINATOR, TOKEN


def plan_openmpi(plan: LaunchPlan) -> list[Process]:
    """Return mpirun's arguments and environment; variables reach the ranks by name, so no value is on its command line.

    Raises:
        ConfigurationError: a host is an IPv6 address, or an argument is ":", which mpirun takes for its own.
    """
    _check(plan)
    hosts = ",".join(f"{host.name}:{host.slots}" for host in plan.cluster.hosts)
    made = (COORDINATOR, TOKEN)
    exported = sorted({*plan.forwarded, *plan.environment, *made})
    argv = (
        plan.mpirun,
        *(("--allow-run-as-root",) if plan.is_root else ()),
        "--np",
        str(plan.cluster.size),
        "--host",
        hosts,
        *_bind(plan),
        *_reach(plan),
        *(("--tag-output",) if plan.tag_output else ()),
        *(word for name in exported for word in ("-x", name)),
        *plan.command,
    )
    name = f"ranks 0 to {plan.cluster.size - 1} on {hosts}"
    return [Process(name, argv, plan.environment, tuple(sorted({*plan.forwarded, *plan.kept})), made)]


def _check(plan: LaunchPlan) -> None:
    for host in plan.cluster.hosts:
        if is_ipv6(host.name):
            raise ConfigurationError(
                f"host {host.name}: mpirun reads no IPv6 addresses; name the host, or its IPv4 address"
            )
    if ":" in plan.command:
        raise ConfigurationError("an argument is ':', with which mpirun begins another program; use --backend gloo")


def _bind(plan: LaunchPlan) -> tuple[str, ...]:
    if plan.binding.cores == 0:
        # Ranks that share a core must not spin while they wait for each other.
        spare = ("--mca", "mpi_yield_when_idle", "1")
        return "--bind-to", "none", "--map-by", "slot", "--oversubscribe", *spare
    return "--bind-to", "core", "--map-by", f"socket:PE={plan.binding.cores}"


def _reach(plan: LaunchPlan) -> tuple[str, ...]:
    if plan.is_local:
        return ()
    network = plan.interface
    return (
        *("--mca", "plm_rsh_agent", "ssh", "--mca", "plm_rsh_args", " ".join(plan.ssh.options)),
        *(() if network is None else ("--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network)),
        *(() if plan.mpi_root is None else ("--prefix", plan.mpi_root)),
    )
