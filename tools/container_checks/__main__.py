"""Build the images and definitions of containers/, and run them as users do; `nox -s containers` runs it, as root.

`python -m tools.container_checks FOLDER` keeps bases and images in the folder for the next run. From Debian it needs
buildah, podman, runc, catatonit, debootstrap, iproute2 and openssh-client. In place of the public base images there are
root file systems made by debootstrap; the vendor's one has TensorFlow 2.15.0 and the vendor's wheel for Python 3.10.
Apptainer comes from Debian's unstable suite, in a root file system of its own. The first fault ends it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.container_checks.apptainer import Apptainer, check_apptainer
from tools.container_checks.docker import check_docker
from tools.container_checks.images import CheckError, Images, make_base
from tools.container_checks.job import check_job

LANES = ("default", "gaudi", "mxnet")
PROGRAMS = ("buildah", "podman", "runc", "debootstrap", "unshare", "ip", "ssh-keygen")


def main(arguments: Sequence[str] | None = None) -> None:
    """Check what the arguments name."""
    parser = argparse.ArgumentParser(description="Build and run the images of containers/.")
    parser.add_argument("folder", type=Path, help="of bases and images, kept for the next run")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=LANES)
    parser.add_argument("--kinds", nargs="+", choices=("docker", "apptainer"), default=("docker", "apptainer"))
    options = parser.parse_args(arguments)
    if os.geteuid():
        raise CheckError("builds root file systems; run it as root")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise CheckError(f"{', '.join(missing)} not found; apt-get install {' '.join(PROGRAMS[:4])} iproute2 catatonit")
    os.environ.pop("TMPDIR", None)  # nox names a folder that is in no root file system
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    images = Images(folder)
    make_base(images)
    for lane in options.lanes:
        if "docker" in options.kinds:
            image = check_docker(images, lane)
            if lane == "default":
                check_job(images, image)
    if "apptainer" in options.kinds:
        apptainer = Apptainer(folder, images)
        for lane in options.lanes:
            check_apptainer(apptainer, lane)


if __name__ == "__main__":
    try:
        main()
    except CheckError as error:
        sys.exit(f"error: {error}")
