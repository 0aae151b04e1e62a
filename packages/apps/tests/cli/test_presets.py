"""Compare the command of every preset of a program, word by word, with golden/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_apps.cli import presets
from gaudi_apps.mxnet import submission
from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.presets import SERVERS, load_presets

GOLDEN = Path(__file__).parent / "golden"
TWO, FOUR = "--hosts 10.0.0.1:8,10.0.0.2:8", "--hosts 10.0.0.1:4,10.0.0.2:4,10.0.0.3:4,10.0.0.4:4"
SINGULARITY = "--container singularity --image ssd.sif --mount /data/coco:/coco:ro"

LAUNCHES = {
    "ssd-habana-8": "--preset ssd-habana-8 ssd_train --data_dir /data/coco",
    "resnet-habana-8": "--preset resnet-habana-8",
    "resnet-habana-16-tcp": f"--preset resnet-habana-16-tcp {TWO} --ssh_port 3022",
    "resnet-habana-8-tf": "--preset resnet-habana-8-tf",
    "resnext-habana-8": "--preset resnext-habana-8",
    "dss8440": "--preset dss8440 --tag_output",
    "c4140": "--preset c4140",
    "2xc4140": "--preset 2xc4140 --hosts 10.0.0.1:4,10.0.0.2:4",
    "4xc4140": f"--preset 4xc4140 {FOUR}",
    "dss8440-docker": "--preset dss8440 --container docker --image registry/ssd:1 --mount /data/coco:/coco:ro",
    "c4140-docker": "--preset c4140 --container docker --image registry/ssd:1 --workdir /work",
    "dss8440-slurm": f"--preset dss8440 {SINGULARITY} --slurm_script - --sbatch=--time=01:00:00",
    "4xc4140-slurm": f"--preset 4xc4140 {SINGULARITY} --slurm_script -",
    "2xc4140-singularity": f"--preset 2xc4140 --hosts 10.0.0.1:4,10.0.0.2:4 {SINGULARITY}",
    "submission": "--submission",
    "submission-docker": "--submission ssd_mxnet_train --mlperf",
    "submission-slurm": "--submission --slurm_script - ssd_mxnet_train --mlperf",
    "submission-singularity": "--submission ssd_mxnet_train --mlperf",
}

# Below a folder of the test.
_FOLDERS = {"DATADIR": "HERE/data", "LOGDIR": "HERE/results", "PRETRAINED_DIR": "HERE/weights"}
_NODES = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "10.0.0.[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
ENVIRONMENTS = {
    "submission": {"SYSTEM": "DSS8440", "NEXP": "2", **_FOLDERS},
    "submission-docker": {"SYSTEM": "C4140", "CONT": "registry/ssd:1", "NEXP": "1", **_FOLDERS},
    "submission-slurm": {"SYSTEM": "2xC4140", "CONT": "ssd.sif", "NEXP": "5", **_FOLDERS},
    "submission-singularity": {"SYSTEM": "2xC4140", "CONT": "ssd.sif", "NEXP": "1", **_FOLDERS, **_NODES},
}


@pytest.fixture
def describe(plan: Callable[..., str], tmp_path: Path) -> Callable[[str], str]:
    """Return the function that gives what a launch would run, with the folders that it needs."""
    (tmp_path / "data" / "coco2017").mkdir(parents=True)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "resnet34-333f7ec4.pickle").touch()

    def run(name: str) -> str:
        environ = {key: value.replace("HERE", str(tmp_path)) for key, value in ENVIRONMENTS.get(name, {}).items()}
        return plan(LAUNCHES[name], environ).replace(str(tmp_path), "/here")

    return run


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_would_run(name: str, describe: Callable[[str], str]) -> None:
    assert describe(name) == (GOLDEN / f"{name}.txt").read_text()


def test_every_preset_is_pinned_and_registered() -> None:
    assert {*presets.PRESETS, *submission.PRESETS} <= set(LAUNCHES)
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(LAUNCHES)
    assert load_presets() == {**SERVERS, **presets.PRESETS, **submission.PRESETS}


def test_a_preset_is_for_its_program(plan: Callable[..., str]) -> None:
    with pytest.raises(FlagError, match="not ssd_train"):
        plan("--preset dss8440 ssd_train")
