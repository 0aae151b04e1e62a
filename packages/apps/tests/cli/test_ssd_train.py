from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_apps.ssd_train import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(argv)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--mode", "plan", "--json", "--num-examples-per-epoch", "117266", "-b", "1024")
    assert (status, err) == (0, "")
    assert json.loads(out)["total_steps"] == 5750


@pytest.mark.parametrize(
    ("argv", "status", "named"),
    [
        (["--bath_size", "3"], 64, "--batch_size"),
        (["--batch_size", "x"], 64, "--batch_size"),
        (["-f", "--batch_size", "0"], 64, "--batch_size 0: "),
        (["--config", "nothing.yaml"], 66, "nothing.yaml"),
        (["--mode", "plan", "--data_dir", "nothing"], 66, "nothing"),
    ],
)
def test_errors_are_short_and_have_their_status(
    capsys: pytest.CaptureFixture[str], argv: list[str], status: int, named: str
) -> None:
    found, out, err = run(capsys, *argv)
    assert (found, out) == (status, "")
    assert named in err
    assert len(err.splitlines()) <= 3
    assert "Traceback" not in err


@pytest.mark.costly
@pytest.mark.parametrize("argv", [["--help"], ["--mode", "plan", "-f"], ["--batch_size", "x"]])
def test_answers_without_tensorflow(argv: list[str]) -> None:
    code = (
        "import sys\nfrom gaudi_apps.ssd_train import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n"
        "    heavy = {'tensorflow', 'numpy', 'cv2', 'matplotlib'} & set(sys.modules)\n"
        "    print('imported:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "imported: []"


@pytest.mark.costly
def test_module_can_be_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gaudi_apps.ssd_train", "--mode", "plan", "--data_dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 66
    assert done.stderr.startswith(f"ssd_train: error: {tmp_path}")
