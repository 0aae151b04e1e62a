from __future__ import annotations

import pytest

from gaudi_models.architectures import SSDArchitecture, measure_ssd


@pytest.mark.costly
@pytest.mark.parametrize(
    "architecture", [SSDArchitecture(), SSDArchitecture("resnet18_quarter", 512), SSDArchitecture("resnet50", 300)]
)
def test_parameters_are_those_of_the_network(architecture: SSDArchitecture) -> None:
    from gaudi_models.ssd import build_ssd

    model = build_ssd(4, depth=architecture.depth, width=architecture.width, spec=architecture.spec)
    counted = sum(variable.shape.num_elements() for variable in model.trainable_variables)
    assert measure_ssd(3, architecture)[0] == counted


def test_coco_network() -> None:
    assert measure_ssd(80) == (19972534, 23071128)


def test_what_is_computed_again_is_not_kept() -> None:
    """The begins of blocks and levels are kept, and all that levels and heads compute, which is more than any block."""
    begins = 4 * 64 * 75**2 + 4 * 128 * 38**2 + 6 * 256 * 38**2
    assert measure_ssd(80, recompute=True) == (19972534, begins + 2942552)
