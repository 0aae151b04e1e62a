"""`gaudi-run doctor` where nothing can be written: on a view of this machine whose root is read-only. Root only."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# A mount namespace of its own: this machine stays as it is.
READ_ONLY = 'mount --make-rprivate / && mount -o remount,bind,ro / && ! touch /canary 2>/dev/null && exec "$@"'


def test_it_needs_to_write_nothing() -> None:
    command = [sys.executable, "-m", "gaudi_distributed.launch", "doctor", "--json", "--np", "2"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", *command, "--model_dir", "/"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.stderr == ""
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    faults = {name for name, check in checks.items() if check["level"] == "fault"}
    assert faults == {"disk"}, checks
    assert done.returncode == 78
    assert "not be written" in checks["disk"]["text"]
    assert checks["Horovod"]["facts"]["parts"]["Gloo"] is True
