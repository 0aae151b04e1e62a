"""A lane's Dockerfile: built, looked into, and run as users run it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tools.container_checks.images import (
    BASE,
    LIMITS,
    ROOT,
    VENDOR_BASE,
    Images,
    call,
    make_vendor_base,
    require,
    say,
)

# What two ranks of each framework say: their user, and the sum over both.
TALK = {
    "default": "import horovod.tensorflow as hvd, tensorflow as f; one = f.constant(1.0)",
    "mxnet": "import horovod.mxnet as hvd, mxnet as f; one = f.nd.ones(1)",
}
SUM = """{one}
import os
hvd.init()
total = hvd.allreduce(one, op=hvd.Sum)
print("talked", os.getuid(), float(total.asscalar() if hasattr(total, "asscalar") else total), flush=True)
"""
HELP = {
    "default": ("ssd_train", "resnet_train"),
    "gaudi": ("ssd_train", "resnext_train"),
    "mxnet": ("ssd_mxnet_train",),
}


def check_docker(images: Images, lane: str) -> str:
    """Build a lane's Dockerfile, look at the image and into it, and return its name."""
    image = f"localhost/gaudi-vision:{lane}"
    if lane == "gaudi":
        make_vendor_base(images)
    base = VENDOR_BASE if lane == "gaudi" else BASE
    file = str(ROOT / "containers" / f"{lane}.Dockerfile")
    build = ["--isolation", "chroot", "--format", "docker", "--layers", "--build-arg", f"BASE_IMAGE={base}"]
    images.buildah("bud", *build, "-f", file, "-t", image, str(ROOT))
    say(f"{lane}: Dockerfile built, {check_files(images, image):.2f} GB")
    for program in HELP[lane]:
        require("usage:" in images.run(image, program, "--help"), f"{image}: {program} --help says nothing")
    require(images.run(image, "id", "-u").strip() == "1000", f"{image} runs as another user than 1000")
    check_doctor(images.run(image, "sh", "-c", "gaudi-run doctor --json || true"), lane)
    say(f"{lane}: user 1000, programs, doctor")
    if lane in TALK:
        for backend in ("openmpi", "gloo"):
            command = ["gaudi-run", "--np", "2", "--backend", backend, "python", "-c", SUM.format(one=TALK[lane])]
            flags = ["--user", "1234:1234", "--env", "HOME=/tmp"]
            check_talk(images.run(image, *command, flags=flags), 2, 1234)
        say(f"{lane}: two ranks talk by Open MPI and by Gloo, as a user whom the image does not know")
        check_gaudi_run(images, lane)
    return image


def check_files(images: Images, image: str) -> float:
    """Raise CheckError if an image holds what it should not; return its size in GB (10^9 bytes)."""
    about = json.loads(images.buildah("inspect", "--type", "image", image))
    config = about["OCIv1"]["config"]
    require(config["User"] == "1000:1000", f"{image}: its user is {config.get('User')!r}")
    with images.open(image) as (_, root):
        found = [*root.glob("etc/ssh/ssh_host_*"), *root.glob("var/lib/apt/lists/*_*")]
        found += [path for path in root.glob("root/.cache/**/*") if path.is_file()]
        found += [*root.glob("build"), *root.glob("src"), *root.glob("home/gaudi/.ssh/*")]
        if image.split(":")[-1] != "gaudi":
            found += root.glob("usr/bin/*g++*")
        require(not found, f"{image} holds {', '.join(str(path.relative_to(root)) for path in found[:5])}")
        ours = {path.name.split("-")[0] for path in root.glob("opt/gaudi/lib/python3*/site-packages/gaudi_*.dist-info")}
        expected = {f"gaudi_{name}" for name in ("ops", "datasets", "models", "distributed", "apps")}
        require(ours == expected, f"{image} has the packages {sorted(ours)}")
        size = call(["du", "--summarize", "--bytes", "--one-file-system", str(root)])
    return int(size.split()[0]) / 1e9


def check_doctor(text: str, lane: str) -> None:
    """Raise CheckError unless the doctor finds in the image what the lane is made of."""
    checks = {check["check"]: check for check in json.loads(text)["checks"]}
    expected = {"default": ("TensorFlow", "2.15.1"), "gaudi": ("TensorFlow", "2.15.0"), "mxnet": ("Horovod", "0.28.1")}
    name, version = expected[lane]
    require(version in checks[name]["text"], f"{lane}: the doctor says of {name}: {checks[name]['text']}")
    require("libjemalloc" in checks["jemalloc"]["text"], f"{lane}: jemalloc: {checks['jemalloc']['text']}")


def check_talk(output: str, ranks: int, user: int) -> None:
    """Raise CheckError unless every rank said the sum over all, as the user."""
    said = [line.split() for line in output.splitlines() if line.startswith("talked")]
    require(said == [["talked", str(user), f"{ranks}.0"]] * ranks, f"ranks said {output[-2000:]}")


def check_gaudi_run(images: Images, lane: str) -> None:
    """Run `gaudi-run --docker` on this machine, with Podman in the place of Docker."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        stand_in = folder / "docker"
        stand_in.write_text(f"#!{sys.executable}\n{DOCKER.format(podman=images.podman, limits=LIMITS)}")
        stand_in.chmod(0o755)
        runs = folder / "runs"
        runs.mkdir()
        launch = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "2", "--docker"]
        launch += ["--image", f"localhost/gaudi-vision:{lane}", "--mount", f"{runs}:/runs", "--workdir", "/runs"]
        write = "import os, pathlib; pathlib.Path(os.environ['GAUDI_RUN_ENGINE'] + str(os.getpid())).touch()\n"
        command = ["python", "-c", write + SUM.format(one=TALK[lane])]
        check_talk(call([*launch, *command], PATH=f"{folder}:{os.environ['PATH']}"), 2, os.geteuid())
        written = [(path.name[:7], path.stat().st_uid) for path in runs.iterdir()]
        require(written == [("horovod", os.geteuid())] * 2, f"{lane}: ranks wrote {written}")
    say(f"{lane}: gaudi-run --docker, whose ranks write as the user")


# Podman takes Docker's arguments. Where even root may not raise limits, as in some virtual machines, they stay.
DOCKER = """
import os, resource, sys
words = sys.argv[1:]
try:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
except (OSError, ValueError):
    limits = [place for place, word in enumerate(words) if word == "--ulimit"]
    words = [word for place, word in enumerate(words) if not {{place, place - 1}} & set(limits)]
    words[1:1] = {limits!r}
podman = {podman!r}
os.execvp(podman[0], [*podman, *words])
"""
