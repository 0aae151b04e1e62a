"""Register the systems of the MLPerf v0.7 submission with `gaudi-run`, and its experiments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from gaudi_distributed.errors import ConfigurationError, FlagError, MissingProgramError
from gaudi_distributed.launch.experiments import Experiment, ExperimentSeries
from gaudi_distributed.launch.flags import Options, parse_flags, without_flags
from gaudi_distributed.launch.presets import Preset

VARIABLES = (
    *("SYSTEM", "CONT", "DATADIR", "LOGDIR", "PRETRAINED_DIR"),
    *("NEXP", "NUMEPOCHS", "DATESTAMP", "CLEAR_CACHES"),
)
_FLAG = "--submission"
_EXPERIMENTS = "5"  # where NEXP is unset, as in the submission's scripts
_MOST_EXPERIMENTS = 100
_MOST_EPOCHS = 100000
_DATA, _COCO, _RESULTS = "/data", "coco2017", "results"
_BACKBONE = "resnet34-333f7ec4.pickle"
_WEIGHTS = (".npz", ".pickle", ".pth", ".safetensors")
# Each folder by its variable: where it is mounted, and how.
_PLACES = {"DATADIR": ("/data", ":ro"), "LOGDIR": ("/results", ""), "PRETRAINED_DIR": ("/pretrained", ":ro")}
# What the scripts gave in every experiment, and what the log of MLPerf said of the submission, but for who submits.
_SCRIPTS = "--async_val --dataset_size 117266 --eval_dataset_size 5000"
_MLPERF = "--mlperf --mlperf_division closed --mlperf_status onprem --mlperf_platform"
# Flags of the user that stand for a variable.
_OWN_DATA = ("coco_root", "data_dir", "tfrecord_root", "use_tfrecord", "use_fake_data", "synthetic")
_OWN_WEIGHTS = ("weights", "pretrained_backbone")


def _mxnet(system: str, hosts: int, slots: int) -> Preset:
    """Make the preset of a system of the submission; the program knows its batch size and schedule."""
    about = f"MXNet SSD as MLPerf's submission trained it on {system}"
    command = ("ssd_mxnet_train", "--system", system)
    return Preset(about, hosts, slots, "gpu", command=command, result="SINGLE_STAGE_DETECTOR", lane="mxnet")


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "dss8440": _mxnet("DSS8440", 1, 8),
        "c4140": _mxnet("C4140", 1, 4),
        "2xc4140": _mxnet("2xC4140", 2, 4),
        "4xc4140": _mxnet("4xC4140", 4, 4),
    }
)


def expand_submission(options: Options, environ: Mapping[str, str]) -> list[Experiment]:
    """Return the NEXP experiments that the variables describe.

    SYSTEM names the preset, CONT the image; DATADIR (with coco2017, which is the data set), LOGDIR (of results) and
    PRETRAINED_DIR (of the backbone) are folders, which containers see as /data, /results and /pretrained. What the user
    adds wins.

    Raises:
        FlagError: flags that the variables stand for.
        ConfigurationError: a variable is missing, or wrong.
        MissingProgramError: a folder is not there, or has no weights, or several.
    """
    if options.preset is not None or options.host_discovery_script is not None or options.mpijob is not None:
        raise FlagError(
            f"{_FLAG}: goes without --preset, which SYSTEM names, --host_discovery_script and --mpijob", flag=_FLAG
        )
    system, count, clears, stamp = _read_variables(environ)
    program, *arguments = options.command or PRESETS[system].command[:1]
    container = _choose_container(options, environ)
    flags = [*without_flags(options.words, (_FLAG,)), "--preset", system, *container]
    folders = _find_folders(arguments, environ)
    seen = folders
    if options.container != "none" or container:
        for name, folder in folders.items():
            flags += ["--mount", f"{folder}:{''.join(_PLACES[name])}"]
        seen = {name: Path(_PLACES[name][0]) for name in folders}
    fixed = [*_SCRIPTS.split(), *_MLPERF.split(), PRESETS[system].command[-1]]
    if environ.get("NUMEPOCHS"):
        fixed += ["--epochs", str(_read_count("NUMEPOCHS", environ, "", _MOST_EPOCHS))]
    if "DATADIR" in folders:
        fixed += ["--coco_root", str(seen["DATADIR"] / (_find_coco(folders["DATADIR"]) or ""))]
    if "PRETRAINED_DIR" in folders:
        fixed += ["--pretrained_backbone", str(seen["PRETRAINED_DIR"] / _find_weights(folders["PRETRAINED_DIR"]))]
    experiments = []
    for number in range(1, count + 1):
        results = ("--model_dir", str(seen["LOGDIR"] / f"{system}_{number}"))
        parsed = parse_flags([*flags, program, "--seed", str(number), *fixed, *results, *arguments])
        experiments.append(Experiment(parsed, number, count, folders["LOGDIR"] / f"{stamp}_{number}.log", clears))
    return experiments


def _read_variables(environ: Mapping[str, str]) -> tuple[str, int, bool, str]:
    """Return the preset, the number of experiments, whether to clear caches, and the beginning of the logs' names."""
    asked = environ.get("SYSTEM", "")
    if asked.lower() not in PRESETS:
        raise ConfigurationError(
            f"SYSTEM is {asked!r}",
            field="SYSTEM",
            remedy=f"set it to one of {', '.join(PRESETS)}, in any case of letters",
        )
    count = _read_count("NEXP", environ, _EXPERIMENTS, _MOST_EXPERIMENTS)
    clears = environ.get("CLEAR_CACHES") or "1"
    if clears not in ("0", "1"):
        raise ConfigurationError(
            f"CLEAR_CACHES is {clears!r}", field="CLEAR_CACHES", remedy="set it to 0 or 1, or unset it"
        )
    stamp = environ.get("DATESTAMP") or f"{datetime.now():%y%m%d%H%M%S%f}"
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", stamp, re.ASCII) is None:
        raise ConfigurationError(
            f"DATESTAMP is {stamp!r}",
            field="DATESTAMP",
            remedy="set it to letters, digits, hyphens and dots, or unset it",
        )
    return asked.lower(), count, clears == "1", stamp


