"""Launches by the variables of the MLPerf v0.7 submission's scripts, and the line that says how long one took."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from gaudi_distributed.errors import ConfigurationError, FlagError, MissingProgramError
from gaudi_distributed.launch.flags import Options, parse_flags, without_flags
from gaudi_distributed.launch.presets import PRESETS

VARIABLES = ("SYSTEM", "CONT", "DATADIR", "LOGDIR", "PRETRAINED_DIR", "NEXP")
_FLAG = "--submission"
_EXPERIMENTS = "5"  # where NEXP is unset, as in the submission's scripts
_MOST_EXPERIMENTS = 100
_WEIGHTS = (".npz", ".pickle", ".pth", ".safetensors")
# Each folder by its variable: where it is mounted, and how.
_PLACES = {"DATADIR": ("/data", ":ro"), "LOGDIR": ("/results", ""), "PRETRAINED_DIR": ("/pretrained", ":ro")}


def list_launches(options: Options, environ: Mapping[str, str]) -> list[Options]:
    """Return what is to be launched one after another: with `--submission` NEXP experiments, else what was asked for.

    SYSTEM names the preset, CONT the image; DATADIR (the data set), LOGDIR (of results) and PRETRAINED_DIR (of the
    backbone) are folders, which containers see as /data, /results and /pretrained. What the user adds wins.

    Raises:
        FlagError: flags that the variables stand for.
        ConfigurationError: a variable is missing, or wrong.
        MissingProgramError: a folder is not there, or has no weights, or several.
    """
    if not options.submission:
        return [options]
    if options.preset is not None or options.host_discovery_script is not None or options.mpijob is not None:
        raise FlagError(f"{_FLAG}: goes without --preset, which SYSTEM names, --host_discovery_script and --mpijob")
    system = _find_system(environ)
    count = environ.get("NEXP", _EXPERIMENTS)
    if not (count.isascii() and count.isdigit() and 1 <= int(count) <= _MOST_EXPERIMENTS):
        raise ConfigurationError(f"NEXP is {count!r}; set it to a number of experiments from 1 to {_MOST_EXPERIMENTS}")
    folders = {name: _find_folder(name, environ) for name in _PLACES if environ.get(name)}
    container = choose_container(options, environ)
    flags = [*without_flags(options.words, (_FLAG,)), "--preset", system, *container]
    is_inside = options.container != "none" or bool(container)
    if is_inside:
        flags += [word for name, folder in folders.items() for word in _mount(name, folder)]
        folders = folders | {name: Path(_PLACES[name][0]) for name in folders}
    weights = _find_weights(environ["PRETRAINED_DIR"]) if "PRETRAINED_DIR" in folders else None
    program, *arguments = options.command or PRESETS[system].command[:1]
    return [
        parse_flags([*flags, program, *_list_arguments(system, number, folders, weights), *arguments])
        for number in range(1, int(count) + 1)
    ]


def choose_container(options: Options, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the flags that CONT stands for: Singularity in a job of SLURM, else Docker, unless a flag says."""
    image = environ.get("CONT")
    if not image:
        return ()
    if options.image is not None:
        raise FlagError(f"--image {options.image}: CONT names the image {image}; give one")
    kind = "singularity" if options.slurm_script is not None or "SLURM_JOB_ID" in environ else "docker"
    return (*(("--container", kind) if options.container == "none" else ()), "--image", image)


def describe_result(name: str, started: datetime, ended: datetime, environ: Mapping[str, str]) -> str:
    """Return the line of results: what was run, seconds, who ran it, and when it began."""
    user = environ.get("USER") or environ.get("LOGNAME") or str(os.getuid())
    return f"RESULT,{name},,{round((ended - started).total_seconds())},{user},{started:%Y-%m-%d %I:%M:%S %p}"


def _find_system(environ: Mapping[str, str]) -> str:
    systems = [name for name, preset in PRESETS.items() if preset.result]
    asked = environ.get("SYSTEM", "")
    if asked.lower() not in systems:
        raise ConfigurationError(f"SYSTEM is {asked!r}; set it to one of {', '.join(systems)}, in any case of letters")
    return asked.lower()


def _find_folder(name: str, environ: Mapping[str, str]) -> Path:
    folder = Path(environ[name]).absolute()
    if not folder.is_dir():
        raise MissingProgramError(f"{name} {environ[name]!r}: there is no such folder; make it, or unset the variable")
    return folder


def _mount(name: str, folder: Path) -> Iterator[str]:
    place, way = _PLACES[name]
    yield from ("--mount", f"{folder}:{place}{way}")


def _find_weights(folder: str) -> str:
    """The name of the one file of weights in the folder."""
    names = sorted(path.name for path in Path(folder).iterdir() if path.suffix in _WEIGHTS)
    if len(names) != 1:
        found = f"several files of weights ({', '.join(names[:3])})" if names else "no file of weights"
        raise MissingProgramError(
            f"PRETRAINED_DIR {folder!r}: has {found}; leave one there, of {', '.join(_WEIGHTS)}, or unset the variable"
        )
    return names[0]


def _list_arguments(system: str, number: int, folders: Mapping[str, Path], weights: str | None) -> Iterator[str]:
    """The program's arguments of an experiment, each of which has a seed of its own."""
    yield from ("--seed", str(number))
    if "DATADIR" in folders:
        yield from ("--coco_root", str(folders["DATADIR"]))
    if "LOGDIR" in folders:
        yield from ("--model_dir", str(folders["LOGDIR"] / f"{system}_{number}"))
    if weights is not None:
        yield from ("--pretrained_backbone", str(folders["PRETRAINED_DIR"] / weights))
