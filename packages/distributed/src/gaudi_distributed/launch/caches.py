"""Clear the page caches of all hosts before an experiment, as MLPerf's rules ask, where the user may do that."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from gaudi_distributed.launch.processes import LaunchPlan

# Tells the ranks that the caches of their hosts were cleared for this run; a program's log of MLPerf says so.
CACHES_CLEARED = "GAUDI_RUN_CACHES_CLEARED"
_SECONDS = 600.0


def list_clearing(plan: LaunchPlan, environ: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the commands, each with its host: write what is not on disk yet, then drop what is cached.

    Who is not root asks sudo, which may not ask back. Other hosts are reached by ssh, or in a job of SLURM by srun.
    """
    commands = []
    for host in plan.cluster.hosts:
        is_here = host.name in plan.local_hosts
        sysctl = _find("sysctl", environ) if is_here else "/sbin/sysctl"
        sudo = () if plan.is_root else ("sudo", "-n")
        for argv in (("sync",), (*sudo, sysctl, "-q", "vm.drop_caches=3")):
            commands.append((host.name, argv if is_here else _reach(plan, host.name, argv, environ)))
    return commands


def clear_caches(plan: LaunchPlan, environ: Mapping[str, str]) -> str | None:
    """Clear the caches of all hosts of a launch; return None, or a line that says what kept one from being cleared."""
    for host, argv in list_clearing(plan, environ):
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                env=dict(environ),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{host}: {error}"
        if done.returncode:
            said = done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}"
            return f"{host}: {argv[-2] if len(argv) > 1 else argv[0]}: {said.splitlines()[-1]}"
    return None


def _reach(plan: LaunchPlan, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    if "SLURM_JOB_ID" in environ:
        return ("srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--", *argv)
    return plan.ssh.reach(host, tuple(argv))


def _find(name: str, environ: Mapping[str, str]) -> str:
    """Return a program of the system's, which lies where only root looks."""
    path = os.pathsep.join((environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    return shutil.which(name, path=path) or f"/sbin/{name}"
