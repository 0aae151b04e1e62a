"""Check each package as installed alone; `nox -s packages` runs it.

`python tools/package_checks.py FOLDER` builds all packages into the folder and installs each wheel, and each of its
extras, in empty environments there. The first thing that is not as it should be ends it with a line. It needs uv
beside Python.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# In an order in which each comes after those of ours that it needs.
NAMES = ("ops", "datasets", "models", "distributed", "apps")
TENSORFLOWS = {"tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "intel-tensorflow", "tf-nightly"}
# Extras that bring TensorFlow: the build for GPUs is large, so it is only resolved.
WITH_TENSORFLOW, ONLY_RESOLVED = {"tensorflow", "tensorflow-cpu"}, {"tensorflow"}
# The pinned NumPy is that of MXNet, and OpenVINO needs a later one; the client of S3 needs an earlier python-dateutil.
UNPINNED = {("apps", "openvino"), ("apps", "remote"), ("datasets", "remote")}
# What an extra is for, imported with it; the other extras are for tests and for what the package does with TensorFlow.
IMPORTS = {
    ("ops", "tensorflow-cpu"): "gaudi_ops.tf",
    ("datasets", "tensorflow-cpu"): "gaudi_datasets.detection.pipeline, gaudi_datasets.classification.pipeline",
    ("datasets", "scenes"): "sklearn, gaudi_datasets.detection.scenes",
    ("datasets", "imagenet"): "scipy, gaudi_datasets.classification.imagenet",
    ("datasets", "plots"): "matplotlib, gaudi_datasets.linting.sheet",
    ("datasets", "remote"): "fsspec, gcsfs, s3fs, gaudi_datasets.records.remote_records",
    ("models", "tensorflow-cpu"): "gaudi_models.ssd, gaudi_models.classifiers",
    ("models", "hdf5"): "h5py",
    ("models", "mxnet"): "gaudi_models.mxnet.ssd",
    (
        "apps",
        "tensorflow-cpu",
    ): "gaudi_apps.training.run, gaudi_apps.detection.detector, gaudi_apps.classification.task",
    ("apps", "export"): "onnx, onnxruntime",
    ("apps", "litert"): "ai_edge_litert.interpreter",
    ("apps", "openvino"): "nncf, openvino",
    ("apps", "mxnet"): "gaudi_apps.training.run, gaudi_apps.mxnet.task",
    ("apps", "mlperf"): "mlperf_logging.mllog",
    ("apps", "remote"): "s3fs, gaudi_apps.training.run",
    ("apps", "mlflow"): "mlflow, gaudi_apps.training.history",
    ("apps", "wandb"): "wandb, gaudi_apps.training.history",
    ("apps", "supervision"): "supervision, gaudi_apps.detection.detections",
}
# What the examples of a README need before they run, beside the package and its extras.
EXAMPLES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ops": ("tensorflow-cpu", ()),
    "models": ("tensorflow-cpu,mxnet", ()),
    "distributed": ("", ()),
    "datasets": (
        "scenes",
        (
            "make-scenes --output_dir scenes --train 4 --val 1",
            "convert coco --annotations scenes/annotations/instances_train.json --images scenes/train "
            "--output_dir records --split train",
        ),
    ),
}


class CheckError(Exception):
    """Something that a user of a package would stumble over."""


@dataclass(frozen=True)
class Environment:
    """An environment of its own, empty at first."""

    folder: Path

    def create(self, python: str = sys.executable) -> Environment:
        """Make it."""
        uv("venv", "--quiet", "--clear", "-p", python, str(self.folder))
        return self

    def install(self, dist: Path, *requirements: str, dry: bool = False, pinned: bool = True) -> str:
        """Install requirements, ours from the folder of wheels; returns what uv says. `dry`: only resolve them."""
        flags = ["--dry-run"] if dry else ["--quiet"]
        # uv keeps wheels of a folder by their names alone, so one of an earlier run would be taken for the new one.
        flags += [f"--refresh-package=gaudi-{name}" for name in NAMES]
        arguments = ["-p", str(self.folder), "--find-links", str(dist)]
        arguments += ["-c", str(CONSTRAINTS)] if pinned else []
        said = uv("pip", "install", *flags, *arguments, *requirements)
        for wheel in dist.glob("gaudi_*.whl"):
            record = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/RECORD"
            for installed in self.folder.glob(f"lib/python*/site-packages/{record}"):
                self.compare_record(installed, wheel)
        return said

    def compare_record(self, installed: Path, wheel: Path) -> None:
        """Raise CheckError if what was installed is not what the wheel holds."""
        own = f"{installed.parent.name}/RECORD"
        with zipfile.ZipFile(wheel) as archive:
            held = set(archive.read(own).decode().splitlines()) - {f"{own},,"}
        if missing := held - set(installed.read_text(encoding="utf-8").splitlines()):
            raise CheckError(f"{self.folder} holds another build than {wheel}: {', '.join(sorted(missing)[:3])}")

    def list_names(self) -> set[str]:
        """List the distributions that it holds."""
        lines = uv("pip", "freeze", "-p", str(self.folder)).splitlines()
        return {re.split(r"[ =@]", line)[0].lower() for line in lines if line}

    def list_versions(self, names: Sequence[str]) -> dict[str, str]:
        """List the versions of those distributions that it holds."""
        lines = uv("pip", "freeze", "-p", str(self.folder)).splitlines()
        held = dict(line.split("==") for line in lines if "==" in line)
        return {name: held[name] for name in names if name in held}

    def check(self) -> None:
        """Raise CheckError if two distributions do not agree."""
        uv("pip", "check", "-p", str(self.folder))

    def run(self, code: str, folder: Path) -> None:
        """Run Python code in a folder."""
        call([str(self.folder / "bin" / "python"), "-I", "-c", code], folder)


def call(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a program, and return what it wrote; CheckError if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(f"{' '.join(command)[:300]}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def uv(*arguments: str) -> str:
    """Run uv."""
    return call([sys.executable, "-m", "uv", *arguments])


def main(folder: Path) -> None:
    """Check all packages."""
    shutil.rmtree(folder, ignore_errors=True)
    dist = folder / "dist"
    dist.mkdir(parents=True)
    for name in NAMES:
        build(name, dist, folder / "direct")
        say(f"{name}: sdist and tree give the same wheel, with its licence")
    for name in NAMES:
        check_alone(name, dist, folder / name)
        for extra in sorted(list_extras(find_wheel(name, dist))):
            check_extra(name, extra, dist, folder / f"{name}-{extra}")
        check_no_other_tensorflow(name, dist, folder / f"{name}-vendor")
    for name, (extra, commands) in EXAMPLES.items():
        run_examples(name, extra, commands, dist, folder / f"{name}-examples")
    check_ranges(dist, folder)
    check_clone(folder / "clone")


def build(name: str, dist: Path, direct: Path) -> None:
    """Build sdist and wheel; the wheel, which is made of the sdist, is the same as one made of the tree."""
    package = str(ROOT / "packages" / name)
    uv("build", "--quiet", "--build-constraint", str(CONSTRAINTS), "--out-dir", str(dist), package)
    uv("build", "--quiet", "--build-constraint", str(CONSTRAINTS), "--wheel", "--out-dir", str(direct), package)
    of_sdist, of_tree = (read_contents(find_wheel(name, one)) for one in (dist, direct))
    if different := sorted(one for one in of_sdist.keys() | of_tree.keys() if of_sdist.get(one) != of_tree.get(one)):
        raise CheckError(f"gaudi-{name}: {', '.join(different[:5])} differ between the wheels of sdist and tree")
    licence = (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(find_wheel(name, dist)) as wheel:
        held = [one for one in wheel.namelist() if one.endswith("licenses/LICENSE")]
        if not held or wheel.read(held[0]) != licence:
            raise CheckError(f"gaudi-{name}: the wheel does not hold the licence of the project")


def check_alone(name: str, dist: Path, folder: Path) -> None:
    """Check a wheel with its declared dependencies: it imports, everything agrees, without a TensorFlow."""
    environment = Environment(folder).create()
    environment.install(dist, f"gaudi-{name}")
    environment.check()
    if found := environment.list_names() & TENSORFLOWS:
        raise CheckError(f"gaudi-{name} alone installs {', '.join(found)}; a TensorFlow is for the user to choose")
    environment.run(f"import gaudi_{name}", folder)
    for program in list_programs(folder, name):
        call([str(folder / "bin" / program), "--help"], folder)
    say(f"{name}: alone")


def check_extra(name: str, extra: str, dist: Path, folder: Path) -> None:
    """Check that an extra brings its libraries, and one TensorFlow only if its name says so."""
    environment = Environment(folder).create()
    said = environment.install(
        dist, f"gaudi-{name}[{extra}]", dry=extra in ONLY_RESOLVED, pinned=(name, extra) not in UNPINNED
    )
    if extra in ONLY_RESOLVED:
        found = {word.lower() for word in re.findall(r"^ \+ ([\w.-]+)==", said, re.MULTILINE)} & TENSORFLOWS
    else:
        environment.check()
        found = environment.list_names() & TENSORFLOWS
        environment.run(f"import {IMPORTS.get((name, extra), f'gaudi_{name}')}", folder)
    if len(found) != (extra in WITH_TENSORFLOW):
        raise CheckError(f"gaudi-{name}[{extra}] installs {', '.join(sorted(found)) or 'no TensorFlow'}")
    say(f"{name}[{extra}]")


def check_no_other_tensorflow(name: str, dist: Path, folder: Path) -> None:
    """Beside a TensorFlow that is there, of whatever distribution, no other one is installed."""
    environment = Environment(folder).create()
    environment.install(dist, make_vendor_build(folder.parent / "vendor"))
    before = environment.list_names()
    environment.install(dist, f"gaudi-{name}")
    if other := (environment.list_names() - before) & TENSORFLOWS:
        raise CheckError(f"gaudi-{name} installs {', '.join(other)} beside a vendor's TensorFlow")
    say(f"{name}: beside a vendor's build")


def make_vendor_build(folder: Path) -> str:
    """Build an empty distribution that stands for a vendor's TensorFlow; return its wheel."""
    wheels = folder / "wheels"
    if not wheels.exists():
        (folder / "tensorflow").mkdir(parents=True)
        (folder / "tensorflow" / "__init__.py").write_text('__version__ = "2.15.0"\n')
        (folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["hatchling>=1.27,<2"]\nbuild-backend = "hatchling.build"\n'
            '[project]\nname = "vendor-tensorflow"\nversion = "2.15.0"\n'
            '[tool.hatch.build.targets.wheel]\npackages = ["tensorflow"]\n'
        )
        uv("build", "--quiet", "--build-constraint", str(CONSTRAINTS), "--wheel", "--out-dir", str(wheels), str(folder))
    return str(next(wheels.glob("*.whl")))


