"""YAML that comes from outside: plain values only, in a file of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gaudi_datasets.errors import DataError, MissingInputError

_MOST_BYTES = 2**24


def load_yaml(path: Path) -> Any:
    """Read a YAML file, without anchors and references, by which a small file becomes a huge one.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is a folder, it is larger than 16 MiB, or it is not YAML of plain values.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give a YAML file")
    if not path.exists():
        raise MissingInputError(f"{path}: there is no such file; give the path of a YAML file")
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"{path}: has {path.stat().st_size} bytes; a YAML file may have {_MOST_BYTES}")
    try:
        loader = _PlainLoader(path.read_bytes())
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError:
        raise DataError(f"{path}: is nested too deeply; write plain lists and mappings") from None
    except (yaml.YAMLError, ValueError) as error:
        raise DataError(f"{path}: is not YAML of plain values: {' '.join(str(error).split())}; correct it") from None


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "found a reference (*)", mark)
        return super().compose_node(parent, index)
