"""A lane's definition: built by Apptainer, and run by `gaudi-run --singularity`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.container_checks.docker import SUM, TALK, check_talk
from tools.container_checks.images import (
    BASE,
    CACHE,
    ROOT,
    VENDOR_BASE,
    Images,
    bootstrap,
    call,
    make_vendor_base,
    require,
    say,
)

# Enters a root file system as if it were the machine's: a chroot alone is not enough for Apptainer.
ENTER = """set -e
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mkdir -p "$root/old" "$root/src"
mount --rbind "$SHARED" "$root$SHARED"
mount --bind -o ro "$CLONE" "$root/src"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cd "$root"
pivot_root . old
umount -l old
cd /src
exec "$@"
"""


class Apptainer:
    """Apptainer of Debian's unstable suite, in a root file system of its own."""

    def __init__(self, folder: Path, images: Images) -> None:
        self.folder, self._images = folder / "shared", images
        self._root = bootstrap(folder, "sid", "apptainer", "squashfuse")
        for name in ("subuid", "subgid"):
            (self._root / "etc" / name).write_text("root:100000:65536\n")
        for path in (self.folder, self._root / self.folder.relative_to("/")):
            path.mkdir(parents=True, exist_ok=True)
        (self.folder / "pip").mkdir(exist_ok=True)
        if CACHE.is_dir():
            shutil.copytree(CACHE, self.folder / "horovod", dirs_exist_ok=True)

    @property
    def prefix(self) -> list[str]:
        """The command that runs Apptainer; SHARED and CLONE are to be set."""
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh", str(self._root)]
        # In a user namespace, because root of some virtual machines lacks a capability that Apptainer asks for.
        return [*enter, "env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", f"TMPDIR={self.folder}", "apptainer"]

    @property
    def variables(self) -> Mapping[str, str]:
        """Return what `prefix` reads."""
        return {"SHARED": str(self.folder), "CLONE": str(ROOT)}

    def build(self, lane: str) -> Path:
        """Build a lane's definition, and return its image."""
        base, image = self.folder / f"{lane}-base.tar", self.folder / f"gaudi-vision-{lane}.sif"
        base.unlink(missing_ok=True)
        self._images.buildah("push", VENDOR_BASE if lane == "gaudi" else BASE, f"oci-archive:{base}")
        binds = [
            f"{self.folder}/{name}:/root/.cache/{place}"
            for name, place in (("pip", "pip"), ("horovod", "gaudi/horovod"))
        ]
        flags = ["--userns", "--fakeroot", "--force", *(word for bind in binds for word in ("--bind", bind))]
        # Small is not what is tested: the default compression takes minutes.
        flags += ["--mksquashfs-args", "-comp zstd -Xcompression-level 1"]
        flags += ["--build-arg", "BOOTSTRAP=oci-archive", "--build-arg", f"BASE_IMAGE={base}"]
        call([*self.prefix, "build", *flags, str(image), f"containers/{lane}.def"], **self.variables)
        base.unlink()
        return image


def check_apptainer(apptainer: Apptainer, lane: str) -> None:
    """Build a lane's definition, test it, and run two ranks in it by `gaudi-run --singularity`."""
    if lane == "gaudi":
        make_vendor_base(apptainer._images)
    image = apptainer.build(lane)
    say(f"{lane}: definition built and tested, {image.stat().st_size / 1e9:.2f} GB")
    with tempfile.TemporaryDirectory() as place:
        stand_in = Path(place, "singularity")
        stand_in.write_text(f"#!{sys.executable}\n{SINGULARITY.format(apptainer=apptainer)}")
        stand_in.chmod(0o755)
        environ = {"PATH": f"{place}:{os.environ['PATH']}", **apptainer.variables}
        run = [
            sys.executable,
            "-m",
            "gaudi_distributed.launch",
            "--singularity",
            "--image",
            str(image),
            "--forward",
            "SHARED",
        ]
        run += ["--forward", "CLONE", "--cores_per_rank", "0", "--np", "2", "--backend", "gloo"]
        if lane in TALK:
            check_talk(call([*run, "python", "-c", SUM.format(one=TALK[lane])], **environ), 2, 0)
            say(f"{lane}: gaudi-run --singularity, two ranks")
        else:
            output = call([*run, "python", "-c", "import gaudi_apps, habana_frameworks; print('there')"], **environ)
            require(output.split() == ["there"] * 2, f"{lane}: ranks said {output}")
            say(f"{lane}: gaudi-run --singularity, two ranks find the vendor's module")


# Apptainer lets a rank in a user namespace, without a mount of its own for the home.
SINGULARITY = """
import os, sys
command = {apptainer.prefix!r}
os.execvp(command[0], [*command, *sys.argv[1:2], "--userns", "--no-home", "--pwd", "/", *sys.argv[2:]])
"""