def run_examples(name: str, extra: str, commands: Sequence[str], dist: Path, folder: Path) -> None:
    """Run the Python of a README, as a reader would paste it, with the package and its dependencies."""
    environment = Environment(folder).create()
    environment.install(dist, f"gaudi-{name}[{extra}]" if extra else f"gaudi-{name}")
    for arguments in commands:
        call([str(folder / "bin" / "gaudi-datasets"), *arguments.split()], folder)
    text = (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if not blocks:
        raise CheckError(f"packages/{name}/README.md has no example in Python")
    environment.run("\n".join(blocks), folder)
    say(f"{name}: {len(blocks)} examples of the README")


def check_ranges(dist: Path, folder: Path) -> None:
    """Check the version ranges of our packages at both ends: the first and the last work, a later one is refused."""
    for name in NAMES:
        for needed in list_needed(find_wheel(name, dist)):
            (lowest,) = (one.version for one in needed.specifier if one.operator == ">=")
            (beyond,) = (one.version for one in needed.specifier if one.operator == "<")
            other = needed.name.removeprefix("gaudi-")
            for version, fits in ((lowest, True), (last_before(beyond), True), (beyond, False)):
                check_version(name, other, version, fits, dist, folder)
        say(f"{name}: versions of ours that it needs, at both ends")


def check_clone(folder: Path) -> None:
    """Check that the README's first command installs the packages of this clone, with their programs."""
    environment = Environment(folder).create()
    command = ("pip", "install", "--quiet", "-p", str(folder), "--reinstall", "-r", "requirements.txt")
    call([sys.executable, "-m", "uv", *command], ROOT)
    environment.check()
    if missing := ({f"gaudi-{name}" for name in NAMES} | {"tensorflow-cpu"}) - environment.list_names():
        raise CheckError(f"requirements.txt does not install {', '.join(sorted(missing))}")
    call([str(folder / "bin" / "ssd_train"), "--help"], folder)
    environment.run("import onnx, onnxruntime, tf2onnx", folder)  # its commands export
    say("the clone, by requirements.txt")


def last_before(version: str) -> str:
    """Return a version of the series before: 0.1.999 for 0.2."""
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) - 1}.999"


