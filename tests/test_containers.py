"""Check the files in containers/: the two of a lane agree, and nothing makes an image unsafe or large.

hadolint, in `nox -s lint`, knows more of Dockerfiles.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gaudi_apps.cli.run_commands import parse_arguments
from gaudi_distributed.launch.containers import choose_image
from gaudi_distributed.launch.planning import is_secret
from gaudi_distributed.launch.schedulers import IMAGE_SSH, IMAGE_SSH_PORT

ROOT = Path(__file__).resolve().parents[1]
LANES = ("default", "gaudi", "mxnet")
IMAGES = (*LANES, "serve")  # the server has no lane of its own, and no definition for Apptainer


def read_dockerfile(lane: str) -> list[tuple[str, str]]:
    """Return the instructions of a lane's Dockerfile with their arguments, continued lines joined."""
    text = (ROOT / "containers" / f"{lane}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines()]


def list_docker_commands(lane: str) -> list[list[str]]:
    """Return the commands of all RUN instructions as words."""
    runs = [text for name, text in read_dockerfile(lane) if name == "RUN"]
    texts = [re.sub(r"--mount=\S+\s+", "", text) for text in runs]
    return [shlex.split(command) for text in texts for command in text.split("&&")]


def list_definition_commands(lane: str) -> list[list[str]]:
    """Return the commands of all %post sections of a lane's definition as words."""
    text = (ROOT / "containers" / f"{lane}.def").read_text()
    posts = re.findall(r"^%post\n(.*?)(?=^%|^Bootstrap|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n\s*", "", "\n".join(posts)).splitlines()
    return [shlex.split(line) for line in lines if line.strip() and not line.strip().startswith("#")]


def list_installing(commands: list[list[str]]) -> list[list[str]]:
    """Return the commands that decide what Python finds, in their order."""
    return [
        words for words in commands if words[0] in ("pip", "gaudi-run", "sed") or words[:3] == ["python3", "-m", "venv"]
    ]


def list_packages(commands: list[list[str]]) -> list[set[str]]:
    """Return what each `apt-get install` installs."""
    installs = [words[2:] for words in commands if words[:2] == ["apt-get", "install"]]
    return [{word for word in words if not word.startswith("-")} for words in installs]


@pytest.mark.parametrize("lane", LANES)
def test_both_files_of_a_lane_build_the_same(lane: str) -> None:
    docker, definition = list_docker_commands(lane), list_definition_commands(lane)
    assert list_installing(docker) == list_installing(definition)
    assert len(list_installing(docker)) > 3
    (build, final), (other_build, other_final) = list_packages(docker), list_packages(definition)
    # Apptainer starts no sshd in an image.
    assert (build, final) == (other_build, other_final | {"openssh-server"})
    arguments = {text.partition("=")[2] for name, text in read_dockerfile(lane) if name == "ARG"}
    text = (ROOT / "containers" / f"{lane}.def").read_text()
    assert set(re.findall(r"^    BASE_IMAGE=(.*)$", text, re.MULTILINE)) == arguments
    assert all(":" in image for image in arguments)


@pytest.mark.parametrize("lane", IMAGES)
def test_versions_are_pinned_and_extras_exist(lane: str) -> None:
    for words in list_docker_commands(lane):
        if words[:2] == ["pip", "install"]:
            assert words[2:4] == ["--constraint", "constraints.txt"]
            ours = [word.removeprefix("./packages/") for word in words if word.startswith("./packages/")]
            assert not ours or words[4:6] == ["--build-constraint", "constraints.txt"]
            for requirement in (Requirement(f"gaudi-{name}") for name in ours):
                provided = metadata.metadata(requirement.name).get_all("Provides-Extra") or []
                assert requirement.extras <= set(provided)


@pytest.mark.parametrize("lane", IMAGES)
def test_an_image_is_safe_and_small(lane: str) -> None:
    instructions = read_dockerfile(lane)
    names = [name for name, _ in instructions]
    users = [text for name, text in instructions if name == "USER"]
    final = names[len(names) - 1 - names[::-1].index("FROM") :]
    assert users[-1] == "1000:1000"
    assert "USER" in final
    assert "ADD" not in names
    variables = [text for name, text in instructions if name in ("ARG", "ENV")]
    assert [name for text in variables for name in re.findall(r"(\w+)=", text) if is_secret(name)] == []
    for name, text in instructions:
        if name == "RUN" and "apt-get install" in text:
            assert "--no-install-recommends" in text
            assert "rm -rf /var/lib/apt/lists/*" in text
            assert "openssh-server" not in text or "/etc/ssh/ssh_host_*" in text
    stages = [text for name, text in instructions if name == "FROM"]
    assert stages == ["${BASE_IMAGE} AS build", "${BASE_IMAGE}"]


def test_the_server_is_started_by_flags_that_it_has() -> None:
    instructions = dict(read_dockerfile("serve"))
    words = [*json.loads(instructions["ENTRYPOINT"]), *json.loads(instructions["CMD"])]
    served = parse_arguments(words[1:])
    assert (words[0], served.host, str(served.port)) == ("gaudi-apps", "0.0.0.0", instructions["EXPOSE"])
    assert f":{served.port}/healthz" in instructions["HEALTHCHECK"]


def is_sent(path: str) -> bool:
    """Tell whether .dockerignore lets a file through; the last pattern that fits decides, as in Docker."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern and not line.startswith("#"):
            parents = [path, *(str(parent) for parent in Path(path).parents)]
            patterns = [pattern, pattern.removeprefix("**/")]
            if any(fnmatch.fnmatchcase(each, one) for each in parents for one in patterns):
                sent = line.startswith("!")
    return sent


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("constraints.txt", True),
        ("packages/apps/src/gaudi_apps/ssd_train.py", True),
        ("packages/apps/pyproject.toml", True),
        ("containers/sshd_config", True),
        (".git/config", False),
        (".venv/bin/python", False),
        (".env", False),
        ("runs/demo/run.json", False),
        ("packages/apps/tests/test_x.py", False),
        ("packages/apps/src/gaudi_apps/__pycache__/x.pyc", False),
        ("packages/apps/src/gaudi_apps.egg-info/PKG-INFO", False),
    ],
)
def test_the_builder_is_sent_what_it_needs_and_no_more(path: str, sent: bool) -> None:
    assert is_sent(path) is sent


@pytest.mark.parametrize("lane", IMAGES)
def test_what_is_copied_is_sent(lane: str) -> None:
    copied = [text.split()[0] for name, text in read_dockerfile(lane) if name == "COPY" and "--from" not in text]
    assert len(copied) >= (2 if lane == "serve" else 4)
    for path in copied:
        assert (ROOT / path).exists()
        assert is_sent(path if (ROOT / path).is_file() else f"{path}/pyproject.toml")


def test_manifests_and_images_agree_on_ssh() -> None:
    sshd, ssh = ((ROOT / "containers" / name).read_text() for name in ("sshd_config", "ssh_config"))
    assert f"HostKey {IMAGE_SSH}/id_rsa\n" in sshd
    assert f"AuthorizedKeysFile {IMAGE_SSH}/authorized_keys\n" in sshd
    assert f"-p {IMAGE_SSH_PORT}" in sshd
    assert f"{IMAGE_SSH}/id_rsa.pub" in ssh


@pytest.mark.parametrize("lane", LANES)
def test_images_have_the_names_that_gaudi_run_takes(lane: str) -> None:
    accelerator, program = ("hpu" if lane == "gaudi" else "none"), ("ssd_mxnet_train" if lane == "mxnet" else "x")
    for suffix, kind in (("Dockerfile", "docker"), ("def", "singularity")):
        text = (ROOT / "containers" / f"{lane}.{suffix}").read_text()
        assert f" {choose_image(kind, accelerator, (program,))} " in text.replace("\n", " ")  # type: ignore[arg-type]
