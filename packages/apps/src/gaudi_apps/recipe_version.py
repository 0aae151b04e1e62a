"""The version of the training recipes, which a run keeps, so that it goes on after an update as it began.

A version changes what the same flags train. `run.json` and every checkpoint note it; what notes none is of version 1.

Version 2 trains as the original programs do. Version 1 differs from it:

- resnet_train: SGD keeps the rate outside of the velocity. The weight decay is always of half squares.
- resnext_train: the base rate is .256 in any case, the rate drops three times, and a new head is warmed up.
- Both: a piecewise rate drops one step earlier. All cycles of a cyclical rate have one height.
- ssd_train: a drop of the rate within the warm-up lowers what it rises to. A stretched drop is not cut off by rounding.
- ssd_mxnet_train: warm-up begins one step earlier, and epochs end before the step that sees their last image.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaudi_apps.run_folder import RunFolder

CURRENT = 2
SETTING = "recipe_version"


def find_recipe_version(folder: RunFolder, *, clean: bool = False) -> int:
    """Find the version of the run in a folder.

    Args:
        folder: of a run, or without one.
        clean: whether the run there is removed before a new one begins.

    Returns:
        the current version where no run goes on.

    Raises:
        RunChangedError: the run was begun by a newer release of this package.
        DataError: the record of the run cannot be read.
    """
    # Imported here, for asking a program for help needs no run.
    from gaudi_apps.run_folder import RunChangedError

    settings = None if clean else folder.read_settings()
    if settings is None:
        return CURRENT
    version = settings.get(SETTING, 1)
    if version not in range(1, CURRENT + 1):
        raise RunChangedError(
            f"{folder.folder}: the run there has {SETTING} {version!r}, and this release knows up to {CURRENT}; "
            "update gaudi-apps, or give another --model_dir"
        )
    return int(version)


def find_version_in(model_dir: str) -> int:
    """Find the version of the run in a folder by its path, see `find_recipe_version`."""
    if not Path(model_dir).exists():
        return CURRENT
    # Imported here, for it imports NumPy, and a plan without a run needs none.
    from gaudi_apps.run_folder import RunFolder

    return find_recipe_version(RunFolder(Path(model_dir)))


def note_version(version: int) -> dict[str, int]:
    """List what a run notes of its version: nothing of version 1, as its release did."""
    return {SETTING: version} if version > 1 else {}
