from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gaudi_ops.errors import GaudiError, require_choice


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "is 3"),
        ({"flag": "--seed", "field": "size"}, "is 3"),
        ({"path": Path("data") / "a.json"}, "data/a.json: is 3"),
        ({"record": 7}, "7: is 3"),
        ({"path": "a.json", "record": "line 7", "remedy": "give 1"}, "a.json: line 7: is 3; give 1"),
        ({"remedy": "give 1"}, "is 3; give 1"),
    ],
)
def test_an_error_is_one_line_of_its_parts(fields: dict[str, Any], line: str) -> None:
    error = GaudiError("is 3", **fields)
    assert str(error) == line
    assert error.exit_status == 70
    found = {name: getattr(error, name) for name in ("flag", "path", "record", "field", "remedy")}
    expected = {name: None if value is None else str(value) for name, value in (dict.fromkeys(found) | fields).items()}
    assert found == expected


def test_an_error_without_a_message_has_its_parts() -> None:
    assert str(GaudiError(path="a.json")) == "a.json"
    assert str(GaudiError()) == ""


def test_an_argument_is_one_of_the_choices() -> None:
    require_choice("form", "plain", ("plain", "mme"))
    with pytest.raises(ValueError, match="plain, mme"):
        require_choice("form", "other", ("plain", "mme"))
