from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gaudi_datasets.errors import DataError, FlagError, TransferError, UnsafeError
from gaudi_datasets.fetching.coco2017 import COCO_ARCHIVES, ArchiveFile, CocoFetcher
from gaudi_datasets.fetching.downloads import Patience

# One request of the tests meets a silent server; on a busy machine others seem to, too, and are repeated.
QUICK = Patience(
    attempts=1000, connect_seconds=600, silent_seconds=0.5, first_wait_seconds=0.005, longest_wait_seconds=7200
)

NAMES = [f"{number:012}.jpg" for number in range(6)]
# Which classes each image shows: image 3 a crowd only, image 5 nothing.
SHOWN = {0: ["cat"], 1: ["dog"], 2: ["cat", "dog"], 3: ["dog"], 4: ["bird"]}
CATEGORIES = {"cat": 17, "dog": 18, "bird": 16}


def image(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (20 + number, 10), (number, 100, 50)).save(buffer, "JPEG")
    return buffer.getvalue()


def document() -> bytes:
    images = [{"id": n, "file_name": NAMES[n], "height": 10, "width": 20 + n} for n in range(6)]
    boxes = [
        {
            "id": 100 * n + CATEGORIES[name],
            "image_id": n,
            "category_id": CATEGORIES[name],
            "bbox": [1, 1, 5, 5],
            "iscrowd": int(n == 3),
            "segmentation": [[0, 0, 1, 1, 0, 1]],
        }
        for n, names in SHOWN.items()
        for name in names
    ]
    categories = [{"id": number, "name": name} for name, number in CATEGORIES.items()]
    return json.dumps({"info": {}, "images": images, "annotations": boxes, "categories": categories}).encode()


