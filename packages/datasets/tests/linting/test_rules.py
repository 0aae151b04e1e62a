from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_datasets.detection.coco import CocoAnnotations, parse_coco
from gaudi_datasets.linting.rules import (
    NO_BOX,
    NO_IMAGE,
    NO_SIZE,
    PAST_EDGE,
    SAME_BOX,
    UNSCORED,
    UNSCORED_NO_IMAGE,
    UNUSED,
    ClassCount,
    count_boxes,
    count_labels,
    find_box_faults,
    image_rows,
)

PATH = Path("gt.json")


def annotate(*boxes: tuple[int, int, list[float]], crowds: tuple[int, ...] = (), **fields: Any) -> CocoAnnotations:
    """Four images of 300x200, the categories 3 and 5, and boxes (image, category, x y w h) that count from 1."""
    document = {
        "images": [{"id": 10 + n, "file_name": f"{n}.jpg", "height": 200, "width": 300} for n in range(4)],
        "categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}],
        "annotations": [
            {"id": n, "image_id": 10 + image, "category_id": category, "bbox": box, "iscrowd": int(n in crowds)}
            | fields
            for n, (image, category, box) in enumerate(boxes, 1)
        ],
    }
    return parse_coco(json.loads(json.dumps(document)), PATH)


def test_boxes_are_counted_by_class_and_coco_size() -> None:
    annotations = annotate(
        (0, 3, [0, 0, 32, 32]),  # on the limit: small
        (0, 3, [0, 0, 33, 32]),
        (1, 3, [0, 0, 96, 96]),  # on the limit: medium
        (1, 3, [0, 0, 97, 96]),
        (2, 3, [0, 0, 100, 100]),  # a crowd
        (2, 3, [0, 0, 0, 100]),  # of no size
        crowds=(5,),
    )
    assert count_boxes(annotations) == (
        ClassCount("cat", images=3, boxes=4, small=1, medium=2, large=1, crowds=1),
        ClassCount("dog", images=0, boxes=0, small=0, medium=0, large=0, crowds=0),
    )
    assert image_rows(annotations).tolist() == [0, 0, 1, 1, 2]


def test_sizes_go_by_the_annotated_area() -> None:
    annotations = annotate((0, 5, [0, 0, 100, 100]), area=50)
    assert count_boxes(annotations)[1].small == 1


def test_images_are_counted_by_label() -> None:
    assert count_labels([0, 2, 2], ["a", "b", "c"]) == (ClassCount("a", 1), ClassCount("b", 0), ClassCount("c", 2))
    assert count_labels([], ["a"]) == (ClassCount("a", 0),)


def test_box_faults_name_annotation_image_and_file() -> None:
    findings = find_box_faults(
        annotate(
            (0, 3, [5, 6, 0, 10]),
            (1, 3, [290, 0, 20, 10.5]),
            (1, 3, [1, 2, 3, 4]),
            (1, 3, [1, 2, 3, 4]),
            (1, 5, [1, 2, 3, 4]),
            (2, 5, [1, 2, 3, 4]),
            crowds=(6,),
        )
    )
    named = re.compile(r"\d[\d.]*|left out|crowds")
    assert [(finding.rule, finding.where, " ".join(named.findall(finding.what))) for finding in findings] == [
        (NO_SIZE, "gt.json: annotation 1, image 10 (0.jpg)", "5 6 0 10"),
        (PAST_EDGE, "gt.json: annotation 2, image 11 (1.jpg)", "290 0 20 10.5 300 200"),
        (SAME_BOX, "gt.json: annotation 4, image 11 (1.jpg)", "3"),
        (NO_BOX, "gt.json: image 10 (0.jpg)", "left out"),
        (NO_BOX, "gt.json: image 12 (2.jpg)", "crowds"),
        (NO_BOX, "gt.json: image 13 (3.jpg)", ""),
    ]


def test_a_class_with_only_crowds_cannot_be_learned() -> None:
    findings = find_box_faults(annotate((0, 5, [1, 2, 3, 4]), crowds=(1,)))
    unused = [finding.what for finding in findings if finding.rule == UNUSED]
    assert unused == ["class 'cat' (id 3)", "class 'dog' (id 5)"]


def test_advice_on_an_empty_class_is_of_its_split_and_kind() -> None:
    findings = find_box_faults(annotate((0, 5, [1, 2, 3, 4])), UNSCORED)
    assert [finding.what for finding in findings if finding.rule == UNSCORED] == ["class 'cat' (id 3)"]
    rules = (UNUSED, UNSCORED, NO_IMAGE, UNSCORED_NO_IMAGE)
    assert ["boxes" in rule.name for rule in rules] == [True, True, False, False]
    assert ["learned" in rule.advice for rule in rules] == [True, False, True, False]


BOXES = st.tuples(st.integers(0, 3), st.sampled_from([3, 5]), st.lists(st.integers(-5, 305), min_size=4, max_size=4))


@given(st.lists(BOXES, max_size=12), st.sets(st.integers(1, 12)))
def test_every_box_is_counted_or_found(boxes: list[tuple[int, int, list[float]]], crowds: set[int]) -> None:
    annotations = annotate(*boxes, crowds=tuple(crowds))
    counts, findings = count_boxes(annotations), find_box_faults(annotations)
    lost = [finding for finding in findings if finding.rule in (NO_SIZE, PAST_EDGE)]
    assert sum((one.boxes or 0) + (one.crowds or 0) for one in counts) + len(lost) == len(boxes)
    assert all(one.boxes == (one.small or 0) + (one.medium or 0) + (one.large or 0) for one in counts)
    doubled = len(annotations.boxes_xywh) - len(
        np.unique(np.column_stack([image_rows(annotations), annotations.category_ids, annotations.boxes_xywh]), axis=0)
    )
    assert sum(finding.rule == SAME_BOX for finding in findings) == doubled
