from __future__ import annotations

import subprocess
import sys

import pytest

from gaudi_models.architectures import (
    RESNETS,
    SSD_BACKBONES,
    SSDArchitecture,
    Unit,
    count_parameters,
    list_convolutions,
)

# As published: torchvision's documentation of its models.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50": 25_028_904,
    "resnext101": 44_177_704,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_numbers_of_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert count_parameters(RESNETS[name], 1000) == parameters


@pytest.mark.parametrize(("name", "convolutions"), [("resnet18", 20), ("resnet50", 53), ("resnext101", 104)])
def test_convolutions_are_as_many_as_the_name_says(name: str, convolutions: int) -> None:
    """The depth counts the dense layer, and no projection."""
    assert len(list(list_convolutions(RESNETS[name]))) == convolutions


def test_sizes_and_work() -> None:
    convolutions = list(list_convolutions(RESNETS["resnet50"]))
    assert convolutions[0] == (Unit(64, 7, 2), 3, 112)
    assert convolutions[-1] == (Unit(2048, 1), 512, 7)
    multiplications = sum(unit.count_weights(channels) * side**2 for unit, channels, side in convolutions)
    assert multiplications == pytest.approx(4.09e9, rel=0.01)  # of version 1.5, at 224 x 224
    assert next(side for unit, _, side in list_convolutions(RESNETS["resnext50"], 65) if unit.groups > 1) == 17


def test_detectors_are_read_by_the_names_that_they_write() -> None:
    for backbone in SSD_BACKBONES:
        for image_size in (300, 512):
            one = SSDArchitecture(backbone, image_size)
            assert SSDArchitecture.from_name(one.name, one.image_size) == one
            assert one.spec.image_size == image_size


def test_files_without_the_names_are_of_the_first_detector() -> None:
    assert SSDArchitecture.from_name("", 0) == SSDArchitecture() == SSDArchitecture("resnet34", 300)


@pytest.mark.parametrize(("name", "size"), [("resnet50", 224), ("ssd_resnet101", 300), ("ssd_resnet34", 400)])
def test_other_networks_are_no_detectors(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=r"resnet34|300, 512"):
        SSDArchitecture.from_name(name, size)


def test_needs_no_tensorflow() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import gaudi_models.architectures as a; print(a.CLASSIFIERS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "'resnet50v2_keras'" in done.stdout
