"""Who may import whom: the arrows between the packages, no cycles, no module that is a drawer for everything.

import-linter says less: it has no rule for one module alone that may import a vendor's part, nor one for names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.imports import ARROWS, find_faults, read_modules

ROOT = Path(__file__).resolve().parents[1]


def test_the_project_keeps_to_the_arrows() -> None:
    modules = read_modules(ROOT)
    assert {module.package for module in modules.values()} == set(ARROWS)
    assert find_faults(modules) == []


CLEAN = {
    "ops/src/gaudi_ops/__init__.py": "from gaudi_ops import boxes\n",
    "ops/src/gaudi_ops/boxes.py": "import numpy\n",
    "ops/src/gaudi_ops/tf/__init__.py": "import tensorflow\nfrom gaudi_ops import boxes\n",
    "datasets/src/gaudi_datasets/__init__.py": "def f():\n    from gaudi_ops.boxes import g\n",
    "distributed/src/gaudi_distributed/habana.py": "import habana_frameworks.tensorflow\n",
    "distributed/src/gaudi_distributed/horovod.py": "import horovod.tensorflow\n",
    "distributed/src/gaudi_distributed/mxnet.py": "import horovod.mxnet\n",
}


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        (
            "ops/src/gaudi_ops/a.py",
            "import gaudi_models.ssd",
            "gaudi_ops.a imports gaudi_models",
        ),
        (
            "datasets/src/gaudi_datasets/a.py",
            "def f():\n    from gaudi_distributed import devices",
            "gaudi_datasets.a imports gaudi_distributed",
        ),
        (
            "apps/src/gaudi_apps/ssd/utils.py",
            "",
            "gaudi_apps.ssd.utils is named utils",
        ),
        (
            "models/src/gaudi_models/common/a.py",
            "",
            "gaudi_models.common.a is named common",
        ),
        (
            "apps/src/gaudi_apps/a.py",
            "import horovod.mxnet",
            "gaudi_apps.a imports horovod",
        ),
        (
            "distributed/src/gaudi_distributed/a.py",
            "def f():\n    import habana_frameworks",
            "habana_frameworks is imported by gaudi_distributed.a, gaudi_distributed.habana",
        ),
        (
            "distributed/src/gaudi_distributed/a.py",
            "import horovod.mxnet as hvd",
            "horovod.mxnet is imported by gaudi_distributed.a, gaudi_distributed.mxnet",
        ),
        (
            "ops/src/gaudi_ops/nms.py",
            "def f():\n    import tensorflow",
            "gaudi_ops.nms imports TensorFlow",
        ),
        (
            "ops/src/gaudi_ops/nms.py",
            "from gaudi_ops.tf import masks",
            "gaudi_ops.nms imports gaudi_ops.tf",
        ),
        (
            "ops/src/gaudi_ops/boxes.py",
            "from . import tf",
            "import cycle: gaudi_ops.boxes -> gaudi_ops.tf -> gaudi_ops.boxes",
        ),
        (
            "ops/src/gaudi_ops/boxes.py",
            "import gaudi_ops",
            "import cycle: gaudi_ops -> gaudi_ops.boxes -> gaudi_ops",
        ),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, path: str, text: str, fault: str) -> None:
    for name, content in (CLEAN | {path: text}).items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert any(each.startswith(fault) for each in find_faults(read_modules(tmp_path)))


def test_a_clean_tree_has_no_faults(tmp_path: Path) -> None:
    for name, content in CLEAN.items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert find_faults(read_modules(tmp_path)) == []