def check_version(name: str, other: str, version: str, fits: bool, dist: Path, folder: Path) -> None:
    """Install a package beside another one of ours in a version, and import it; or have that refused."""
    wheels = make_version(other, version, folder / "versions" / f"{other}-{version}")
    environment = Environment(folder / "ranges").create()
    pins = (f"gaudi-{name}", f"gaudi-{other}=={version}")
    try:
        environment.install(dist, "--find-links", str(wheels), *pins, dry=not fits)
    except CheckError:
        if fits:
            raise
        return
    if not fits:
        raise CheckError(f"gaudi-{name} takes gaudi-{other} {version}, which is beyond what it says")
    environment.run(f"import gaudi_{name}", folder)


def make_version(name: str, version: str, folder: Path) -> Path:
    """Make the wheel of a package as if it were of that version; return its folder."""
    if not folder.exists():
        shutil.copytree(ROOT / "packages" / name, folder / "tree", ignore=shutil.ignore_patterns("tests"))
        path = folder / "tree" / "pyproject.toml"
        path.write_text(re.sub(r'^version = ".*"$', f'version = "{version}"', path.read_text(), flags=re.MULTILINE))
        arguments = ("--build-constraint", str(CONSTRAINTS), "--wheel", "--out-dir", str(folder))
        uv("build", "--quiet", *arguments, str(folder / "tree"))
    return folder


