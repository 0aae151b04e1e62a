"""Check the documents: their Python runs, and their commands exist with the flags that they give."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import tyro
from benchmarks.learning import make_parser as make_learning_parser
from packaging.requirements import Requirement
from tools.imports import read_modules
from tools.release import make_parser as make_release_parser

from gaudi_distributed.doctor.cli import parse_flags as parse_doctor
from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.flags import DOCTOR, INSTALL_HOROVOD, STATUS
from gaudi_distributed.launch.flags import parse_flags as parse_launch
from gaudi_distributed.launch.install_horovod import parse_flags as parse_install_horovod
from gaudi_distributed.launch.status import parse_flags as parse_status
from gaudi_models.weights.__main__ import make_parser as parse_weights

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("packages/*/docs/*.md")),
]

# The programs whose flags are read by their own parsers.
PROGRAMS = {
    "ssd_train": "gaudi_apps.ssd_train",
    "python -m gaudi_apps.ssd_train": "gaudi_apps.ssd_train",
    "resnet_train": "gaudi_apps.resnet_train",
    "resnext_train": "gaudi_apps.resnext_train",
    "ssd_mxnet_train": "gaudi_apps.ssd_mxnet_train",
    "gaudi-apps": "gaudi_apps.cli.run_commands",
    "gaudi-datasets": "gaudi_datasets.cli",
    "python -m gaudi_datasets": "gaudi_datasets.cli",
}
LAUNCHER = "gaudi-run"
CONVERTER = ["python", "-m", "gaudi_models.weights"]
RELEASE = ["python", "tools/release.py"]
LEARNING = ["python", "-m", "benchmarks.learning"]
# What nobody runs here, and why.
# They need a network, do nothing, never end, or need a cluster.
NOT_RUN = {
    "git clone",
    "git push",
    "git tag",
    "pre-commit install",
    "cd",
    "tensorboard --logdir",
    "sbatch",
    "kubectl apply",
    "apt-get install",
    "docker build",
    "docker run",
    "apptainer build",
    "ssh-keygen",
    "cp",
}


def find_blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a Markdown text that are in one of the languages."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in languages]


def find_commands(text: str) -> list[str]:
    """Return the commands of the shell blocks, without prompts and comments, continued lines joined.

    A block that has a line with a prompt shows output too: there, only such lines are commands.
    """
    commands = []
    for block in find_blocks(text, "console", "bash", "sh", "shell"):
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        commands += prompted or [line for line in lines if line and not line.startswith("#")]
    return commands


def list_documented(kind: str) -> list[Any]:
    """Return (document, command) or (document, Python) pairs as parameters of a test."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        parts = find_commands(text) if kind == "commands" else ["\n".join(find_blocks(text, "python"))]
        found += [
            pytest.param(part, id=f"{name}: {part}"[:100] if kind == "commands" else name) for part in parts if part
        ]
    return found


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what the commands of the documents make, but small: scenes, records, a model, its export, an image.

    The model, which the Python of several documents loads, has the smallest network that the program builds.
    """
    folder = tmp_path_factory.mktemp("documents")
    convert = "gaudi-datasets convert coco --annotations scenes/annotations/instances_{0}.json --images scenes/{0}"
    run = "ssd_train --model_dir runs/cells --dtype fp32"
    for command in (
        "gaudi-datasets make-scenes --output_dir scenes --train 8 --val 2",
        f"{convert.format('train')} --output_dir records --split train",
        f"{convert.format('val')} --output_dir records --split val",
        f"{run} --data_dir records --backbone resnet18_quarter --batch_size 2 --steps 1 --no_evaluate",
        f"{run} --mode export --inference scenes/val",
    ):
        program, *arguments = shlex.split(command)
        subprocess.run([Path(sys.executable).parent / program, *arguments], cwd=folder, check=True, timeout=600)
    (folder / "runs" / "mine").symlink_to("cells")
    shutil.copy(next((folder / "scenes" / "val").glob("*.jpg")), folder / "photo.jpg")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("code", list_documented("python"))
def test_python_in_documents_runs(data_folder: Path, code: str) -> None:
    """The blocks of one document are one program, as a reader would paste them one after another."""
    done = subprocess.run([sys.executable, "-c", code], cwd=data_folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_files_that_documents_name_exist(path: Path) -> None:
    """A dotted name is of a module or of a name in one; a file is below the root or below a package."""
    text = path.read_text(encoding="utf-8")
    modules = read_module_texts()
    configurations = [file.read_text(encoding="utf-8") for file in ROOT.glob("packages/*/pyproject.toml")]
    groups = re.findall(r'entry-points\."([\w.]+)"', "\n".join(configurations))
    folders = [ROOT, *ROOT.glob("packages/*/src"), *ROOT.glob("packages/*/src/gaudi_*")]
    named = re.findall(r"`(gaudi_\w+(?:\.\w+)+)[`(]", text)
    wrong = [name for name in named if name not in groups and not is_defined(name, modules)]
    files = [name for name in re.findall(r"`([\w/]+/\w+\.py)`", text) if not name.startswith(("scripts/", "demo"))]
    assert wrong + [name for name in files if not any((folder / name).is_file() for folder in folders)] == []


@cache
def read_module_texts() -> Mapping[str, str]:
    """Return the text of each module of the packages by its dotted name."""
    return {name: module.path.read_text(encoding="utf-8") for name, module in read_modules(ROOT).items()}


def is_defined(name: str, modules: Mapping[str, str]) -> bool:
    """Return whether a dotted name is a module, or the first name after the longest module is one in its text."""
    module, names = name, list[str]()
    while module and module not in modules:
        module, _, last = module.rpartition(".")
        names.insert(0, last)
    return bool(module) and (not names or re.search(rf"\b{names[0]}\b", modules[module]) is not None)


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_every_block_says_its_language(path: Path) -> None:
    """Else its commands would go unchecked; what is output only is ```text."""
    fences = re.findall(r"^```.*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert "```" not in fences[::2]


