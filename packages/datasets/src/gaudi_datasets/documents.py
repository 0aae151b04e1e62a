"""Read JSON and YAML files from outside, and take typed fields out of their records, with every fault named."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from gaudi_datasets.errors import DataError, FlagError, GaudiError, MissingInputError
from gaudi_ops.files import MOST_TEXT_BYTES, read_file, read_text

Parsed = TypeVar("Parsed")

INT64_MAX = 2**63 - 1
_MOST_BYTES = 2**34  # of annotations; those of the largest public data sets have 6 GB
_MOST_DIGITS = 1000  # of an integer in YAML
_SHOWN = 60  # characters of a wrong value that a message shows
_REMEMBERED = 1000  # faults that are kept with their message


class RecordError(GaudiError):
    """A fault of one record; `Faults` adds the file and the record."""


class FaultyRecordsError(DataError):
    """Records of a file, or entries of a folder, have faults.

    Its message and fields are those of the first fault; `errors` holds those of the first thousand.
    """

    def __init__(self, errors: Sequence[DataError], count: int) -> None:
        first = errors[0]
        message, remedy = str(first.args[0]), first.remedy
        more = f" (1 of {count} faults)" if count > 1 else ""
        super().__init__(
            message if remedy else message + more,
            path=first.path,
            record=first.record,
            field=first.field,
            remedy=remedy and remedy + more,
        )
        self.errors, self.count = errors, count

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors, self.count)


MASKED = "has_mask"
"""Key that stands for a mask that was left out."""


def load_json(path: Path, *, mark_masks: bool = False) -> Any:
    """Read a JSON file, without the masks (`segmentation`) of annotations, which are most of a COCO file's memory.

    With `mark_masks`, an annotation that had one has the key `MASKED`.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is a folder, it is empty, or it is not JSON (NaN and Infinity are not).
    """
    _require_file(path, "JSON")
    content = read_file(path, limit=_MOST_BYTES)
    if not content.strip():
        raise DataError("is empty", path=path, remedy="give a JSON file")
    try:
        return json.loads(
            content, object_hook=_mark_mask if mark_masks else _drop_masks, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise DataError(
            "is nested too deeply to be JSON of annotations", path=path, remedy="give another file"
        ) from None
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", path=path, remedy="write or download it again") from None


CHECKSUM = "sha256"
"""Key by which a document of ours holds the SHA-256 of all else in it."""


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON document with its checksum; whatever form it is written in, it stays the same."""
    content = {name: value for name, value in document.items() if name != CHECKSUM}
    text = json.dumps(content, sort_keys=True)
    return {**content, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def require_seal(document: Any, path: str | Path, *, needed: bool = True) -> None:
    """Compare a JSON document with its checksum; one of an earlier release has none, which is allowed if not `needed`.

    Raises:
        DataError: they differ, it has none, or it is no object.
    """
    is_sealed = isinstance(document, Mapping) and seal(document)[CHECKSUM] == document.get(CHECKSUM)
    if not is_sealed and (needed or not isinstance(document, Mapping) or CHECKSUM in document):
        raise DataError(
            "was changed or is damaged", path=path, field=CHECKSUM, remedy="copy it again, or convert the data again"
        )


def _require_file(path: Path, kind: str) -> None:
    if path.is_dir():
        raise DataError("is a folder", path=path, remedy=f"give a {kind} file")
    if not path.exists():
        raise MissingInputError("there is no such file", path=path, remedy=f"give the path of a {kind} file")


def is_there(path: Path, check: Callable[[Path], bool] = Path.exists) -> bool:
    """Tell if a path is there; one that is too long for a file is not."""
    try:
        return check(path)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def _drop_masks(value: dict[str, Any]) -> dict[str, Any]:
    if "image_id" in value and "category_id" in value:  # elsewhere it may be a name that somebody gave
        value.pop("segmentation", None)
    return value


def _mark_mask(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("segmentation") and "segmentation" not in _drop_masks(value):
        value[MASKED] = True
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


@dataclass(frozen=True)
class Record:
    """One record of a list, whose fields are taken with the type and range that they must have.

    Each method raises RecordError when the field is missing or breaks the rule.
    """

    fields: Mapping[str, Any]

    def integer(self, name: str, *, low: int = 0, high: int = INT64_MAX, default: int | None = None) -> int:
        """Take an integer in low..high; true and false are none."""
        value = self._take(name, default)
        is_whole = type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
        if not is_whole or not low <= value <= high:
            bound = f"of at least {low}" if high == INT64_MAX else f"in {low}..{high}"
            raise RecordError(f"{name} is {shorten(value)}; it must be an integer {bound}", field=name)
        return int(value)

    def number(self, name: str, *, default: float | None = None) -> float:
        """Take a finite number."""
        value = self._take(name, default)
        if not is_finite_number(value):
            raise RecordError(f"{name} is {shorten(value)}; it must be a finite number", field=name)
        return float(value)

    def text(self, name: str, *, default: str | None = None) -> str:
        """Take a text that is not empty (unless that is the default)."""
        value = self._take(name, default)
        if not isinstance(value, str) or not (value or value == default):
            raise RecordError(f"{name} is {shorten(value)}; it must be a text that is not empty", field=name)
        try:
            value.encode("utf-8", "surrogateescape")  # which a name of a file may need
        except UnicodeEncodeError:
            raise RecordError(f"{name} is {shorten(value)}, which holds half a character", field=name) from None
        return value

    def box_xywh(self, name: str) -> tuple[float, float, float, float]:
        """Take four finite numbers: left, top, width, height, in pixels."""
        value = self._take(name, None)
        if not isinstance(value, list | tuple) or len(value) != 4 or not all(map(is_finite_number, value)):
            raise RecordError(
                f"{name} is {shorten(value)}; it must be four finite numbers: x, y, width, height", field=name
            )
        x, y, width, height = map(float, value)
        return x, y, width, height

    def _take(self, name: str, default: object) -> Any:
        value = self.fields.get(name, default)
        if value is None:
            raise RecordError(f"{name} is missing", field=name, remedy="add it")
        return value


class Faults:
    """Remembers the first thousand faults of a file or a folder, and counts all."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.count = path, 0
        self.errors: list[DataError] = []

    def parse(self, name: str, records: object, parse: Callable[[Record], Parsed]) -> Iterator[Parsed]:
        """Parse each record of the list called `name`; a record with a fault is noted and left out.

        What is no list counts as an empty one.
        """
        kind = "category" if name == "categories" else name.removesuffix("s")
        listed: Sequence[Any] = records if isinstance(records, Sequence) and not isinstance(records, str) else []
        for position, record in enumerate(listed):
            try:
                if not isinstance(record, Mapping):
                    raise RecordError(f"is {shorten(record)}; it must be an object")
                yield parse(Record(record))
            except RecordError as fault:
                called = f"{name}[{position}]"
                if isinstance(record, Mapping) and record.get("id") is not None:
                    called = f"{kind} {shorten(record['id'])} ({called})"
                self.add(str(fault.args[0]), record=called, field=fault.field, remedy=fault.remedy)

    def add(self, message: str, **fields: Any) -> None:
        """Note a fault; see `DataError` for the fields."""
        self.count += 1
        if self.count <= _REMEMBERED:
            self.errors.append(DataError(message, path=self.path, **fields))

    def raise_any(self) -> None:
        """Raise FaultyRecordsError about the first fault, saying how many there are."""
        if self.count:
            raise FaultyRecordsError(self.errors, self.count)


def require_unique(class_names: Sequence[str]) -> None:
    """Raise FlagError for classes of which one is given twice."""
    twice = [name for name, count in Counter(class_names).items() if count > 1]
    if twice:
        raise FlagError(
            f"--class_names: {shorten(twice[0])} is given twice", flag="--class_names", remedy="give each class once"
        )


def is_finite_number(value: object) -> bool:
    """Return True for a number, NumPy's too (not a bool), that float64 can hold and that is finite."""
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        return False
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def shorten(value: object) -> str:
    """Return the value as JSON shows it, on one line and cut when it is long."""
    try:
        text = json.dumps(value, default=str)
    except TypeError:  # of keys of YAML, as dates are
        text = str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text, before which editors of Windows may have put a mark of UTF-8.

    Raises:
        DataError: it is not in UTF-8.
    """
    try:
        return read_text(path, encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"is no text in UTF-8 (byte {error.start})", path=path, remedy="write it again") from None


def load_yaml(path: Path) -> Any:
    """Read a YAML file, without anchors and references, by which a small file becomes a huge one.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is a folder, it is larger than 16 MiB, or it is not YAML of plain values.
    """
    _require_file(path, "YAML")
    content = read_file(path, limit=MOST_TEXT_BYTES)
    try:
        loader = _PlainLoader(content)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError:
        raise DataError("is nested too deeply", path=path, remedy="write plain lists and mappings") from None
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # of values
        raise DataError(
            f"is not YAML of plain values: {' '.join(str(error).split())}", path=path, remedy="correct it"
        ) from None


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "found a reference (*)", mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        """Refuse what Python cannot print, as of 4300 hexadecimal digits, and what takes minutes, as 1:1:1... does."""
        digits = self.construct_scalar(node)
        if len(digits) > _MOST_DIGITS:
            told = f"found an integer of {len(digits)} characters"
            raise yaml.constructor.ConstructorError(None, None, told, node.start_mark)
        return super().construct_yaml_int(node)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)
