"""The proof of resuming, short and with the small network, and that it finds a resume that is none."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.detection.application import SSDApplication
from gaudi_apps.detection.config import (
    DataFlags,
    DeviceFlags,
    ReportFlags,
    RunFlags,
    ScheduleFlags,
    SSDConfig,
    validate,
)
from gaudi_apps.runtime.errors import OtherSideError, ResumeError
from gaudi_apps.training import comparisons as module
from gaudi_apps.training.checkpoint import Checkpoint, CheckpointFolder
from gaudi_apps.training.comparisons import compare_runs, verify_resume
from gaudi_apps.training.recipe import Choice, Recipe

pytestmark = pytest.mark.slow

SMALL_PROGRAM = Path(__file__).parents[1] / "small_ssd.py"

# What stands for the program where only starting and killing matter: a "run" whose state is the number of the step, or,
# where the resume is wrong, of the steps since its start. It goes on when somebody has seen its step.
PRETENDER = """
import os, sys, yaml
from pathlib import Path
import numpy as np
from gaudi_apps.training.checkpoint import CheckpointFolder

kind, config = sys.argv[1], yaml.safe_load(Path(sys.argv[3]).read_text())
folder = CheckpointFolder(Path(config["model_dir"]) / "checkpoints", keep=config["keep_ckpt_max"])
Path(config["model_dir"]).mkdir(exist_ok=True)
first = folder.load_newest().step if folder.steps() else 0
if kind == "fails" and first:
    sys.exit("out of luck")
seen = open(sys.argv[0] + ".seen")
for step in range(first + 1, config["steps"] + 1):
    print(f"step {step}/{config['steps']}  loss 3", flush=True)
    while seen.readline().split() != [str(step), str(os.getpid())]:
        pass
    state = step - first if kind == "forgets" else step
    folder.save(step, {"state": np.array(state)}, {"image_sequence": f"{step}"})
with Path(config["model_dir"], "starts").open("a") as file:
    file.write("whole\\n")