def find_wheel(name: str, folder: Path) -> Path:
    """Find the one wheel of a package in a folder."""
    (wheel,) = folder.glob(f"gaudi_{name}-*.whl")
    return wheel


def read_contents(wheel: Path) -> dict[str, int]:
    """Checksums of the files in a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def read_metadata(wheel: Path) -> dict[str, list[str]]:
    """Read the fields of a wheel's metadata that are lists."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        message = HeaderParser().parsestr(archive.read(name).decode())
    return {field: message.get_all(field) or [] for field in ("Requires-Dist", "Provides-Extra")}


def list_extras(wheel: Path) -> list[str]:
    """List the extras of a wheel."""
    return read_metadata(wheel)["Provides-Extra"]


def list_needed(wheel: Path) -> Iterator[Requirement]:
    """List the requirements of a wheel on our packages, without its extras."""
    for text in read_metadata(wheel)["Requires-Dist"]:
        requirement = Requirement(text)
        if requirement.name.startswith("gaudi-") and requirement.marker is None:
            yield requirement


def list_programs(folder: Path, name: str) -> list[str]:
    """List the programs that a package brought into an environment."""
    code = (
        "from importlib import metadata\n"
        f"found = metadata.distribution('gaudi-{name}').entry_points\n"
        "print(*(one.name for one in found if one.group == 'console_scripts'))"
    )
    return call([str(folder / "bin" / "python"), "-I", "-c", code]).split()


def say(text: str) -> None:
    """Tell how far it is."""
    print(f"ok  {text}", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve())
    except CheckError as error:
        sys.exit(f"error: {error}")