def pack(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture
def archives(server: Any) -> dict[str, ArchiveFile]:
    """Make a small COCO on the server, with archives like the real ones."""
    contents = {
        "annotations": (
            "annotations/annotations_trainval2017.zip",
            {f"annotations/instances_{split}2017.json": document() for split in ("train", "val")},
        ),
        "train": ("zips/train2017.zip", {f"train2017/{name}": image(n) for n, name in enumerate(NAMES)}),
        "val": ("zips/val2017.zip", {f"val2017/{name}": image(n) for n, name in enumerate(NAMES)}),
    }
    made: dict[str, ArchiveFile] = {}
    for name, (path, files) in contents.items():
        content = pack(files)
        server.add(f"/{path}", content)
        folder = next(iter(files)).split("/")[0]
        made[name] = ArchiveFile(path, len(content), hashlib.sha256(content).hexdigest(), folder, len(files))
    for n, name in enumerate(NAMES):
        for split in ("train", "val"):
            server.add(f"/{split}2017/{name}", image(n))
    return made


@pytest.fixture
def fetcher(server: Any, archives: dict[str, ArchiveFile], report: Any, tmp_path: Path) -> CocoFetcher:
    return CocoFetcher(tmp_path / "coco", report, url=f"{server.url}/", archives=archives, patience=QUICK)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_whole_is_fetched_once(fetcher: CocoFetcher, server: Any, report: Any, faults: Any, tmp_path: Path) -> None:
    server.pages["/zips/val2017.zip"].faults = [faults.cut(2000), faults.status(503)]
    fetcher.fetch(["train", "val"])
    files = [f"annotations/instances_{split}2017.json" for split in ("train", "val")]
    files += [f"{split}2017/{name}" for split in ("train", "val") for name in NAMES]
    assert names(tmp_path / "coco") == files
    assert (tmp_path / "coco" / "val2017" / NAMES[1]).read_bytes() == image(1)
    assert report.lines[1].endswith("train2017: 6 files of train2017.zip, SHA-256 verified")
    assert {name for name, _, _ in report.bytes} >= {"val2017.zip", "val2017.zip, unpacked"}
    asked = len(server.requests)
    fetcher.fetch(["train", "val"])
    assert len(server.requests) == asked
    assert report.lines[-1].endswith("val2017: there already, 6 files")


def test_archives_are_kept_when_that_is_asked(
    server: Any, archives: dict[str, ArchiveFile], report: Any, tmp_path: Path
) -> None:
    CocoFetcher(tmp_path, report, url=server.url, archives=archives, keep_archives=True).fetch(["val"])
    assert {"annotations_trainval2017.zip", "val2017.zip"} <= set(names(tmp_path))


def test_a_folder_with_less_than_the_whole_is_refused(fetcher: CocoFetcher, tmp_path: Path) -> None:
    (tmp_path / "coco" / "val2017").mkdir(parents=True)
    with pytest.raises(UnsafeError, match=r"val2017: holds 0 files and zips/val2017\.zip 6"):
        fetcher.fetch(["val"])


def test_an_archive_that_is_another_leaves_nothing(fetcher: CocoFetcher, server: Any, tmp_path: Path) -> None:
    page = server.pages["/zips/val2017.zip"]
    page.content = page.content[:-1] + b"x"
    with pytest.raises(DataError, match=r"val2017\.zip: has SHA-256 .* \(2 times\)"):
        fetcher.fetch(["val"])
    assert {name.split("/")[0] for name in names(tmp_path / "coco")} == {"annotations"}


@pytest.mark.parametrize(
    ("part", "numbers", "boxes"),
    [
        ({"max_images": 2}, [0, 1], 2),
        ({"max_images": 99}, [0, 1, 2, 3, 4, 5], 6),
        ({"classes": ("dog",)}, [1, 2], 2),
        ({"classes": ("cat", "bird")}, [0, 2, 4], 3),
        ({"classes": ("cat", "dog"), "max_images": 2}, [0, 1], 2),
    ],
)
def test_a_part_is_fetched_image_by_image(
    part: dict[str, Any], numbers: list[int], boxes: int, fetcher: CocoFetcher, server: Any, report: Any, tmp_path: Path
) -> None:
    fetcher.fetch(["train"], **part)
    folder = tmp_path / "coco"
    assert names(folder / "train2017") == [NAMES[n] for n in numbers]
    subset = json.loads((folder / "annotations" / "instances_train2017_subset.json").read_text())
    assert [image["id"] for image in subset["images"]] == numbers
    assert len(subset["annotations"]) == boxes
    assert [each["name"] for each in subset["categories"]] == [
        name for name in CATEGORIES if name in part.get("classes", CATEGORIES)
    ]
    assert "/zips/train2017.zip" not in {path for path, _, _ in server.requests}
    assert report.counts[-1] == ("train2017: images", len(numbers), len(numbers))
    server.requests.clear()
    fetcher.fetch(["train"], **part)
    assert server.requests == []


def test_a_larger_part_fetches_what_is_missing(fetcher: CocoFetcher, server: Any, tmp_path: Path) -> None:
    fetcher.fetch(["train"], max_images=2)
    server.requests.clear()
    fetcher.fetch(["train"], max_images=4)
    assert sorted(path for path, _, _ in server.requests) == [f"/train2017/{name}" for name in NAMES[2:4]]


def test_images_survive_faults(fetcher: CocoFetcher, server: Any, faults: Any, tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        server.pages[f"/train2017/{name}"].faults = [
            [faults.cut(300)] * 2,
            [faults.wrong],
            [faults.status(503), faults.cut(0)],
            [faults.silent(200)],
            [faults.slow(100)],
            [],
        ][number]
    fetcher.fetch(["train"], max_images=6)
    for number, name in enumerate(NAMES):
        assert (tmp_path / "coco" / "train2017" / name).read_bytes() == image(number)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (image(2), r"is 10x22; the annotations say 10x20 \(2 times\)"),
        (image(0)[:-60], "cannot be decoded"),
        (b"<html>moved</html>", "cannot be decoded"),
        (b"", "cannot be decoded"),
    ],
)
def test_a_image_that_is_another_is_refused(
    content: bytes, message: str, fetcher: CocoFetcher, server: Any, tmp_path: Path
) -> None:
    server.pages[f"/train2017/{NAMES[0]}"].content = content
    with pytest.raises(DataError, match=message):
        fetcher.fetch(["train"], max_images=3)
    assert NAMES[0] not in names(tmp_path / "coco" / "train2017")
    assert not (tmp_path / "coco" / "annotations" / "instances_train2017_subset.json").exists()


def test_the_first_error_ends_all(fetcher: CocoFetcher, server: Any, faults: Any) -> None:
    """The others would else wait for an hour."""
    server.pages[f"/train2017/{NAMES[0]}"].faults = [faults.status(403)]
    for name in NAMES[1:]:
        server.pages[f"/train2017/{name}"].faults = [faults.status(503, Retry_After="3600")]
    with pytest.raises(TransferError, match="answers 403"):
        fetcher.fetch(["train"], max_images=6)


def test_classes_that_are_not_there_are_named(fetcher: CocoFetcher) -> None:
    with pytest.raises(FlagError, match=r"--classes: 'dogg' .*'dog'"):
        fetcher.fetch(["train"], classes=("cat", "dogg"))
    with pytest.raises(FlagError, match=r"'xyz' .*instances_train2017\.json"):
        fetcher.fetch(["train"], classes=("xyz",))


def test_the_real_archives_are_all_named() -> None:
    assert {name: (one.folder, one.files) for name, one in COCO_ARCHIVES.items()} == {
        "annotations": ("annotations", 6),
        "train": ("train2017", 118287),
        "val": ("val2017", 5000),
    }
    assert all(len(one.sha256) == 64 and one.size > 2**27 for one in COCO_ARCHIVES.values())
