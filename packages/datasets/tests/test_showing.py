from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.detection.coco import parse_coco
from gaudi_datasets.detection.sources import CocoSource
from gaudi_datasets.drawing import class_colour
from gaudi_datasets.errors import DataError, FlagError, UnsafeError
from gaudi_datasets.showing import choose_images, class_names_of, draw_example, find_images, write_images


def encode(width: int = 90, height: int = 60) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (120, 130, 140)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> CocoSource:
    """Twenty images; a cat on each, and on the first a crowd of dogs besides."""
    (tmp_path / "images").mkdir()
    for number in range(20):
        (tmp_path / "images" / f"{number:03d} a.jpg").write_bytes(encode())
    boxes = [(number, number, 1, [20, 10, 50, 40], 0) for number in range(20)] + [(20, 0, 2, [1, 1, 8, 8], 1)]
    document = {
        "images": [{"id": n, "file_name": f"{n:03d} a.jpg", "height": 60, "width": 90} for n in range(20)],
        "annotations": [
            {"id": n, "image_id": image, "category_id": category, "bbox": box, "iscrowd": crowd}
            for n, image, category, box, crowd in boxes
        ],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }
    return CocoSource(parse_coco(document, tmp_path / "gt.json"), tmp_path / "images", keep_empty=True)


@pytest.fixture
def classes(tmp_path: Path) -> FolderSource:
    for name in ("cat/a.jpg", "dog/b.jpg", "dog/c.jpg"):
        (tmp_path / "classes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "classes" / name).write_bytes(encode())
    return FolderSource(tmp_path / "classes")


def count_colour(path: Path, label: int, columns: slice = slice(None)) -> int:
    with Image.open(path) as image:
        difference = np.asarray(image).astype(int)[:, columns] - class_colour(label)
    return int((np.abs(difference).max(axis=2) < 40).sum())


def test_images_are_chosen_by_seed_and_in_order(source: CocoSource) -> None:
    chosen = choose_images(source, 5, 1)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 5
    assert choose_images(source, 5, 1) == chosen != choose_images(source, 5, 2)
    assert choose_images(source, 100, 1) == list(range(20))


def test_images_are_found_by_id() -> None:
    assert find_images([30, 10], [10, 20, 30], "set") == [2, 0]
    with pytest.raises(FlagError, match=r"--image_ids 11: .* 3 others"):
        find_images([10, 11], [10, 20, 30], "set")


def test_examples_are_drawn_with_boxes_or_label(source: CocoSource, classes: FolderSource) -> None:
    assert list(class_names_of(source)) == list(class_names_of(classes)) == ["cat", "dog"]
    drawn = draw_example(source.read(0), class_names_of(source))
    assert drawn.width == 640
    found = (np.asarray(drawn) == class_colour(1)).all(axis=2).sum()
    assert found > 1000
    assert (np.asarray(drawn) == class_colour(2)).all(axis=2).sum() > 100
    assert draw_example(classes.read(0), class_names_of(classes)).width == 640


def test_images_are_written_together_and_not_over_others(source: CocoSource, tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = write_images(source, [0, 17], out)
    assert [path.name for path in written] == ["0-000_a.jpg", "17-017_a.jpg"]
    assert sorted(out.iterdir()) == sorted(written)
    assert count_colour(written[0], 1) > 1000
    with pytest.raises(UnsafeError, match=r"17-017_a\.jpg: is there already"):
        write_images(source, [3, 17], out)
    assert sorted(out.iterdir()) == sorted(written)
    write_images(source, [3, 17], out, overwrite=True)
    assert len(list(out.iterdir())) == 3


def test_names_that_are_taken_or_too_long_are_changed(source: CocoSource, tmp_path: Path) -> None:
    example = replace(source.read(0), file_name="n" * 300 + ".jpg")
    source.read = lambda index: example  # type: ignore[method-assign]
    written = write_images(source, [0, 1], tmp_path / "out")
    assert len({path.name for path in written}) == 2
    assert sorted((tmp_path / "out").iterdir()) == sorted(written)


def test_a_damaged_image_leaves_nothing(source: CocoSource, tmp_path: Path) -> None:
    (tmp_path / "images" / "002 a.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match=r"002 a\.jpg: cannot be decoded"):
        write_images(source, [1, 2], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.posix
def test_a_full_disk_is_told_with_the_file(source: CocoSource, tmp_path: Path) -> None:
    import resource  # which Windows lacks

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            write_images(source, [3], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(caught.value.filename).name == "3-003_a.jpg"
    assert not (tmp_path / "out").exists()


def test_a_damaged_image_of_a_record_is_named(source: CocoSource) -> None:
    example = source.read(3)
    for content in (b"", encode()[:300]):
        with pytest.raises(DataError) as caught:
            draw_example(replace(example, encoded=content), class_names_of(source))
        assert (caught.value.exit_status, caught.value.record) == (65, "003 a.jpg")


@pytest.mark.costly
def test_augmented_images_are_those_of_training(source: CocoSource, tmp_path: Path) -> None:
    """More than one batch of them, a stored image and three epochs in each file, with boxes on all."""
    written = write_images(source, range(20), tmp_path / "out", augmented=True, seed=3)
    assert len(written) == 20
    with Image.open(written[0]) as image:
        width, height = image.size
    assert height > 640
    edges = [width - 648 * part for part in range(3, -1, -1)]  # each epoch is 640 wide, after a gap
    for start, stop in itertools.pairwise(edges):
        assert count_colour(written[4], 1, slice(start, stop)) > 300
        assert count_colour(written[0], 2, slice(start, stop)) == 0  # crowds are no targets
    again = write_images(source, [4], tmp_path / "again", augmented=True, seed=3)
    assert again[0].read_bytes() == written[4].read_bytes()
    other = write_images(source, [4], tmp_path / "other", augmented=True, seed=4)
    assert other[0].read_bytes() != written[4].read_bytes()


def test_class_images_are_augmented_too(classes: FolderSource, tmp_path: Path) -> None:
    written = write_images(classes, [0, 1, 2], tmp_path / "out", augmented=True)
    assert sorted(path.name for path in written) == ["0-a.jpg", "1-b.jpg", "2-c.jpg"]
    with Image.open(written[0]) as image:
        width, height = image.size
        middle = np.asarray(image)[height // 2]
    assert height > 640
    assert np.abs(middle[[100, width - 100]].astype(int) - [120, 130, 140]).max() <= 4  # the means were added again


def test_images_of_16_bits_look_as_training_gets_them(tmp_path: Path) -> None:
    """The upper 8 bits, from files and from records, which may hold what another program wrote."""
    values = np.linspace(0, 0xFFFF, 60 * 90).astype(np.uint16).reshape(60, 90)
    path = tmp_path / "classes" / "cell" / "a.png"
    path.parent.mkdir(parents=True)
    Image.fromarray(values).save(path)
    source = FolderSource(tmp_path / "classes")
    stored = replace(source.read(0), encoded=path.read_bytes())
    (written,) = write_images(source, [0], tmp_path / "shown")
    with Image.open(written) as image:
        shown = [np.asarray(image.convert("L"), int), np.asarray(draw_example(stored, ["cell"]).convert("L"), int)]
    of_training = np.asarray(Image.fromarray((values >> 8).astype(np.uint8)).resize((640, 427)), int)
    for pixels in shown:
        assert pixels.shape[1] == 640
        assert np.abs(pixels[-427:] - of_training).mean() < 3