@pytest.mark.parametrize("command", list_documented("commands"))
def test_command_in_documents_is_one(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_command(command, monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "make dmeo",
        "nox -s test",
        'nox -s "tests(nothing)"',
        "pip install ./packages/nothing",
        "pip install -r nothing.txt",
        'pip install "gaudi-ops[gpu]"',
        "ssd_train --batch_sice 8",
        "gaudi-datasets make-scenes --nothing 1",
        "gaudi-run --np 2 ssd_train --batch_sice 8",
        "python -m gaudi_models.weights a.pth",
        "gaudi-run doctor --batch_size 8",
        "gaudi-run install-horovod --with_torch",
        "gaudi-run status --np 2",
        "python tools/release.py changelog",
        "python -m benchmarks.learning --budget 5",
        "curl example",
    ],
)
def test_a_wrong_command_is_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, SystemExit, FlagError)):
        check_command(command, monkeypatch)


def check_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless the command is one of ours, with targets, sessions, packages or flags that exist."""
    words = shlex.split(command, comments=True)
    while "=" in words[0]:
        words = words[1:]
    words[0] = Path(words[0]).name
    program = next((name for name in PROGRAMS if words[: len(name.split())] == name.split()), None)
    if words[:3] == CONVERTER:
        parse_weights().parse_args(words[3:])
    elif words[:3] == LEARNING:
        make_learning_parser().parse_args(words[3:])
    elif words[:2] == RELEASE:
        make_release_parser().parse_args(words[2:])
    elif words[0] == LAUNCHER:
        check_launch(words[1:], monkeypatch)
    elif program is not None:
        parse_with_program(PROGRAMS[program], words[len(program.split()) :], monkeypatch)
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[:2] == ["nox", "-s"]:
        assert words[2] in list_sessions()
    elif words[:2] == ["pip", "install"]:
        check_requirements(words[2:])
    else:
        assert any(words[: len(known.split())] == known.split() for known in NOT_RUN), command


def check_launch(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless the launcher's flags exist, and what they start is one of our programs, with flags that exist."""
    if "--help" in arguments:
        return
    commands = {DOCTOR: parse_doctor, INSTALL_HOROVOD: parse_install_horovod, STATUS: parse_status}
    if (parse := commands.get(arguments[0])) is not None:
        parse(arguments[1:])
        return
    options = parse_launch(arguments)
    if options.command:
        check_command(shlex.join(options.command), monkeypatch)


def parse_with_program(module: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program up to where its flags are read and found good."""

    class Parsed(BaseException):
        pass

    parse = tyro.cli

    def parse_and_stop(*args: Any, **kwargs: Any) -> None:
        parse(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    if "--help" in arguments:
        with pytest.raises(SystemExit, match="0"):
            import_module(module).main()
    else:
        with pytest.raises(Parsed):
            import_module(module).main()


def list_sessions() -> set[str]:
    """Return the names of the nox sessions, read from the file: nox itself is not installed here."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    names = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("nox.session" in ast.unparse(d) for d in node.decorator_list)
    }
    return names | {f"tests({path.name})" for path in (ROOT / "packages").iterdir()}


def check_requirements(words: Sequence[str]) -> None:
    """Fail unless each requirement is a package of ours (by name or folder) with extras that it has."""
    options = {"-c", "--constraint"}
    for before, word in zip(["", *words], words, strict=False):
        if before in ("-r", "--requirement"):
            assert (ROOT / word).is_file()
            lines = (ROOT / word).read_text(encoding="utf-8").splitlines()
            check_requirements([part for line in lines if not line.startswith("#") for part in line.split()])
        elif before in options:
            assert (ROOT / word).exists()
        elif not word.startswith("-"):
            path, _, extras = word.partition("[")
            local = path.startswith("./")
            assert not local or (ROOT / path / "pyproject.toml").exists()
            name = f"gaudi-{Path(path).name}[{extras}" if local and extras else word
            if not local or extras:
                requirement = Requirement(name)
                assert requirement.extras <= set(metadata.metadata(requirement.name).get_all("Provides-Extra") or [])
