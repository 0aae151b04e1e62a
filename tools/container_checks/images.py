"""Images by Buildah, containers by Podman, and the bases that stand for public ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE, VENDOR_BASE = "localhost/base:bookworm", "localhost/vendor:1.14"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
VENDOR_STACK = ("tensorflow-cpu==2.15.0", "habana-tensorflow==1.14.0.493")
# Podman would raise these two limits, which root of some virtual machines may not.
LIMITS = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=1024:1024"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gaudi", "horovod")


class CheckError(Exception):
    """Something that a user of the images would stumble over."""


@dataclass(frozen=True)
class Images:
    """A storage of images that Buildah and Podman share, in a folder of its own."""

    folder: Path

    @property
    def storage(self) -> list[str]:
        """Flags of both."""
        place = self.folder / "storage"
        return ["--root", str(place), "--runroot", str(self.folder / "run"), "--storage-driver", "overlay"]

    def buildah(self, *words: str) -> str:
        """Run Buildah, and return what it wrote."""
        return call(["buildah", *self.storage, *words])

    def has(self, image: str) -> bool:
        """Tell whether there is an image."""
        return not subprocess.run(
            ["buildah", *self.storage, "inspect", "--type", "image", image], capture_output=True, check=False
        ).returncode

    def run(self, image: str, *words: str, flags: Sequence[str] = (), prefix: Sequence[str] = ()) -> str:
        """Run a command in a container by Podman, and return what it printed."""
        return call([*prefix, *self.podman, "run", "--rm", "--network", "host", *LIMITS, *flags, image, *words])

    @property
    def podman(self) -> list[str]:
        """Podman, with a run time that takes control groups of both versions."""
        return ["podman", *self.storage, "--runtime", "runc", "--cgroup-manager", "cgroupfs"]

    @contextmanager
    def open(self, image: str) -> Iterator[tuple[str, Path]]:
        """Yield a container that is not running, and where its files are."""
        container = self.buildah("from", image).split()[-1]
        try:
            yield container, Path(self.buildah("mount", container).split()[-1])
        finally:
            self.buildah("rm", container)


def call(command: Sequence[str], **variables: str) -> str:
    """Run a program, and return what it printed; CheckError if it fails."""
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(
            f"{' '.join(command)[:600]}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-5000:]}"
        )
    return done.stdout


def require(is_good: bool, fault: str) -> None:
    """Raise CheckError with the fault unless it is good."""
    if not is_good:
        raise CheckError(fault)


def say(text: str) -> None:
    """Tell how far it is."""
    print(f"ok  {text}", flush=True)


def bootstrap(folder: Path, suite: str, *packages: str) -> Path:
    """Return a root file system of Debian's with packages and this machine's certificates, made where it is missing."""
    root = folder / suite
    if not root.is_dir():
        beside = folder / f"{suite}.part"
        shutil.rmtree(beside, ignore_errors=True)
        call(
            ["debootstrap", "--variant=minbase", f"--include=ca-certificates,{','.join(packages)}", suite, str(beside)]
        )
        for path in CERTIFICATES.glob("*.crt"):
            shutil.copy(path, beside / CERTIFICATES.relative_to("/"))
        call(["chroot", str(beside), "update-ca-certificates"])
        beside.rename(root)
        say(f"a root file system of Debian's {suite} by debootstrap")
    return root


def make_base(images: Images) -> None:
    """Make what stands for python:3.11-slim-bookworm: Debian 12 with its Python 3.11; and fill the cache of wheels."""
    if not images.has(BASE):
        root = bootstrap(images.folder, "bookworm", "python3", "python3-venv")
        container = images.buildah("from", "scratch").split()[-1]
        mounted = Path(images.buildah("mount", container).split()[-1])
        call(["cp", "--archive", f"{root}/.", str(mounted)])
        for path in (".cache/pip", ".cache/gaudi/horovod"):
            (mounted / "root" / path).mkdir(parents=True)
        # An older pip does not look at the system's certificates by itself.
        images.buildah("config", "--env", "PIP_CERT=/etc/ssl/certs/ca-certificates.crt", container)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        images.buildah("config", "--env", f"PATH={path}", container)
        images.buildah("commit", "--rm", container, BASE)
    if CACHE.is_dir():
        fill = f"FROM {BASE}\nCOPY . /w\nRUN --mount=type=cache,id=gaudi-horovod,target=/c cp -rn /w/. /c/\n"
        with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
            file.write(fill)
            file.flush()
            images.buildah("bud", "--isolation", "chroot", "-f", file.name, str(CACHE))


def make_vendor_base(images: Images) -> None:
    """Make what stands for the vendor's image: Python 3.10 with TensorFlow 2.15.0 and the vendor's wheel."""
    if images.has(VENDOR_BASE):
        return
    prefix = find_python310()
    with images.open(BASE) as (container, mounted):
        call(["cp", "--archive", str(prefix), str(mounted / "opt" / "python")])
        (mounted / "usr/local/bin/python3").symlink_to("/opt/python/bin/python3.10")
        # Its program may look for its library where it came from.
        library = "libpython3.10.so.1.0"
        (mounted / "usr/lib/x86_64-linux-gnu" / library).symlink_to(f"/opt/python/lib/{library}")
        libraries = "libbz2-1.0 libffi8 liblzma5 libreadline8 libsqlite3-0 libssl3 zlib1g"
        install = f"apt-get install -qq --yes --no-install-recommends {libraries} > /dev/null"
        pip = f"python3 -m pip install --quiet --root-user-action ignore {' '.join(VENDOR_STACK)} numpy==1.23.5"
        script = f"apt-get update -qq && {install} && {pip} && rm -rf /var/lib/apt/lists/* /root/.cache/pip/*"
        images.buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", script)
        images.buildah("commit", container, VENDOR_BASE)
    say("a base with the vendor's wheel, in place of the vendor's image")


def find_python310() -> Path:
    """Return the folder that a Python 3.10 is installed in; pyenv's where PATH has none that runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for python in ("python3.10", *map(str, sorted(pyenv.glob("versions/3.10.*/bin/python3.10")))):
        try:
            return Path(call([python, "-c", "import sys; print(sys.base_prefix)"]).strip())
        except (CheckError, FileNotFoundError):
            continue
    raise CheckError("there is no Python 3.10, which stands for that of the vendor's image; install one")