def _read_count(name: str, environ: Mapping[str, str], default: str, most: int) -> int:
    text = environ.get(name) or default
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= most):
        raise ConfigurationError(
            f"{name} is {text!r}", field=name, remedy=f"set it to a number from 1 to {most}, or unset it"
        )
    return int(text)


def _choose_container(options: Options, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the flags that CONT stands for: Singularity in a job of SLURM, else Docker, unless a flag says."""
    image = environ.get("CONT")
    if not image:
        return ()
    if options.image is not None:
        raise FlagError(f"--image {options.image}: CONT names the image {image}", flag="--image", remedy="give one")
    kind = "singularity" if options.slurm_script is not None or "SLURM_JOB_ID" in environ else "docker"
    return (*(("--container", kind) if options.container == "none" else ()), "--image", image)


def _find_folders(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders of this machine by their variables, but for those that the user's own arguments stand for.

    Raises:
        ConfigurationError: PRETRAINED_DIR is not set.
        MissingProgramError: a folder is not there.
    """
    own = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments if word.startswith("--")}
    folders = {"LOGDIR": Path(environ.get("LOGDIR") or _RESULTS).absolute()}
    if not own.intersection(_OWN_DATA):
        given = environ.get("DATADIR")
        folder = _require_folder("DATADIR", given) if given else Path(_DATA)
        if _find_coco(folder) is None:
            named = f"DATADIR {given!r}" if given else f"DATADIR is not set, and {_DATA}"
            raise MissingProgramError(
                f"{named}: has no folder {_COCO}",
                path=folder,
                field="DATADIR",
                remedy="set DATADIR to the folder that has it, make it by `gaudi-datasets fetch coco --output_dir "
                f"{folder}/{_COCO}`, or give --coco_root behind the program's name",
            )
        folders["DATADIR"] = folder
    if not own.intersection(_OWN_WEIGHTS):
        given = environ.get("PRETRAINED_DIR")
        if not given:
            raise ConfigurationError(
                "PRETRAINED_DIR is not set",
                field="PRETRAINED_DIR",
                remedy=f"set it to the folder with the backbone ({_BACKBONE}, or one file of {', '.join(_WEIGHTS)}), "
                "or give --pretrained_backbone behind the program's name",
            )
        folders["PRETRAINED_DIR"] = _require_folder("PRETRAINED_DIR", given)
    return folders


def _find_coco(folder: Path) -> str | None:
    """Find the data set in the folder of DATADIR: in coco2017, or in this folder itself."""
    if (folder / _COCO).is_dir():
        return _COCO
    return "" if (folder / "annotations").is_dir() else None


def _require_folder(name: str, given: str) -> Path:
    folder = Path(given)
    if not folder.is_dir():
        raise MissingProgramError(
            f"{name} {str(folder)!r}: there is no such folder",
            path=folder,
            field=name,
            remedy=f"make it, or set {name} to another",
        )
    return folder.absolute()


def _find_weights(folder: Path) -> str:
    """Return the name of the submission's file of weights, or of the only one in the folder."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if _BACKBONE in names:
        return _BACKBONE
    if len(names) != 1:
        found = f"several files of weights ({', '.join(names[:3])})" if names else "no file of weights"
        raise MissingProgramError(
            f"PRETRAINED_DIR {str(folder)!r}: has {found}",
            path=folder,
            field="PRETRAINED_DIR",
            remedy=f"leave one there, of {', '.join(_WEIGHTS)}, or name it {_BACKBONE}",
        )
    return names[0]


SUBMISSION = ExperimentSeries(VARIABLES, expand_submission)
