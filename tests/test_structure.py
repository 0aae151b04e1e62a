"""`tools/structure.py` finds what is planted, for each of its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools import structure

ROOT = Path(__file__).resolve().parents[1]
APPS = "packages/apps/src/gaudi_apps"
TRAIN = f"{APPS}/ssd_train.py"
TREE = {
    f"{APPS}/__init__.py": "",
    TRAIN: "from gaudi_apps.loop import run\n\n\ndef main():\n    run()\n",
    f"{APPS}/loop.py": "class Task:\n    def train_step(self): ...\n\n\n\ndef run():\n    Task().train_step()\n",
    "packages/apps/tests/test_loop.py": "def test_it():\n    assert 1\n",
    "README.md": "Run `ssd_train`.\n",
}
PATH = [f"{TRAIN}:main", f"{APPS}/loop.py:run", f"{APPS}/loop.py:Task.train_step"]
LONG = "def f():\n" + '    """Doc.\n\n    More.\n    """\n' + "    x = 1\n" * 60


def write_tree(root: Path, files: dict[str, str], path: list[str] = PATH) -> Path:
    for name, text in (TREE | files).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "tools").mkdir(exist_ok=True)
    (root / "tools" / "training_paths.json").write_text(json.dumps({"ssd_train": path}))
    return root


def measure(root: Path) -> dict[str, int]:
    return {figure.name: figure.value for figure in structure.measure(root)}


def measure_named(root: Path, begin: str) -> int:
    """Measure the one figure whose name begins so, as `--show` looks for it."""
    (value,) = (value for name, value in measure(root).items() if name.startswith(begin))
    return value


CLEAN = {
    "calls from main to the train step": 2,
    "files of these calls": 2,
    "lambdas and calls by table among them": 0,
    "modules of gaudi_apps": 3,
    "modules of gaudi_distributed": 0,
    "entries at the top of gaudi_apps": 3,
    "most modules in one folder": 3,
    "modules of one importer, below 80 lines": 1,
    "imports on the longest path in gaudi_apps": 1,
    "source lines of the packages": 12,
    "files above 500 lines": 0,
    "functions above 60 lines": 0,
    "docstrings that begin with What, How or Whether, in sources": 0,
    "docstrings that begin with What, How or Whether, in tests and tools": 0,
    "dataclasses and protocols": 0,
    "density of dataclasses and protocols, in 10,000 lines": 0,
    "former words of the glossary": 0,
    "tests that assert four or more words of prose": 0,
    "lines of gaudi_apps that name mxnet elsewhere": 0,
}


def test_figures_of_a_small_tree(tmp_path: Path) -> None:
    assert measure(write_tree(tmp_path, {})) == CLEAN


def test_each_figure_has_a_limit() -> None:
    assert json.loads((ROOT / structure.LIMITS).read_text()).keys() == CLEAN.keys()


@pytest.mark.parametrize(
    ("name", "text", "figure", "value"),
    [
        (f"{APPS}/more.py", "", "modules of gaudi_apps", 4),
        (f"{APPS}/more.py", "", "entries", 4),
        ("packages/distributed/src/gaudi_distributed/one.py", "", "modules of gaudi_distributed", 1),
        (f"{APPS}/more.py", "", "most modules", 4),
        (f"{APPS}/more.py", "from gaudi_apps import ssd_train", "modules of one", 2),
        (f"{APPS}/more.py", "from gaudi_apps import ssd_train", "imports", 2),
        (f"{APPS}/more.py", "if TYPE_CHECKING:\n    from gaudi_apps import ssd_train", "imports", 1),
        (f"{APPS}/more.py", "x = 1\n" * 500, "source lines", 512),
        (f"{APPS}/more.py", "x = 1\n" * 500, "files above", 0),
        (f"{APPS}/more.py", "x = 1\n" * 501, "files above", 1),
        ("tools/more.py", "x = 1\n" * 501, "files above", 1),
        ("tools/more.py", "x = 1\n" * 501, "source lines", 12),
        ("tests/test_more.py", "x = 1\n" * 501, "files above", 0),
        (f"{APPS}/more.py", LONG, "functions", 1),
        (f"{APPS}/more.py", LONG.replace("    x = 1\n", "", 1), "functions", 0),
        (f"{APPS}/more.py", "@dataclass(frozen=True)\nclass One: ...", "dataclasses", 1),
        (f"{APPS}/more.py", "@dataclasses.dataclass\nclass One: ...", "dataclasses", 1),
        (f"{APPS}/more.py", "class One(Protocol[T]): ...", "dataclasses", 1),
        (f"{APPS}/more.py", "class One(Protocol): ..." + "\n" * 9998, "density", 1),
        (f"{APPS}/more.py", "class One(Protocol): ..." + "\n" * 9000, "density", 2),
        (f"{APPS}/more.py", "from gaudi_apps import mxnet", "lines of", 1),
        (f"{APPS}/mxnet/more.py", "import mxnet", "lines of", 0),
    ],
)
def test_a_planted_module_is_counted(tmp_path: Path, name: str, text: str, figure: str, value: int) -> None:
    assert measure_named(write_tree(tmp_path, {name: text}), figure) == value


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        (f"{APPS}/more.py", '"""How it works."""', [1, 0]),
        ("tests/more.py", 'class One:\n    """Whether it is."""', [0, 1]),
        (f"{APPS}/more.py", '"""Work."""', [0, 0]),
    ],
)
def test_a_docstring_that_asks_is_counted(tmp_path: Path, name: str, text: str, values: list[int]) -> None:
    figures = structure.measure_docstrings(structure.Sources(write_tree(tmp_path, {name: text})))
    assert [figure.value for figure in figures] == values


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        (f"{APPS}/more.py", "class Wishes: ...", 1),
        (f"{APPS}/more.py", "find_wishes()", 1),
        (f"{APPS}/more.py", "# a rehearsal", 1),
        (f"{APPS}/more.py", "Found = 1\nfound = 2", 1),
        (f"{APPS}/more.py", "# Found in fields", 0),
        (f"{APPS}/more.py", "def f(commits): ...", 1),
        ("packages/ops/src/gaudi_ops/more.py", "def f(commits): ...", 0),
        (f"{APPS}/more.py", "def mode_of(): ...\nmode_of()", 1),
        (f"{APPS}/more.py", "folder.own(path)\nown = 1", 1),
        (f"{APPS}/more.py", "from gaudi_apps.loop import make_recipe", 1),
        (f"{APPS}/more.py", "from gaudi_apps.loop import Recipe", 0),
        (f"{APPS}/more.py", "RECIPE_CACHE = recipe_version", 0),
        (f"{APPS}/more.py", "folder / 'pictures' / row['facts']", 0),
        ("docs/more.md", "The pictures of `Keeper`.\n", 2),
        ("docs/more.md", "Goalkeeper's truncated fact.\n", 0),
        ("docs/more.md", "Aside from others.\n", 0),
    ],
)
def test_a_former_word_is_found(tmp_path: Path, name: str, text: str, count: int) -> None:
    assert measure_named(write_tree(tmp_path, {name: text}), "former words") == count


def test_asserted_prose_is_found(tmp_path: Path) -> None:
    """Of the functions in the file, those named so are found, and no others."""
    text = (ROOT / "tests" / "data" / "prose" / "tests.txt").read_text()
    sources = structure.Sources(write_tree(tmp_path, {"tests/test_more.py": text}))
    (figure,) = structure.measure_prose(sources)
    assert figure.value == 4
    assert all(": test_found_" in line for line in figure.found)
    assert text.count("def test_found_") == figure.value


@pytest.mark.parametrize(
    ("loop", "path", "count"),
    [
        ("def run(task):\n    task.train_step()\n\n\ndef train_step(): ...", ["run", "train_step"], 0),
        ("def run(modes):\n    modes['train']()\n\n\ndef train_step(): ...", ["run", "train_step"], 1),
        ("def run():\n    call(lambda: train_step())\n\n\ndef train_step(): ...", ["run", "<lambda>", "train_step"], 1),
        ("def run():\n    Task(1)\n\n\nclass Task:\n    def __init__(self): ...", ["run", "Task.__init__"], 0),
    ],
)
def test_a_call_that_is_not_plain_is_found(tmp_path: Path, loop: str, path: list[str], count: int) -> None:
    functions = [f"{TRAIN}:main", *(f"{APPS}/loop.py:{name}" for name in path)]
    tree = write_tree(tmp_path, {f"{APPS}/loop.py": loop}, functions)
    assert measure_named(tree, "lambdas") == count
    assert measure_named(tree, "calls from main") == len(path)


def test_a_path_that_the_sources_no_longer_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = write_tree(tmp_path, {}, [*PATH[:2], f"{APPS}/loop.py:Task.gone"])
    assert structure.main(["--root", str(tree)]) == 1
    assert "loop.py:Task.gone" in capsys.readouterr().err


def test_a_figure_above_its_limit_fails_and_limits_only_fall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, file = write_tree(tmp_path, {}), tmp_path / structure.LIMITS
    limits = {name: {"target": value, "limit": value} for name, value in CLEAN.items()}
    limits["modules of gaudi_apps"] = {"target": 1, "limit": 9}
    limits["functions above 60 lines"] = {"target": 9, "limit": 9}
    limits["dataclasses and protocols"]["limit"] = -1
    file.write_text(json.dumps(limits))
    assert structure.main(["--root", str(tree)]) == 1
    out, err = capsys.readouterr()
    assert err.split(": ")[1] == "dataclasses and protocols"
    assert len(err.splitlines()) == 1
    (row,) = (line for line in out.splitlines() if line.startswith("modules of gaudi_apps"))
    assert row.split()[-5:] == ["3", "1", "9", "not", "yet"]
    assert structure.main(["--root", str(tree), "--tighten"]) == 1
    tightened = json.loads(file.read_text())
    assert tightened["modules of gaudi_apps"] == {"target": 1, "limit": 3}
    assert tightened["functions above 60 lines"] == {"target": 9, "limit": 9}
    assert tightened["dataclasses and protocols"]["limit"] == -1


def test_a_figure_without_a_limit_fails() -> None:
    figures = [structure.Figure("one", 1)]
    assert [fault.partition(":")[0] for fault in structure.check(figures, {"two": {"target": 1, "limit": 1}})] == [
        "one",
        "two",
    ]


def test_what_was_counted_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = write_tree(tmp_path, {})
    (tmp_path / structure.LIMITS).write_text("{}")
    assert structure.main(["--root", str(tree), "--show", "imports on"]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["gaudi_apps.ssd_train", "gaudi_apps.loop"]
