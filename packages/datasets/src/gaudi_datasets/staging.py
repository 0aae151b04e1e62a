"""Output that is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staging_folder(output_dir: Path) -> Iterator[Path]:
    """A temporary folder inside `output_dir`, to write into and to rename from; it is gone afterwards.

    `output_dir` and its parents are made when they are not there, and go again when they end up empty.
    """
    made = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=output_dir) as folder:
            yield Path(folder)
    finally:
        for folder_made in made:
            with contextlib.suppress(OSError):  # not empty: the output is there
                folder_made.rmdir()
