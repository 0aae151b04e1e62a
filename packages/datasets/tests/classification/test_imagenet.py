from __future__ import annotations

import io
import random
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.classification.imagenet import open_imagenet
from gaudi_datasets.classification.listed_files import PNG_FIX
from gaudi_datasets.classification.records import write_records
from gaudi_datasets.classification.sources import RecordSource
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.image_files import CMYK_FIX

Tar = Callable[[Mapping[str, bytes]], bytes]

SYNSETS = ("n01440764", "n02105855", "n03000247")
NAMES = [
    *("n01440764_10026.JPEG", "n01440764_2.JPEG", "n01440764_3.JPEG"),
    *("n02105855_2933.JPEG", "n02105855_7.JPEG"),
    *("n03000247_1.JPEG", "n03000247_11.JPEG", "n03000247_5.JPEG", "n03000247_9.JPEG"),
]


def test_tars_and_folders_give_the_same_images(imagenet_tars: Path, imagenet_folders: Path) -> None:
    order = list(range(9))
    random.Random(0).shuffle(order)
    tars, folders = (open_imagenet(root, "train") for root in (imagenet_tars, imagenet_folders))
    assert tars.fingerprint == folders.fingerprint
    for source in (tars, folders):
        assert source.class_names == SYNSETS
        examples = [source.read(index) for index in range(9)]
        assert [example.file_name for example in examples] == [NAMES[row] for row in order]
        assert [example.image_id for example in examples] == order
        for example in examples:
            assert SYNSETS[example.label] == example.file_name[:9]
            plain = (imagenet_folders / "train" / example.file_name[:9] / example.file_name).read_bytes()
            fixed = example.file_name in ("n01440764_2.JPEG", "n02105855_2933.JPEG")
            assert (example.encoded == plain) is not fixed
            assert Image.open(io.BytesIO(example.encoded)).format == "JPEG"
            assert Image.open(io.BytesIO(example.encoded)).mode == "RGB"


def test_validation_labels_come_from_the_list(imagenet_tars: Path, imagenet_folders: Path) -> None:
    expected = {1: "n03000247", 2: "n01440764", 3: "n02105855", 4: "n01440764"}
    by_synset = imagenet_folders.with_name("by_synset")
    for number, synset in expected.items():
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        (by_synset / "validation" / synset).mkdir(parents=True, exist_ok=True)
        shutil.copy(imagenet_folders / "val" / name, by_synset / "validation" / synset / name)
    sources = [open_imagenet(root, "validation") for root in (imagenet_tars, imagenet_folders, by_synset)]
    assert len({source.fingerprint for source in sources}) == 1
    for source in sources:
        assert source.class_names == SYNSETS
        examples = [source.read(index) for index in range(4)]
        found = {int(example.file_name[15:23]): SYNSETS[example.label] for example in examples}
        assert found == expected
    for index in range(4):
        assert len({source.read(index).encoded for source in sources}) == 1


def test_validation_has_the_classes_of_training_and_else_its_own(imagenet_tars: Path) -> None:
    (imagenet_tars / "synset_labels.txt").write_text("n03000247\n" * 4)
    assert open_imagenet(imagenet_tars, "validation").class_names == SYNSETS
    (imagenet_tars / "ILSVRC2012_img_train.tar").unlink()
    assert open_imagenet(imagenet_tars, "validation").class_names == ("n03000247",)


def test_kaggle_s_folders_are_known(imagenet_folders: Path) -> None:
    root = imagenet_folders.with_name("kaggle")
    (root / "ILSVRC" / "Data").mkdir(parents=True)
    imagenet_folders.rename(root / "ILSVRC" / "Data" / "CLS-LOC")
    (root / "ILSVRC/Data/CLS-LOC/synset_labels.txt").unlink()
    rows = [f"ILSVRC2012_val_{number:08d},{synset} 1 2 3 4 " for number, synset in enumerate(reversed(SYNSETS), 1)]
    rows.append("ILSVRC2012_val_00000004,n01440764 1 2 3 4 n01440764 5 6 7 8 ")
    (root / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]))
    source = open_imagenet(root, "validation")
    examples = [source.read(index) for index in range(4)]
    labels = {example.file_name[15:23]: example.label for example in examples}
    assert labels == {"00000001": 2, "00000002": 1, "00000003": 0, "00000004": 0}
    assert len(open_imagenet(root, "train")) == 9


def test_records_have_the_original_s_names_and_say_what_was_fixed(imagenet_tars: Path, tmp_path: Path) -> None:
    source = open_imagenet(imagenet_tars, "train")
    manifest = write_records(source, tmp_path / "records", "train", shards=4, suffix="")
    assert manifest["fixed"] == {CMYK_FIX: 1, PNG_FIX: 1}
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert names == [f"train-{number:05d}-of-00004" for number in range(4)] + ["train.index", "train.json"]
    records = RecordSource(tmp_path / "records", "train")
    assert records.class_names == SYNSETS
    for index in range(9):
        assert vars(records.read(index)) == vars(source.read(index))


def repack(root: Path, tar: Tar, members: Mapping[str, bytes]) -> None:
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar(members))


