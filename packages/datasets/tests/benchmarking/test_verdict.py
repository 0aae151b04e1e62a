from __future__ import annotations

import io
from dataclasses import replace

import pytest

from gaudi_datasets.benchmarking.benchmark import Benchmark, SmallerImages
from gaudi_datasets.benchmarking.measurement import Rate
from gaudi_datasets.benchmarking.report import as_json, print_benchmark
from gaudi_datasets.benchmarking.verdict import judge
from gaudi_datasets.memory import CacheDecision
from gaudi_datasets.program import make_console
from gaudi_datasets.sampling import InputOptions


def rate(images_per_second: float, threads: int = 2) -> Rate:
    return Rate(100, 1e7, 100 / images_per_second, threads, 0.5)


STAGES = {"read": 0.1, "decode": 2.5, "crop": 0.3, "resize": 0.2, "colours": 0.6, "targets": 0.4}
FAST = Benchmark(
    name="data",
    kind="detection",
    loader="tensorflow",
    images=1000,
    read=100,
    median_hw=(480, 640),
    mean_bytes=1e5,
    formats={"JPEG": 100},
    options=InputOptions(32),
    reading=rate(5000),
    stages=STAGES,
    inputs=(rate(240, 1), rate(450)),
    smaller=None,
    cache=CacheDecision(keeps=True, needed=2**30, allowed=2**32),
    load=0.1,
)


def changes(benchmark: Benchmark, usable: int = 2) -> list[str]:
    return [what for what, _ in judge(benchmark, usable).changes]


def test_processors_bound_what_scales_with_them() -> None:
    verdict = judge(FAST, 2)
    assert (verdict.bound, verdict.stage) == ("processors", "decode")
    assert changes(FAST) == ["static batches", "processors"]
    assert changes(FAST, usable=4) == ["static batches", "threads"]
    single = replace(FAST, inputs=(rate(240, 1),))
    assert judge(single, 1).bound == "processors"
    assert changes(replace(FAST, loader="opencv")) == ["processors"]
    assert changes(replace(FAST, kind="classification")) == ["processors"]


def test_storage_bounds_what_reading_alone_is_not_faster_than() -> None:
    slow = replace(FAST, reading=rate(500))
    assert (judge(slow, 2).bound, changes(slow)) == ("storage", ["memory", "storage"])
    large = replace(slow, cache=CacheDecision(keeps=False, needed=2**40, allowed=2**32))
    assert changes(large) == ["storage"]


def test_threads_that_make_no_more_images_are_told() -> None:
    stuck = replace(FAST, inputs=(rate(240, 1), rate(260)))
    assert judge(stuck, 2).bound == "one thread"
    assert changes(stuck)[0] == "processes"


def test_a_machine_that_is_not_quiet_is_told_first() -> None:
    busy = replace(FAST, inputs=(rate(240, 1), rate(260)), load=5)
    assert judge(busy, 2).bound == "processors"
    assert changes(busy)[0] == "quiet machine"


@pytest.mark.parametrize(("after", "told"), [(0.7, True), (2.4, False)])
def test_smaller_images_are_told_where_they_were_faster(after: float, told: bool) -> None:
    tried = replace(FAST, smaller=SmallerImages(600, 16, 3, (9e5, 1e5), (2.5, after)))
    assert ("smaller images" in changes(tried)) == told
    assert as_json(tried, judge(tried, 2))["smaller_images"]["milliseconds_after"] == after


def test_a_size_is_told_only_where_an_image_is_larger() -> None:
    tried = [replace(FAST, smaller=SmallerImages(600, 16, larger, (9e5, 1e5), (2.5, 0.7))) for larger in (0, 1)]
    texts = [judge(one, 2).changes[0] for one in tried]
    assert [what for what, _ in texts] == ["JPEGs", "smaller images"]
    assert ["600" in text for _, text in texts] == [False, True]
    assert ["PNGs" in text for _, text in texts] == [True, False]


def test_the_report_has_every_figure() -> None:
    verdict = judge(FAST, 2)
    document = as_json(FAST, verdict)
    assert document["stages"] == STAGES
    assert [row["threads"] for row in document["input"]] == [1, 2]
    assert document["input"][1]["images_per_second"] == pytest.approx(450)
    assert (document["bound"], document["largest_stage"]) == ("processors", "decode")
    text = io.StringIO()
    print_benchmark(FAST, verdict, make_console(file=text, width=100))
    for figure in ("450.0", "240.0", "5,000.0", "640x480", "2.50", "61%", *STAGES):
        assert figure in text.getvalue()
