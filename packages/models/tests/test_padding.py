from __future__ import annotations

import pytest

from gaudi_models.padding import PADDING_RULES, find_rule


def test_conventions_differ() -> None:
    assert len({tuple(rule.items()) for rule in PADDING_RULES.values()}) == len(PADDING_RULES)
    assert find_rule("same_pool") == {"stem": "symmetric", "convolution": "symmetric", "pool": "same"}


def test_a_convention_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="padding is 'both'"):
        find_rule("both")  # type: ignore[arg-type]
