from __future__ import annotations

from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.coco_categories import COCO_CATEGORIES


def test_there_are_eighty_in_id_order() -> None:
    ids = [category.id for category in COCO_CATEGORIES]
    assert len(ids) == 80
    assert ids == sorted(set(ids))
    assert set(range(1, 91)) - set(ids) == {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
    assert COCO_CATEGORIES[0] == Category(1, "person", "person")
    assert COCO_CATEGORIES[-1] == Category(90, "toothbrush", "indoor")
    assert len({category.name for category in COCO_CATEGORIES}) == 80
