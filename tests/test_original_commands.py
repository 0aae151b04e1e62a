"""Each of the 57 command lines of the originals' documents is run or planned as docs/migration.md writes it now.

The table below holds them verbatim. A row of the page has the same text and the command lines in its place: these take
the original's flags to the same configuration and plan the numbers of the original's recipe, or do what it did.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from PIL import Image

from gaudi_apps import resnet_train, resnext_train, ssd_mxnet_train, ssd_train
from gaudi_apps.cli.flag_rules import list_flags, parse_config
from gaudi_datasets.classification.sources import open_split
from gaudi_datasets.cli import parse_arguments
from gaudi_datasets.fetching.weights_table import WEIGHTS
from gaudi_distributed.launch.choices import choose_cluster, choose_preset
from gaudi_distributed.launch.cli import launch
from gaudi_distributed.launch.flags import parse_flags as parse_launch
from gaudi_distributed.launch.planning import plan_launch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "migration.md"
SMALL_SSD = ROOT / "packages" / "apps" / "tests" / "small_ssd.py"
ORIGINALS = r"""
S1	`$PYTHON -m pip install -r requirements.txt`
S2	`bash download_and_preprocess_coco.sh /data/tensorflow/coco2017/ssd_tf_records`
S3	`wget https://storage.googleapis.com/intel-optimized-tensorflow/models/ssd-backbone/checkpoint` and `model.ckpt-28152` with `.data-00000-of-00001`, `.index`, `.meta`, into `mlperf_artifact`
S4	`vm.nr_hugepages = 153600`
S5	`$PYTHON ssd.py -e 64 -b 128 -d bf16 --model_dir <model folder> --save_summary_steps 10 --data_dir /data/tensorflow/coco2017/ssd_tf_records --resnet_checkpoint .../mlperf_artifact`
S6	`$PYTHON ssd.py -e 64 -b 128 -d fp32 --model_dir <model folder> --data_dir /data/tensorflow/coco2017/ssd_tf_records --resnet_checkpoint .../mlperf_artifact`
S7	`mpirun --allow-run-as-root --bind-to core --map-by socket:PE=7 --np 8 $PYTHON ssd.py --use_horovod --epochs 64 --batch_size 128 --dtype bf16 --model_dir <model folder> --save_summary_steps 10 --save_checkpoints_epochs 64 --data_dir ... --resnet_checkpoint ...`
S8	`$PYTHON ssd.py --mode eval --model_dir <model folder> --data_dir ... --resnet_checkpoint ...`
S9	`$PYTHON ssd.py --help`
S10	`$PYTHON ssd.py --save_summary_steps 10 --data_dir ... --resnet_checkpoint ... --profile 50,53 --steps 100`
S11	`$PYTHON ssd.py --inference DIR --model_dir ...`
K1	`$PYTHON preprocess_imagenet.py --raw_data_dir=$IMAGENET_HOME --local_scratch_dir=$IMAGENET_HOME/tf_records --nogcs_upload`
K2	`wget -O synset_labels.txt .../imagenet_2012_validation_synset_labels.txt`
K3	`ssh-keyscan -p 3022 -H 192.10.100.174 >> ~/.ssh/known_hosts`
K4	`export MPI_ROOT=/usr/local/openmpi/`
K5	`$PYTHON demo_resnet_keras.py`
K6	`$PYTHON demo_resnet_keras.py -dt bf16 -dlit bf16 -bs 256 -te 90 -ebe 90`
K7	`$PYTHON demo_resnet_keras.py -dt bf16 -dlit bf16 --train_epochs 90 -bs 256`
K8	`$PYTHON demo_resnet_keras.py --optimizer LARS`
K9	`$PYTHON resnet_ctl_imagenet_main.py --optimizer LARS --base_learning_rate 9.5 --warmup_epochs 3 --lr_schedule polynomial --label_smoothing 0.1 --weight_decay 0.0001 --single_l2_loss_op`
K10	`$PYTHON demo_resnet_keras.py -bs 128 --optimizer LARS`
K11	`$PYTHON demo_resnet_keras.py --dtype bf16 -dlit bf16 --use_horovod --num_workers_per_hls 8 -te 40 -ebe 40 --optimizer LARS -bs 256`
K12	`$PYTHON demo_resnet_keras.py --dtype bf16 --data_loader_image_type bf16 --use_horovod --num_workers_per_hls 8 -te 40 -ebe 40 -bs 256 --optimizer LARS`
K13	`mpirun --allow-run-as-root --bind-to core -np 8 --map-by socket:PE=7 --merge-stderr-to-stdout $PYTHON demo_resnet_keras.py --dtype bf16 --data_loader_image_type bf16 --use_horovod --num_workers_per_hls 8 --kubernetes_run=True -te 40 -ebe 40 -bs 256 --optimizer LARS`
K14	`mpirun --allow-run-as-root --bind-to core -np 8 --map-by socket:PE=7 --merge-stderr-to-stdout $PYTHON resnet_ctl_imagenet_main.py --dtype bf16 --data_loader_image_type bf16 --use_horovod -te 40 -ebe 40 -bs 256 --optimizer LARS --base_learning_rate 9.5 --warmup_epochs 3 --lr_schedule polynomial --label_smoothing 0.1 --weight_decay 0.0001 --single_l2_loss_op`
K15	`$PYTHON demo_resnet_keras.py -dt bf16 -dlit bf16 --batch_size 2048 --distribution_strategy=hpu --num_workers_per_hls 8 -te 40 -ebe 40 --optimizer LARS`
K16	`$PYTHON demo_resnet_keras.py --dtype bf16 -dlit bf16 --distribution_strategy hpu --num_workers_per_hls 8 -bs 256`
K17	`MPI_TCP_INCLUDE=interface_name MULTI_HLS_IPS=192.10.100.174,10.10.100.101 $PYTHON demo_resnet_keras.py -dt bf16 -dlit bf16 --use_horovod --num_workers_per_hls 8 -te 40 -ebe 40 --optimizer LARS --data_dir /data/tensorflow_datasets/imagenet/tf_records`
K18	`export MULTI_HLS_IPS=192.10.100.174,10.10.100.101 MPI_TCP_INCLUDE=interface_name HCCL_SOCKET_IFNAME=interface_name; $PYTHON demo_resnet_keras.py -dt bf16 -dlit bf16 -bs 256 --use_horovod --num_workers_per_hls 8 -te 40 -ebe 40 --optimizer LARS`
K19	`mpirun --allow-run-as-root --mca plm_rsh_args -p3022 --bind-to core --map-by socket:PE=7 -np 16 --mca btl_tcp_if_include 192.10.100.174/24 --tag-output --merge-stderr-to-stdout --prefix /usr/local/openmpi/ -H 192.10.100.174:8,10.10.100.101:8 -x GC_KERNEL_PATH -x HABANA_LOGS -x PYTHONPATH -x HCCL_SOCKET_IFNAME=<interface_name> $PYTHON resnet_ctl_imagenet_main.py -dt bf16 -dlit bf16 -bs 256 --use_horovod`
K20	as K18 with `--distribution_strategy hpu --num_workers_per_hls 8 -bs 4096 --optimizer LARS`
K21	`$PYTHON demo_resnet_keras.py -dt bf16 -dlit bf16 -te 40 -ebe 40 --steps_per_loop 1000 --optimizer LARS --use_horovod --num_workers_per_hls 8 -bs 256`
K22	as K21 with `MULTI_HLS_IPS=IP1,IP2,IP3,IP4`
K23	`$PYTHON resnet_ctl_imagenet_main.py --helpfull`
K24	`--clean --train_steps N --log_steps N --enable_checkpoint_and_export --enable_tensorboard -ebe N --experimental_preloading=False --use_keras_mixed_precision --keras_applications_model ResNet50V2`; default batch 256
X1	`$PYTHON preprocess_imagenet.py --raw_data_dir=$IMAGENET_HOME --local_scratch_dir=$IMAGENET_HOME/tf_records`
X2	`mv $IMAGENET_HOME/validation $IMAGENET_HOME/val` and sorting into class folders (valprep.sh)
X3	`export LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libjemalloc.so.2`
X4	`$PYTHON imagenet_main.py -dt bf16 -dlit bf16 -bs 128 -te 90 -ebe 90 --data_dir /data/tensorflow/imagenet/tf_records/`
X5	`$PYTHON imagenet_main.py -dt bf16 -dlit bf16 -bs 256 -te 90 -ebe 90 --jpeg_data_dir /data/tensorflow/imagenet`
X6	`mpirun --allow-run-as-root --tag-output --merge-stderr-to-stdout --output-filename <log folder> --bind-to core --map-by socket:PE=7 -np 8 $PYTHON imagenet_main.py --use_horovod -dt bf16 -dlit bf16 -bs 128 -te 90 -ebe 90 --data_dir ...`
X7	as X6 with `-bs 256 --jpeg_data_dir /data/tensorflow/imagenet` in place of `--data_dir`
X8	`mpirun --allow-run-as-root --mca plm_rsh_args -p3022 --bind-to core --map-by socket:PE=7 -np 64 --mca btl_tcp_if_include 192.10.100.174/24 --tag-output --merge-stderr-to-stdout --output-filename <log folder> --prefix $MPI_ROOT -H <eight hosts>:8 -x GC_KERNEL_PATH -x HABANA_LOGS -x PYTHONPATH -x HCCL_SOCKET_IFNAME=<interface_name> $PYTHON imagenet_main.py --use_horovod -dt bf16 -dlit bf16 -bs 128 -te 90 -ebe 90 --weight_decay 7.93E-05 --data_dir ...`
X9	`--disable_checkpoints`
X10	`$PYTHON imagenet_main.py --helpfull`
X11	`$PYTHON imagenet_main.py -dt bf16 -dlit bf16 -bs 128 -te 90 -ebe 90 --data_dir ... --hooks ProfilerHook --profile_steps 5,8 --max_train_steps 10`
M1	`scripts/docker/launch.sh <DATASET_DIR> <RESULTS_DIR>`
M2	`scripts/docker/build.sh`, `scripts/docker/config.sh`
M3	`scripts/datasets/download_coco2017.sh`
M4	`scripts/datasets/get_resnet34_backbone.sh`
M5	`scripts/train/*`
M6	`docker build --pull -t mlperf-nvidia:image_classification .`
M7	`CONT=mlperf-nvidia:image_classification DATADIR=<path/to/data/dir> LOGDIR=<path/to/output/dir> PRETRAINED_DIR=<path/to/pretrained/dir> SYSTEM=DSS8440 ./run_with_docker.sh`
M8	`bash ./build_container.sh`
M9	`DATADIR=... LOGDIR=... PRETRAINED_DIR=... SYSTEM=C4140 sbatch -N 1 -n 4 run.slurm`
M10	`... SYSTEM=2xC4140 sbatch -N 2 -n 8 run.slurm`
M11	`... SYSTEM=4xC4140 sbatch -N 4 -n 16 run.slurm`
"""  # noqa: E501
# What the originals' scripts are now.
SCRIPTS = {
    "ssd.py": "ssd_train",
    "demo_resnet_keras.py": "resnet_train",
    "resnet_ctl_imagenet_main.py": "resnet_train",
    "imagenet_main.py": "resnext_train",
}
PROGRAMS = {
    "ssd_train": ssd_train.PROGRAM,
    "resnet_train": resnet_train.PROGRAM,
    "resnext_train": resnext_train.PROGRAM,
    "ssd_mxnet_train": ssd_mxnet_train.PROGRAM,
}
COMMANDS = {*PROGRAMS, "gaudi-run", "gaudi-datasets", "mpirun", "pip", "docker", "apptainer", "sbatch"}
# Folders and files, which everybody calls otherwise.
PATHS = {"data_dir", "jpeg_data_dir", "model_dir", "weights", "coco_root", "inference"}
# Images of the data sets, which are not here.
IMAGES = {
    "ssd_train": ("--num_examples_per_epoch", "117266"),
    "ssd_mxnet_train": ("--dataset_size", "117266"),
    "resnet_train": ("--num_examples_per_epoch", "1281167"),
    "resnext_train": ("--num_examples_per_epoch", "1281167"),
}


@dataclass(frozen=True)
class Row:
    """A row of the page; `commands` are what stands in place of the original."""

    original: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """A command line: variables before it, its words, and the words before the program that trains, if there is one."""

    environ: dict[str, str]
    launcher: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class ExpectedPlan:
    """Numbers of a training: images of a step, rate, steps of an epoch, of the warm-up and in all, and the drops."""

    batch: int
    rate: float
    epoch: int
    warmup: int
    total: int
    drops: tuple[int, ...] = ()


ONE_SSD = ExpectedPlan(128, 0.012, 917, 4585, 58688, (36680, 45850))
EIGHT_SSD = ExpectedPlan(1024, 0.096, 115, 575, 7360, (4600, 5750))
SGD_90 = ExpectedPlan(256, 0.1, 5004, 25020, 450360, (150120, 300240, 400320))
# What 40 epochs of LARS are on eight, sixteen and thirty-two devices.
LARS_8 = ExpectedPlan(2048, 9.5, 625, 1875, 25000)
LARS_16 = ExpectedPlan(4096, 9.5, 312, 936, 12480)
# The recipes' numbers, computed from their rules: 117266 or 1281167 images, batches of all devices together.
NUMBERS = {
    "S5": ONE_SSD,
    "S6": ONE_SSD,
    "S7": EIGHT_SSD,
    "S10": ExpectedPlan(128, 0.012, 917, 4585, 100, (36680, 45850)),
    "K5": ExpectedPlan(32, 0.0125, 40036, 200180, 40036, (1201080, 2402160, 3202880)),
    "K6": SGD_90,
    "K7": SGD_90,
    "K8": ExpectedPlan(32, 2.5, 40036, 120108, 40036),
    "K9": ExpectedPlan(32, 9.5, 40036, 120108, 40036),
    "K10": ExpectedPlan(128, 2.5, 10009, 30027, 10009),
    "K11": LARS_8,
    "K12": LARS_8,
    "K13": LARS_8,
    "K14": LARS_8,
    "K15": LARS_8,
    "K16": ExpectedPlan(256, 0.1, 5004, 25020, 5004, (150120, 300240, 400320)),
    "K17": ExpectedPlan(512, 9.5, 2502, 7506, 100080),
    "K18": LARS_16,
    "K19": ExpectedPlan(4096, 1.6, 312, 1560, 312, (9360, 18720, 24960)),
    "K20": LARS_16,
    "K21": LARS_8,
    "K22": ExpectedPlan(8192, 9.5, 156, 468, 6240),
    "X4": ExpectedPlan(128, 0.128, 10009, 80072, 900820),
    "X5": ExpectedPlan(256, 0.256, 5004, 40036, 450410),
    "X6": ExpectedPlan(1024, 1.024, 1251, 10009, 112602),
    "X7": ExpectedPlan(2048, 2.048, 625, 5004, 56301),
    "X8": ExpectedPlan(8192, 8.192, 156, 1251, 14075),
    "X9": ExpectedPlan(32, 0.032, 40036, 320291, 400364),
    "X11": ExpectedPlan(128, 0.128, 10009, 80072, 10),
    "M5": ExpectedPlan(1024, 0.1875, 115, 572, 9162, (5039, 6299)),
}
# Systems of the submission: numbers, hosts and ranks.
SYSTEMS = {
    "M7": (ExpectedPlan(1024, 0.1875, 115, 572, 9162), 1, 8),
    "M9": (ExpectedPlan(512, 0.0475, 229, 1202, 18323), 1, 4),
    "M10": (ExpectedPlan(1024, 0.1875, 115, 601, 9162), 2, 8),
    "M11": (ExpectedPlan(896, 0.09, 131, 654, 10471), 4, 16),
}
DEVICES = {
    **dict.fromkeys(("S7", "K11", "K12", "K13", "K14", "K15", "K16", "K21", "X6", "X7", "M5"), 8),
    **dict.fromkeys(("K17", "K18", "K19", "K20"), 16),
    "K22": 32,
    "X8": 64,
}
# Commands that need a network, a scheduler, a builder of images or several hosts, and the test of each.
NAMED = ("S1", "S3", "K3", "K4", "X3", "M1", "M2", "M3", "M4", "M6", "M8")
# What is run here, on tiny data; all others are planned.
RUN = ("S2", "S4", "S8", "S9", "S11", "K1", "K2", "K23", "K24", "X1", "X2", "X10", "M9", "M10", "M11")
SYNSETS = ("n01440764", "n02105855")


def read_page() -> dict[str, Row]:
    """Return the rows of all tables of command lines by their ids."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if re.match(r"\| [SKXM]\d+ ", line)
    ]
    return {name: Row(original, tuple(find_commands(now))) for name, _, original, now in cells}


