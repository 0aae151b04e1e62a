"""The program `gaudi-apps`: pages about runs, a demonstration, and serving of what runs trained."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from gaudi_apps.inference.serving.flags import LayoutFlags, ServeFlags
from gaudi_datasets.arguments import is_switch_on
from gaudi_datasets.commands.data_flags import Debug, subcommand
from gaudi_datasets.errors import FlagError, import_extra
from gaudi_datasets.fetching.stores import is_url
from gaudi_datasets.flags import parse_flags
from gaudi_ops.program import run_program, say

PROGRAM = "gaudi-apps"


def _find_run(run_dir: str) -> Path:
    """Return the folder of a run; of one at a URL its copy, without checkpoints, which is fetched."""
    if not is_url(run_dir):
        return Path(run_dir)
    # Imported here: most runs have no URL.
    from gaudi_apps.training.stored_runs import fetch_run

    return fetch_run(run_dir)


@dataclass(frozen=True)
class Report:
    """Write report.html of runs again, from the files that they left."""

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """folders of runs, or their URLs, such as s3://bucket/run"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        from gaudi_apps.inference.report_page import write_report

        if not self.run_dirs:
            raise FlagError("report: name the folder of a run", flag="run_dirs")
        for run_dir in self.run_dirs:
            say(write_report(_find_run(run_dir)))
            if is_url(run_dir):
                from gaudi_apps.training.stored_runs import upload_results

                upload_results(run_dir)
                say(f"{run_dir}: the report is there")


@dataclass(frozen=True)
class Compare:
    """Write one page that compares several runs: figures, curves, and flags that differ."""

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """folders of 2 to 10 runs, or their URLs"""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("compare.html")
    """the page to write"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        from gaudi_apps.inference.report_page import write_comparison

        write_comparison([_find_run(run_dir) for run_dir in self.run_dirs], self.output)
        say(self.output)


@dataclass(frozen=True)
class Demo:
    """Make images of handwritten digits, train the detector on them, and score it on unseen ones.

    It runs the programs that a user runs, and shows each command. The training says after its first steps how long it
    takes here.
    """

    output_dir: Path = Path("runs/demo")
    """folder of images, records and the trained model; a demonstration that was stopped goes on from there"""
    steps: int = 440
    """training steps, of 8 images each"""
    train: int = 1200
    """training images"""
    val: int = 200
    """images to score"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if min(self.steps, self.train, self.val) < 1:
            raise ValueError("--steps, --train and --val must be at least 1")

    def run(self) -> int:
        """Run the commands; return the status of the first that fails."""
        from gaudi_apps.cli.flags import DeviceFlags
        from gaudi_apps.training.recipe import choose_type, find_host

        for command in self.list_commands(str(choose_type(find_host(DeviceFlags())).value)):
            say(f"$ python -m {shlex.join(command)}")
            status = subprocess.run([sys.executable, "-m", *command], check=False).returncode
            if status != 0:
                return status
        return 0

    def list_commands(self, dtype: str) -> list[list[str]]:
        """List the commands of the demonstration, each a module and its arguments; `dtype` is that of the training."""
        scenes, records, model = (self.output_dir / name for name in ("scenes", "records", "model"))
        make = ["--output_dir", str(scenes), "--train", str(self.train), "--val", str(self.val)]
        commands = [["gaudi_datasets", "make-scenes", *make]]
        for split in ("train", "val"):
            annotations = scenes / "annotations" / f"instances_{split}.json"
            source = ["--annotations", str(annotations), "--images", str(scenes / split)]
            target = ["--output_dir", str(records), "--split", split, "--overwrite"]
            commands.append(["gaudi_datasets", "convert", "coco", *source, *target])
        paths = ["--data_dir", str(records), "--model_dir", str(model)]
        warmup_steps = min(80, self.steps // 2)
        schedule = f"--steps {self.steps} --base_lr 0.08 --lr_schedule cosine --lr_warmup_steps {warmup_steps}"
        # A mirrored digit is none.
        others = "--batch_size 8 --flip_probability 0 --log_steps 10 --dtype"
        commands.append(["gaudi_apps.ssd_train", *paths, *schedule.split(), *others.split(), dtype])
        return commands


class Serve(ServeFlags):
    """Serve a trained detector or classifier over HTTP, until SIGTERM or Ctrl-C."""

    def run(self) -> None:
        """Run the command."""
        for name in ("prometheus_client", "tornado"):
            import_extra(name, "gaudi-apps[serve]")
        from gaudi_apps.inference.serving.server import run_server

        run_server(self)


class Layout(LayoutFlags):
    """Lay out an export as TensorFlow Serving or Triton takes it, with the configuration."""

    def run(self) -> None:
        """Run the command."""
        from gaudi_apps.inference.serving.layouts import write_layout

        say(*write_layout(self))


_COMMANDS = (
    subcommand(Report, "report")
    | subcommand(Compare, "compare")
    | subcommand(Demo, "demo")
    | subcommand(Serve, "serve")
    | subcommand(Layout, "layout")
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments, those of the process when None, and leave with its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    run_program(lambda: parse_arguments(arguments).run(), prog=PROGRAM, debug=is_switch_on(arguments, "debug"))


def parse_arguments(argv: Sequence[str]) -> Any:
    """Return the command that arguments ask for; see `gaudi_datasets.flags.parse_flags` for what is raised."""
    return parse_flags(
        _COMMANDS,
        argv,
        prog=PROGRAM,
        description="Write pages about runs, compare and serve them, or show a demonstration.",
    )


if __name__ == "__main__":
    main()
