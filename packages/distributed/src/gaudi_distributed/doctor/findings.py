"""Define the findings of the doctor, run programs that it asks, and print the table."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gaudi_distributed.cluster.hosts import Cluster, Host
from gaudi_distributed.devices.selection import DeviceChoice
from gaudi_distributed.launch.processes import Backend, Ssh

# From best to worst: a warning costs speed or comfort, with a fault the run that was described does not work.
Level = Literal["ok", "warning", "fault"]
LEVELS: tuple[Level, ...] = get_args(Level)
_CONFIGURATION = 78


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        check: what was looked at.
        level: how it is.
        text: what was seen.
        remedy: what to do; empty if ok.
        measured: what was measured, as JSON holds it: bytes, seconds, counts, names.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)


def ok(check: str, text: str, **measured: Any) -> Finding:
    """Return the finding that all is well."""
    return Finding(check, "ok", text, "", measured)


def warning(check: str, text: str, remedy: str, **measured: Any) -> Finding:
    """Return the finding that a run works, but slower or with less than the machine could give."""
    return Finding(check, "warning", text, remedy, measured)


def fault(check: str, text: str, remedy: str, **measured: Any) -> Finding:
    """Return the finding that the run does not work like this."""
    return Finding(check, "fault", text, remedy, measured)


def warning_or_fault(is_fault: bool, check: str, text: str, remedy: str, **measured: Any) -> Finding:
    """Return a fault where the run needs what is missing, and else a warning."""
    return Finding(check, "fault" if is_fault else "warning", text, remedy, measured)


def find_worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level; "ok" of none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 78 (bad configuration) where there is a fault, else 0: a run works with warnings."""
    return _CONFIGURATION if find_worst(findings) == "fault" else 0


def format_bytes(count: float) -> str:
    """Return bytes in the largest binary unit of which there is one at least: 1536 is "1.5 KiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


_INDENT = 2


def format_table(findings: Sequence[Finding], host: str) -> str:
    """Return the table: level, check and text in columns, a remedy below what needs one, and the sum."""
    width = max(len(finding.check) for finding in findings) + _INDENT
    first = max(map(len, LEVELS)) + _INDENT
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:{first}}{_plain(finding.check):{width}}{_plain(finding.text)}")
        if finding.remedy:
            lines.append(f"{'':{first + width}}-> {_plain(finding.remedy)}")
    counts = Counter(finding.level for finding in findings)
    parts = [f"{counts[level]} {level if level == 'ok' or counts[level] == 1 else level + 's'}" for level in LEVELS]
    return "\n".join([*lines, f"{_plain(host)}: {', '.join(parts)}"]) + "\n"


def format_json(findings: Sequence[Finding], host: str) -> str:
    """Return the document: host, worst level, exit status, and the checks with what was measured."""
    checks = [
        {
            "check": finding.check,
            "level": finding.level,
            "text": finding.text,
            "remedy": finding.remedy or None,
            "facts": dict(finding.measured),
        }
        for finding in findings
    ]
    worst = find_worst(findings)
    document = {"host": host, "level": worst, "exit_status": exit_status(findings), "checks": checks}
    return json.dumps(document, indent=2) + "\n"


def _plain(text: str) -> str:
    """Return the text on one line and without what a terminal would take for orders: it may come from elsewhere."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


_MAX_LINE = 300


def run_program(argv: Sequence[str], environ: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Run a program, and return its standard output, stripped, and a line that says what went wrong.

    The line is empty where the program ended with 0.
    """
    try:
        done = subprocess.run(
            list(argv), env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {seconds:.0f} s"
    except OSError as error:
        return "", str(error.strerror)
    output, errors = (text.decode(errors="replace").strip() for text in (done.stdout, done.stderr))
    if not done.returncode:
        return output, ""
    # Some programs complain on standard output.
    lines = (errors or output).splitlines()
    return output, lines[-1].strip()[:_MAX_LINE] if lines else f"status {done.returncode}"


@dataclass(frozen=True)
class Request:
    """The run that a machine is checked for.

    Attributes:
        device: as the programs take it.
        cluster: hosts with their ranks.
        local_hosts: names of those that are this machine.
        backend: what is to start the ranks; None: gaudi-run's choice.
        data_dir: folder of records, or None.
        model_dir: where the run is going to write.
        interface: network interface, or network, between the hosts, if that was said.
        ssh: how other hosts are reached.
        remote_python: Python on other hosts.
        mpi_root: where Open MPI is installed on all hosts; None: where it is found.
    """

    device: DeviceChoice = "auto"
    cluster: Cluster = field(default_factory=lambda: Cluster((Host("localhost"),)))
    local_hosts: frozenset[str] = frozenset({"localhost"})
    backend: Backend | None = None
    data_dir: Path | None = None
    model_dir: Path = Path()
    interface: str | None = None
    ssh: Ssh = field(default_factory=Ssh)
    remote_python: str = "python3"
    mpi_root: str | None = None

    @property
    def ranks_here(self) -> int:
        """Return the number of ranks on this machine, or on the largest host if it is none of the hosts."""
        here = [host.slots for host in self.cluster.hosts if host.name in self.local_hosts]
        return sum(here) or self.cluster.most_slots

    @property
    def others(self) -> tuple[str, ...]:
        """Return the hosts other than this machine."""
        return tuple(host.name for host in self.cluster.hosts if host.name not in self.local_hosts)

    @property
    def needs_horovod(self) -> bool:
        """Return whether the ranks communicate through Horovod, the default for several ranks."""
        return self.backend in ("openmpi", "gloo") or (self.backend is None and self.cluster.size > 1)
