"""The findings as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from gaudi_distributed.doctor.findings import LEVELS, Finding, exit_status, find_worst

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
            "facts": dict(finding.facts),
        }
        for finding in findings
    ]
    worst = find_worst(findings)
    document = {"host": host, "level": worst, "exit_status": exit_status(findings), "checks": checks}
    return json.dumps(document, indent=2) + "\n"


def _plain(text: str) -> str:
    """Return the text on one line and without what a terminal would take for orders: it may come from elsewhere."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