def with_member(name: str, **fields: object) -> bytes:
    """Make a tar with one member that is not a plain file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(name)
        for field, value in fields.items():
            setattr(info, field, value)
        archive.addfile(info)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        ({"n01440764.tar": "n02105855_1.JPEG"}, DataError, "synset n01440764"),
        ({"n01440764.tar": "readme.txt"}, DataError, "synset n01440764"),
        ({"n01440764.tar": "../n01440764_1.JPEG"}, UnsafeError, "leaves the folder"),
        ({"n01440764.tar": "/n01440764_1.JPEG"}, UnsafeError, "is absolute"),
        ({"n01440764.tar": "n01440764/n01440764_1.JPEG"}, DataError, "is no image"),
        ({"n0144.tar": "n0144_1.JPEG"}, DataError, 'member "n0144.tar" is not named'),
        ({"fish.tar": "n01440764_1.JPEG"}, DataError, 'member "fish.tar" is not named'),
        ({"n01440764.JPEG": "n01440764_1.JPEG"}, DataError, "is not named"),
        ({}, DataError, "holds no file"),
    ],
)
def test_members_that_do_not_belong_are_named(
    members: dict[str, str], error: type[Exception], message: str, imagenet_tars: Path, tar: Tar
) -> None:
    repack(imagenet_tars, tar, {outer: tar({inner: b"x"}) for outer, inner in members.items()})
    with pytest.raises(error, match=message):
        open_imagenet(imagenet_tars, "train")


@pytest.mark.parametrize(
    "fields",
    [
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.LNKTYPE, "linkname": "n01440764_2.JPEG"},
        {"type": tarfile.FIFOTYPE},
        {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
        {"type": tarfile.BLKTYPE},
    ],
)
def test_inner_members_that_are_no_files_are_refused(fields: dict[str, object], imagenet_tars: Path, tar: Tar) -> None:
    repack(imagenet_tars, tar, {"n01440764.tar": with_member("n01440764_1.JPEG", **fields)})
    with pytest.raises(UnsafeError, match=r"ILSVRC2012_img_train\.tar.*n01440764_1\.JPEG"):
        open_imagenet(imagenet_tars, "train")


@pytest.mark.parametrize("kept", [100, 3000, -2000])
def test_a_tar_that_is_cut_off_is_named(kept: int, imagenet_tars: Path) -> None:
    path = imagenet_tars / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[:kept] if kept > 0 else path.read_bytes()[: len(path.read_bytes()) // 2])
    with pytest.raises(DataError, match=r"ILSVRC2012_img_train\.tar"):
        open_imagenet(imagenet_tars, "train")


def test_an_inner_tar_without_images_is_named(imagenet_tars: Path, tar: Tar) -> None:
    repack(imagenet_tars, tar, {"n01440764.tar": tar({})})
    with pytest.raises(DataError, match=r"n01440764\.tar: holds no file"):
        open_imagenet(imagenet_tars, "train")


def test_a_tar_that_shrinks_while_it_is_read_is_named(imagenet_tars: Path) -> None:
    source = open_imagenet(imagenet_tars, "train")
    path = imagenet_tars / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(DataError, match="is cut off"):
        source.read(0)


def test_labels_that_are_not_to_train_on_are_named(imagenet_tars: Path) -> None:
    (imagenet_tars / "synset_labels.txt").write_text("n01440764\nn09999999\nn01440764\nn01440764\n")
    with pytest.raises(DataError, match="synset n09999999, which is none"):
        open_imagenet(imagenet_tars, "validation")


def test_files_that_are_no_images_of_imagenet_are_named(imagenet_folders: Path) -> None:
    (imagenet_folders / "val" / "extra.JPEG").write_bytes(b"x")
    with pytest.raises(DataError, match=r'"extra\.JPEG" is none'):
        open_imagenet(imagenet_folders, "validation")
    path = imagenet_folders / "train" / "n02105855" / "n01440764_5.JPEG"
    path.write_bytes(b"x")
    with pytest.raises(DataError, match="synset n02105855") as caught:
        open_imagenet(imagenet_folders, "train")
    assert str(caught.value.path).endswith("n01440764_5.JPEG")
    path.rename(imagenet_folders / "n01440764_5.JPEG")
    (imagenet_folders / "train" / "n02105855").rename(imagenet_folders / "train" / "dog")
    with pytest.raises(DataError, match='"dog" is no synset'):
        open_imagenet(imagenet_folders, "train")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="there is no") as caught:
        open_imagenet(tmp_path / "nowhere", "train")
    assert str(caught.value.path).endswith("nowhere")
    for split, tar in (("train", "ILSVRC2012_img_train.tar"), ("validation", "ILSVRC2012_img_val.tar")):
        with pytest.raises(MissingInputError, match=f"put {tar} there"):
            open_imagenet(tmp_path, split)  # type: ignore[arg-type]


def test_part_of_it_keeps_all_labels(imagenet_tars: Path) -> None:
    source = open_imagenet(imagenet_tars, "train")
    source.keep_per_class(2)
    assert len(source) == 6
    assert np.bincount(source.files.labels[source.rows]).tolist() == [2, 2, 2]
    source = open_imagenet(imagenet_tars, "train")
    source.keep_named(["n03000247/n03000247_5.JPEG", "n02105855_7.JPEG"], "list")
    assert {source.read(index).label for index in range(2)} == {1, 2}
    assert source.class_names == SYNSETS