def find_commands(text: str) -> Iterator[str]:
    """Yield what is marked as code and begins, behind variables, with a program."""
    for code in re.findall(r"`([^`]+)`", text):
        words = [word for word in shlex.split(code) if not re.match(r"[A-Z_]+=", word)]
        if words and words[0] in COMMANDS and len(words) > 1:
            yield code


def split_command(text: str) -> Command:
    """Split a command line."""
    words = shlex.split(text)
    count = next(place for place, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    environ = dict(word.split("=", 1) for word in words[:count])
    words = words[count:]
    place = next((place for place, word in enumerate(words) if word in PROGRAMS), len(words))
    return Command(environ, tuple(words[:place]), tuple(words[place:]))


ROWS = read_page()
VERBATIM = dict(line.split("\t", 1) for line in ORIGINALS.strip().splitlines())


def list_original_words(name: str) -> list[str]:
    """Return program and arguments of an original's command line; empty where it ran no program that trains."""
    text = VERBATIM[name].replace("`", "")
    if name == "K20":  # as K18 with other flags
        words = [word for word in list_original_words("K18") if word != "--use_horovod"]
        return [*words, *text.partition(" with ")[2].split()]
    if name == "K22":
        return list_original_words("K21")
    if name == "X7":
        first, then = re.findall(r"`([^`]+)`", VERBATIM[name])
        assert then == "--data_dir"
        return [*list_original_words("X6")[:-2], *first.split()]
    if text.startswith("--"):  # flags alone
        for number in ("5", "1", "1"):
            text = text.replace(" N", f" {number}", 1)
        return [{"K24": "resnet_train", "X9": "resnext_train"}[name], *text.partition(";")[0].split()]
    script = re.search(r"(\S+\.py) ?(.*)", text)
    if script is None or script[1] not in SCRIPTS:
        return []
    return [SCRIPTS[script[1]], *re.sub(r"<[^>]*>", "folder", script[2]).split()]


TRAINING = [name for name in VERBATIM if list_original_words(name) and "help" not in VERBATIM[name]]
HELP = [name for name in VERBATIM if "--help" in VERBATIM[name]]


def parse_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of a program's command line but for folders, by its own parser."""
    program = PROGRAMS[words[0]]
    config = parse_config(
        program.config,
        words[1:],
        prog=program.prog,
        description="",
        former_flags=program.former_flags,
    )
    return {name: value for name, value in list_flags(config) if name not in PATHS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with what the commands of the page name, but small, by those that prepare data."""
    folder = tmp_path_factory.mktemp("original")
    generator = np.random.default_rng(0)

    def draw(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (48, 40, 3), np.uint8)).save(path, "JPEG")

    for split, count in (("train", 2), ("val", 1)):
        names = [f"{number:012d}.jpg" for number in range(1, count + 1)]
        for name in names:
            draw(folder / "coco" / f"{split}2017" / name)
        images = [{"id": place, "file_name": name, "height": 48, "width": 40} for place, name in enumerate(names)]
        box = {"category_id": 1, "bbox": [4, 4, 20, 20], "area": 400, "iscrowd": 0}
        boxes = [{"id": place + 1, "image_id": place, **box} for place in range(count)]
        content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "person"}]}
        path = folder / "coco" / "annotations" / f"instances_{split}2017.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    shutil.copytree(folder / "coco", folder / "coco2017")
    for synset in SYNSETS:
        for number in (1, 2):
            draw(folder / "imagenet" / "img_train" / synset / f"{synset}_{number}.JPEG")
    for number in (1, 2):
        draw(folder / "imagenet" / "img_val" / f"ILSVRC2012_val_{number:08d}.JPEG")
    (folder / "imagenet" / "synset_labels.txt").write_text("\n".join(SYNSETS) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for text in (*ROWS["S2"].commands[1:], *ROWS["K1"].commands):
            parse_arguments([*shlex.split(text)[1:], "--shards", "1", "--processes", "1"]).run()
    shutil.copytree(folder / "imagenet" / "tf_records", folder / "tf_records")
    shutil.copytree(folder / "coco" / "val2017", folder / "DIR")
    (folder / "weights").mkdir()
    return folder


@pytest.fixture
def workplace(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in that folder, with an environment in which nothing was launched."""
    monkeypatch.chdir(made)
    for name in os.environ:
        if name.startswith(("OMPI_", "MPI_", "MULTI_HLS", "HCCL_", "SLURM_")):
            monkeypatch.delenv(name)
    return made


def test_every_command_is_there() -> None:
    assert Counter(name[0] for name in VERBATIM) == {"S": 11, "K": 24, "X": 11, "M": 11}
    assert {name: row.original for name, row in ROWS.items()} == VERBATIM
    planned = set(VERBATIM) - set(RUN)
    assert (len(RUN), len(planned)) == (15, 42)
    assert planned == set(NUMBERS) | set(NAMED) | {"M7"}


@pytest.mark.parametrize("name", TRAINING)
def test_the_flags_of_the_original_are_taken_as_those_in_its_place(name: str) -> None:
    original = parse_words(list_original_words(name))
    commands = [split_command(text) for text in ROWS[name].commands]
    assert original in [parse_words(command.words) for command in commands if command.words]


def run_program(words: Sequence[str]) -> int:
    """Run one of the programs in this process; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        import_module(f"gaudi_apps.{words[0]}").main(list(words[1:]))
    return int(ended.value.code or 0)


def plan(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what a command line would train by, as its rank 0 plans it where a launcher starts it."""
    command = split_command(text)
    for name, value in command.environ.items():
        monkeypatch.setenv(name, value)
    words, ranks = [*command.words], 1
    if command.launcher[:1] == ("mpirun",):
        ranks = int(command.launcher[[*map(strip, command.launcher)].index("np") + 1])
    elif command.launcher:
        options = parse_launch(["--dry_run", *command.launcher[1:], *words])
        preset, whole = choose_preset(options)
        words = [*whole]
        ranks = choose_cluster(options, preset, os.environ)[0].size
    if command.launcher:
        for name, number in (("RANK", 0), ("SIZE", ranks), ("LOCAL_RANK", 0), ("LOCAL_SIZE", min(ranks, 8))):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(number))
    words = ["tf_records" if word == "/data" else word for word in words]  # where pods have it
    status = run_program([*words, *IMAGES[words[0]], "--mode", "plan", "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def strip(word: str) -> str:
    return word.lstrip("-")


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in NUMBERS for text in ROWS[name].commands if split_command(text).words]
)
def test_a_training_plans_the_numbers_of_the_original(
    name: str, text: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, expected, device = plan(text, monkeypatch, capsys), NUMBERS[name], DEVICES.get(name, 1)
    assert (found["workers"], found["global_batch"]) == (device, expected.batch)
    assert found["peak_learning_rate"] == pytest.approx(expected.rate, rel=1e-9)
    steps = (found["steps_per_epoch"], found["warmup_steps"], found["total_steps"], tuple(found["drop_steps"]))
    assert steps == (expected.epoch, expected.warmup, expected.total, expected.drops)


@pytest.mark.parametrize("name", HELP)
def test_help_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = ROWS[name].commands
    assert run_program(shlex.split(text)) == 0
    assert "--model_dir" in capsys.readouterr().out


def test_records_are_written(workplace: Path) -> None:
    """S2, K1, K2 and X1: the fixture ran the commands of the page, and the old flags mean the same."""
    assert sorted(path.name for path in (workplace / "ssd_tf_records").glob("*.tfrecord")) == [
        "train-00000-of-00001.tfrecord",
        "val-00000-of-00001.tfrecord",
    ]
    assert {path.name.partition("-")[0] for path in (workplace / "tf_records").glob("*-of-*")} == {
        "train",
        "validation",
    }
    (new,) = ROWS["X1"].commands
    old = re.sub(r"\$IMAGENET_HOME", "imagenet", VERBATIM["K1"].strip("`")).split()[2:]
    assert parse_arguments(["imagenet", *old]) == parse_arguments(shlex.split(new)[1:])
    assert ROWS["K1"].commands == ROWS["X1"].commands


def test_folders_of_validation_images_are_found(workplace: Path, tmp_path: Path) -> None:
    """X2: sorted into folders of classes below `val`, as valprep.sh leaves them."""
    for number, synset in enumerate(SYNSETS, start=1):
        (tmp_path / "val" / synset).mkdir(parents=True)
        shutil.copy(workplace / "imagenet" / "img_val" / f"ILSVRC2012_val_{number:08d}.JPEG", tmp_path / "val" / synset)
    source = open_split(tmp_path, "validation")
    assert (len(source), source.class_names) == (2, SYNSETS)


def test_huge_pages_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """S4: `gaudi-run doctor` counts what `vm.nr_hugepages` reserved."""
    launch(["doctor", "--device", "hpu", "--json"], os.environ)
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    reserved = int(Path("/proc/sys/vm/nr_hugepages").read_text())
    assert checks["huge pages"]["facts"]["reserved"] == reserved


@pytest.mark.parametrize("name", ["S1"])
def test_requirements_are_ours(name: str) -> None:
    (text,) = ROWS[name].commands
    assert text.startswith("pip install -r ")
    words = [line for line in (ROOT / text.split()[3]).read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    assert (ROOT / words[0].removeprefix("-c ")).is_file()
    for word in words[1:]:
        folder, _, extras = word.partition("[")
        assert (ROOT / folder / "pyproject.toml").is_file()
        if extras:
            requirement = Requirement(f"gaudi-{Path(folder).name}[{extras}")
            assert requirement.extras <= set(metadata.metadata(requirement.name).get_all("Provides-Extra") or [])


@pytest.mark.parametrize("name", ["S2", "S3", "M3", "M4"])
def test_what_is_fetched_is_known(name: str) -> None:
    command = parse_arguments(shlex.split(ROWS[name].commands[0])[1:])
    if name in ("S2", "M3"):
        assert (command.splits, command.max_images) == (("train", "val"), 0)
    else:
        assert set(command.names) <= set(WEIGHTS)


def test_hosts_are_told_by_their_keys(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K3: what ssh-keyscan wrote is needed, for no other host is spoken to."""
    command = split_command(ROWS["K19"].commands[0])
    options = parse_launch(["--dry_run", *command.launcher[1:], *command.words])
    (line,) = plan_launch(options, os.environ).command_lines
    assert "StrictHostKeyChecking=yes" in " ".join(line.argv)
    assert "3022" in " ".join(line.argv)


def test_an_mpi_of_ones_own_is_used(workplace: Path, tmp_path: Path) -> None:
    """K4: by the variable, and by the flag of the page."""
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\n")
    mpirun.chmod(0o755)
    (text,) = ROWS["K4"].commands
    flags = [str(tmp_path) if word == "/usr/local/openmpi" else word for word in shlex.split(text)[1:]]
    for words, environ in (([], {"MPI_ROOT": str(tmp_path)}), (flags, {})):
        options = parse_launch(["--dry_run", "--np", "2", *words, "ssd_train"])
        (line,) = plan_launch(options, {**os.environ, **environ}).command_lines
        assert line.argv[0] == str(mpirun)


def test_jemalloc_is_preloaded(workplace: Path, tmp_path: Path) -> None:
    """X3: by gaudi-run, where it is found."""
    library = tmp_path / "libjemalloc.so.2"
    library.touch()
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    launched = plan_launch(
        parse_launch(["--dry_run", "--np", "2", "ssd_train"]), {**environ, "LD_LIBRARY_PATH": str(tmp_path)}
    )
    assert launched.plan.environment["LD_PRELOAD"] == str(library)


def test_a_container_is_started_with_the_folders(workplace: Path) -> None:
    """M1."""
    command = split_command(ROWS["M1"].commands[0])
    options = parse_launch(["--dry_run", *command.launcher[1:], *command.words])
    (line,) = plan_launch(options, os.environ).command_lines
    assert line.argv[:2] == ("docker", "run")
    assert "gaudi-vision:mxnet" in line.argv
    assert " -t gaudi-vision:mxnet " in ROWS["M2"].commands[0]
    assert {"/datasets:/data:ro", "/results:/results"} <= {word.replace("type=bind", "") for word in line.argv}


def test_a_job_of_kubernetes_is_written(workplace: Path) -> None:
    """K13."""
    command = split_command(ROWS["K13"].commands[1])
    assert launch([*command.launcher[1:], *command.words], os.environ) == 0
    job = json.loads((workplace / "job.json").read_text())
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert (job["kind"], worker["replicas"], container["resources"]["limits"]["habana.ai/gaudi"]) == ("MPIJob", 1, 8)


@pytest.mark.parametrize("name", ["M2", "M6", "M8"])
def test_images_are_built_of_files_that_are_there(name: str) -> None:
    (text,) = ROWS[name].commands
    files = [word for word in shlex.split(text) if word.startswith("containers/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_of_the_submission_is_launched(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M7 as what Docker would run, M9 to M11 as the script for sbatch, which is written."""
    expected, hosts, ranks = SYSTEMS[name]
    (workplace / "weights" / "resnet34-333f7ec4.pth").touch()
    command = split_command(ROWS[name].commands[0])
    environ = {**os.environ, **command.environ, "DATADIR": str(workplace)}
    assert command.launcher[:2] == ("gaudi-run", "--submission")
    if name == "M7":
        assert launch([*command.launcher[1:], "--dry_run"], environ) == 0
        assert "docker" in capsys.readouterr().out
    else:
        assert launch(command.launcher[1:], environ) == 0
        script = (workplace / "run.slurm").read_text()
        assert f"#SBATCH --nodes={hosts}\n" in script
        assert f"#SBATCH --ntasks-per-node={ranks // hosts}\n" in script
        assert ROWS[name].commands[1:] == ("sbatch run.slurm",)
    program = f"ssd_mxnet_train --system {command.environ['SYSTEM']} --coco-root coco2017"
    found = plan(f"mpirun -np {ranks} {program}", monkeypatch, capsys)
    assert (found["workers"], found["global_batch"]) == (ranks, expected.batch)
    assert found["peak_learning_rate"] == pytest.approx(expected.rate, rel=1e-9)
    assert (found["steps_per_epoch"], found["warmup_steps"], found["total_steps"]) == (
        *(expected.epoch, expected.warmup, expected.total),
    )


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the programs train networks that cost next to nothing, in this process, which starts TensorFlow once."""
    from gaudi_distributed import Precision
    from gaudi_ops.tf.keras_api import keras

    def start(settings: Any) -> Precision:
        keras.utils.set_random_seed(settings.seed)
        return Precision("fp32", "float32")

    def build_classifier(name: str, num_classes: int, *, image_size: int, **options: Any) -> Any:
        layers = keras.layers
        images = keras.Input([image_size, image_size, 3], name="images")
        x = layers.Conv2D(4, 3, 8, use_bias=False, name="conv1")(images)
        x = layers.BatchNormalization(name="conv1_bn")(x)
        x = layers.GlobalAveragePooling2D(name="features")(x)
        return keras.Model(images, layers.Dense(num_classes, name="logits")(x), name=name)

    monkeypatch.setattr("gaudi_apps.runtime.tensorflow.start_tensorflow", start)
    build_ssd = runpy.run_path(str(SMALL_SSD))["build_small_ssd"]
    for name in ("gaudi_models.ssd.build_ssd", "gaudi_apps.detection.detector.build_ssd"):  # where it may be imported
        monkeypatch.setattr(name, build_ssd)
    monkeypatch.setattr("gaudi_models.classifiers.build_classifier", build_classifier)


@pytest.mark.slow
@pytest.mark.usefixtures("small_networks")
def test_the_detector_trains_scores_and_predicts(workplace: Path) -> None:
    """S5, S10, S8 and S11, one after another."""

    def run(name: str, tiny: str = "") -> int:
        text = ROWS[name].commands[0].replace(" --resnet_checkpoint weights/resnet34-tensorflow", "")
        return run_program([*shlex.split(text), *tiny.split()])

    tiny = "-b 1 -e 1 --no_evaluate --save_checkpoints_steps 1"
    assert run("S5", f"{tiny} --steps 2") == 0
    assert run("S10", f"{tiny} --steps 3 --profile 2,3 --model_dir runs/traced") == 0
    assert list((workplace / "runs" / "traced").rglob("*.xplane.pb"))
    assert run("S8") == 0
    scores = json.loads((workplace / "runs" / "ssd" / "checkpoint_scores.json").read_text())
    assert [row["step"] for row in scores] == [1, 2]
    assert run("S11") == 0
    assert list((workplace / "runs" / "ssd" / "predictions").glob("*.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("small_networks")
def test_the_classifiers_train(workplace: Path) -> None:
    """K24 and X11, on the records of K1."""
    tiny = "-bs 2 --image_size 32 --num_examples_per_epoch"
    assert run_program(shlex.split(f"{ROWS['K24'].commands[0]} --model_dir runs/K24 {tiny} 10")) == 0
    assert (workplace / "runs" / "K24" / "export").is_dir()
    assert list((workplace / "runs" / "K24" / "summaries").iterdir())
    command = f"{ROWS['X11'].commands[0]} --model_dir runs/X11 --disable_eval {tiny} 20"
    assert run_program(shlex.split(command)) == 0
    assert list((workplace / "runs" / "X11").rglob("*.xplane.pb"))