"""


def make_config(**run: Any) -> SSDConfig:
    return SSDConfig(run=RunFlags(mode="verify-resume", **run), data=DataFlags(use_fake_data=True))


LAST_STEP = 6
AtStep = Callable[["subprocess.Popen[str]", int], None]


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_channel: Callable[[str], Any]) -> Any:
    """Use the pretender in place of the program; late, its steps are seen when it has ended."""
    script = tmp_path / "pretender.py"
    script.write_text(PRETENDER)
    seen, run = make_channel("pretender.py.seen"), module._run

    def use(kind: str, *, late: bool = False) -> None:
        def run_along(command: list[str], at_step: AtStep = lambda process, step: None, **given: Any) -> int:
            def see(process: subprocess.Popen[str], step: int) -> None:
                if not late:
                    at_step(process, step)
                seen.write(f"{step} {process.pid}")
                if late and step == LAST_STEP:
                    process.wait()
                    for each in range(1, LAST_STEP + 1):
                        at_step(process, each)

            return run(command, see, **given)

        monkeypatch.setattr(module, "_run", run_along)
        monkeypatch.setattr(SSDApplication, "program", (str(script), kind))

    return use


def test_a_run_that_is_killed_ends_as_one_that_is_not(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SSDApplication, "program", (str(SMALL_PROGRAM),))
    config = SSDConfig(
        run=RunFlags(mode="verify-resume", steps=5, kills=2, seed=2),
        data=DataFlags(data_dir=str(records), batch_size=2),
        schedule=ScheduleFlags(lr_warmup_steps=2),
        device=DeviceFlags(dtype="fp32"),
        report=ReportFlags(eval_epochs=1, patience=1),
    )
    validate(config)
    end, kills = compare_runs(SSDApplication(config), tmp_path, steps=5, kills=2, seed=1)
    assert (end.step, kills) == (5, 2)
    image_sequence = end.run_state.image_sequence
    checkpoints = [CheckpointFolder(tmp_path / name / "checkpoints").load_newest() for name in ("whole", "killed")]
    assert {checkpoint.sha256 for checkpoint in checkpoints} == {end.sha256}
    assert {checkpoint.metadata["image_sequence"] for checkpoint in checkpoints} == {image_sequence}
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in (end.sha256, image_sequence))
    assert not any((tmp_path / name / "evaluation.json").exists() for name in ("whole", "killed"))


@pytest.mark.parametrize(("steps", "kills"), [(4, 1), (6, 5)])
def test_each_kill_hits_a_run(pretend: Any, tmp_path: Path, steps: int, kills: int) -> None:
    pretend("resumes")
    end, done = compare_runs(SSDApplication(make_config()), tmp_path, steps=steps, kills=kills, seed=0)
    assert (end.step, done) == (steps, kills)
    # Only the last start came to its end.
    assert (tmp_path / "killed" / "starts").read_text() == "whole\n"


def test_a_resume_that_is_none_is_found(pretend: Any, tmp_path: Path) -> None:
    pretend("forgets")
    with pytest.raises(ResumeError, match=r"after 2 kills: [0-9a-f]{64} ") as caught:
        compare_runs(SSDApplication(make_config()), tmp_path, steps=6, kills=2, seed=0)
    assert (caught.value.field, caught.value.exit_status) == ("state", 70)


def test_a_run_that_ends_before_it_is_killed_is_no_proof(pretend: Any, tmp_path: Path) -> None:
    pretend("resumes", late=True)
    with pytest.raises(ResumeError) as caught:
        compare_runs(SSDApplication(make_config()), tmp_path, steps=LAST_STEP, kills=2, seed=0)
    assert caught.value.flag == "--steps"


def test_kills_that_come_too_late_are_not_counted(
    pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend("resumes")
    kill_after, hits = module._kill_after, list[bool]()

    def kill_once(command: Sequence[str], step: int, delay: float) -> bool:
        if hits:
            pretend("resumes", late=True)
        hits.append(kill_after(command, step, delay))
        return hits[-1]

    monkeypatch.setattr(module, "_kill_after", kill_once)
    end, kills = compare_runs(SSDApplication(make_config()), tmp_path, steps=LAST_STEP, kills=3, seed=0)
    assert (end.step, kills, hits) == (LAST_STEP, 1, [True, False])


def test_a_run_that_fails_is_told_with_its_last_words(pretend: Any, tmp_path: Path) -> None:
    pretend("fails")
    with pytest.raises(OtherSideError, match=r"with status 1, not (0|-9): out of luck$") as caught:
        compare_runs(SSDApplication(make_config()), tmp_path, steps=6, kills=2, seed=0)
    assert caught.value.exit_status == 1


@pytest.mark.parametrize(
    ("run", "steps", "kills"), [({}, 6, 3), ({"kills": 9}, 10, 9), ({"steps": 60, "kills": 20}, 60, 20)]
)
def test_steps_and_kills_are_the_users(
    run: dict[str, int], steps: int, kills: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(app: SSDApplication, folder: Path, **given: int) -> Any:
        assert folder.is_dir()
        assert given == {"steps": steps, "kills": kills, "seed": 0}
        return Checkpoint(steps, {}, {"image_sequence": "b"}, "a"), kills

    monkeypatch.setattr(module, "compare_runs", compare)
    config = make_config(**run)
    validate(config)
    verify_resume(SSDApplication(config))
    out = capsys.readouterr().out
    assert f"{steps} steps, killed {kills} times" in out
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["a", "b"]


def test_the_steps_of_a_recipe_are_not_those_of_the_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(app: SSDApplication, folder: Path, **given: int) -> Any:
        assert given["steps"] == 6
        return Checkpoint(6, {}, {"image_sequence": "b"}, "a"), 3

    monkeypatch.setattr(module, "compare_runs", compare)
    verify_resume(SSDApplication(make_config(steps=800), recipe=Recipe((Choice("steps", 800, "so"),))))


def test_the_program_is_run_by_this_python() -> None:
    assert [sys.executable, *SSDApplication.program][1:] == ["-m", "gaudi_apps.ssd_train"]
