"""Conclude from measurements what bounds a training input, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gaudi_datasets.benchmarking.benchmark import Benchmark
from gaudi_datasets.memory import count_processors, format_bytes
from gaudi_datasets.program import count_things

Change: TypeAlias = tuple[str, str]
Bound = Literal["storage", "processors", "one thread"]

_STORAGE_MARGIN = 1.25  # reading alone that is not faster than the whole input by this much holds it up
_SCALING = 0.6  # of what as many threads could make, below which they are in each other's way
_WORTH = 0.8  # of the time before, below which a change is worth being told
_BUSY = 0.5  # processes for each processor, from which a machine is not quiet


@dataclass(frozen=True)
class Verdict:
    """The bound of an input, and changes that raise it.

    Attributes:
        bound: storage; the processors; or one thread, when more threads make no more images.
        stage: that is the largest part of the work on an image.
        text: the reasons.
        changes: what to do, the most promising first, each by its name ("quiet machine", "storage", "memory",
            "smaller images", "JPEGs", "processors", "threads", "static batches" or "processes") and with what was
            measured.
    """

    bound: Bound
    stage: str
    text: str
    changes: tuple[Change, ...]


def judge(benchmark: Benchmark, usable: int | None = None) -> Verdict:
    """Conclude what bounds the input.

    Args:
        benchmark: what was measured.
        usable: processors that this process may use; None: asks the system.
    """
    usable = usable or count_processors()
    whole, reading, busy = benchmark.inputs[-1], benchmark.reading, benchmark.load > _BUSY * usable
    stage = max(benchmark.stages, key=lambda name: benchmark.stages[name])
    rates = reading.images_per_second, whole.images_per_second
    alone = f"reading alone gives {rates[0]:,.0f} images/s, the whole input {rates[1]:,.0f}"
    processors = count_things(usable, "processor")
    first: tuple[Change, ...] = ()
    if busy:
        text = (
            f"measure again without other programs: {benchmark.load:.1f} processes ran or waited for {processors}"
            f" before this began, so the rates are lower than they could be"
        )
        first = (("quiet machine", text),)
    if rates[0] < _STORAGE_MARGIN * rates[1]:
        return Verdict("storage", stage, alone, (*first, *_change_storage(benchmark)))
    gain = whole.images_per_second / benchmark.inputs[0].images_per_second
    made = f"; {whole.threads} threads make {gain:.1f} times as many as one" if whole.threads > 1 else ""
    if len(benchmark.inputs) > 1 and gain < _SCALING * whole.threads and not busy:
        text = (
            "the threads hold each other up: several processes on this machine, each with few --threads, may make more"
            " (not measured here)"
        )
        return Verdict("one thread", stage, f"{alone}{made}", (("processes", text), *_change_work(benchmark)))
    share = benchmark.stages[stage] / benchmark.total_milliseconds
    largest = f"; of the work on an image, {stage} is {share:.0%}"
    if whole.threads < usable:
        text = f"this was measured with {whole.threads} of {usable} processors; try more --threads"
        last = ("threads", text)
    else:
        text = (
            f"a device that trains on more than {whole.images_per_second:,.0f} images/s waits for {processors};"
            f" more of them, or fewer other programs on them, are what helps"
        )
        last = ("processors", text)
    return Verdict("processors", stage, f"{alone}{made}{largest}", (*first, *_change_work(benchmark), last))


def _change_storage(benchmark: Benchmark) -> tuple[Change, ...]:
    cache, reading = benchmark.cache, benchmark.reading
    text = f"put the data where more than {reading.megabytes_per_second:,.1f} MB/s can be read, as on a local disk"
    if not cache.keeps:
        return (("storage", text),)
    flag = "ssd_train does so by itself" if benchmark.kind == "detection" else "--training_dataset_cache"
    kept = (
        f"keep the encoded images in memory from the first epoch on ({flag}): they take"
        f" {format_bytes(cache.needed)} of {format_bytes(cache.allowed)} allowed"
    )
    return ("memory", kept), ("storage", text)


def _change_work(benchmark: Benchmark) -> tuple[Change, ...]:
    """List the changes that reduce the work on an image."""
    changes: list[Change] = []
    smaller = benchmark.smaller
    if smaller is not None and smaller.milliseconds[1] < _WORTH * smaller.milliseconds[0]:
        before, after = smaller.milliseconds
        name, form = "JPEGs", "in place of PNGs"
        if smaller.larger:
            name, form = "smaller images", f"whose short side is at most {smaller.short_side} pixels"
        text = (
            f"store JPEGs {form}: {smaller.images} of the images,"
            f" stored so, take {after:.2f} ms of a processor to decode in place of {before:.2f}, and have"
            f" {smaller.mean_bytes[1] / 1e3:,.0f} kB in place of {smaller.mean_bytes[0] / 1e3:,.0f}"
        )
        changes.append((name, text))
    if benchmark.kind == "detection" and benchmark.loader == "tensorflow":
        text = (
            "gaudi-datasets make-static-batches does all stages once, for ssd_train --static, which then only reads"
            " (from much larger files; not measured here)"
        )
        changes.append(("static batches", text))
    return tuple(changes)
