"""Print a benchmark as tables for people, or give it as JSON for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gaudi_datasets.benchmarking.benchmark import Benchmark
from gaudi_datasets.benchmarking.verdict import Verdict
from gaudi_datasets.program import make_console

_BAR = 30  # characters of the longest bar
_LOADER = {"tensorflow": "TensorFlow", "opencv": "OpenCV"}
_BOUNDS = {"storage": "storage", "processors": "the processors", "one thread": "what one thread does"}
_CONTENT = {"detection": "images with boxes", "classification": "images with classes"}


def as_json(benchmark: Benchmark, verdict: Verdict) -> dict[str, Any]:
    """Return the benchmark as values that JSON takes; milliseconds are of processors, for an image."""
    smaller = benchmark.smaller
    height, width = benchmark.median_hw
    return {
        "name": benchmark.name,
        "kind": benchmark.kind,
        "loader": benchmark.loader,
        "images": benchmark.images,
        "images_looked_at": benchmark.read,
        "median_height": height,
        "median_width": width,
        "mean_bytes": benchmark.mean_bytes,
        "formats": dict(benchmark.formats),
        "image_size": benchmark.options.image_size,
        "batch_size": benchmark.options.batch_size,
        "input": [rate.as_json() for rate in benchmark.inputs],
        "reading": benchmark.reading.as_json(),
        "stages": dict(benchmark.stages),
        "smaller_images": smaller
        and {
            "short_side": smaller.short_side,
            "images": smaller.images,
            "bytes_before": smaller.mean_bytes[0],
            "bytes_after": smaller.mean_bytes[1],
            "milliseconds_before": smaller.milliseconds[0],
            "milliseconds_after": smaller.milliseconds[1],
        },
        "load_before": benchmark.load,
        "bound": verdict.bound,
        "largest_stage": verdict.stage,
        "changes": [{"what": what, "text": text} for what, text in verdict.changes],
    }


def print_benchmark(benchmark: Benchmark, verdict: Verdict, console: Console | None = None) -> None:
    """Print what the data set is, the rates, the stages, what bounds them and what to change."""
    console = console or make_console()
    height, width = benchmark.median_hw
    formats = " and ".join(sorted(benchmark.formats))
    console.print(
        Text(f"{benchmark.name}: {benchmark.images:,} {_CONTENT[benchmark.kind]}", style="bold"), soft_wrap=True
    )
    console.print(
        f"{formats}, median {width}x{height} pixels, mean {benchmark.mean_bytes / 1e3:,.0f} kB; made"
        f" {benchmark.options.image_size}x{benchmark.options.image_size} in batches of {benchmark.options.batch_size}"
        f" by {_LOADER[benchmark.loader]}",
        soft_wrap=True,
    )
    console.print()
    rates = _make_table("rates", "threads", "images/s", "MB/s")
    named = [*(("whole input", rate) for rate in reversed(benchmark.inputs)), ("reading alone", benchmark.reading)]
    for name, rate in named:
        rates.add_row(name, str(rate.threads), f"{rate.images_per_second:,.1f}", f"{rate.megabytes_per_second:,.1f}")
    console.print(rates)
    console.print()
    stages = _make_table("work on an image", "processor ms", "share")
    stages.add_column("")
    total, longest = benchmark.total_milliseconds, max(benchmark.stages.values())
    for name, milliseconds in benchmark.stages.items():
        bar = Text("█" * round(_BAR * milliseconds / longest), style="cyan")
        stages.add_row(name, f"{milliseconds:.2f}", f"{milliseconds / total:.0%}", bar)
    stages.add_row("together", f"{total:.2f}", "", "")
    stages.add_row("whole input", f"{benchmark.inputs[-1].processor_milliseconds:.2f}", "", Text("with batches", "dim"))
    console.print(stages)
    console.print()
    console.print(Text.assemble((f"Bound by {_BOUNDS[verdict.bound]}", "bold"), f": {verdict.text}."), soft_wrap=True)
    for what, text in verdict.changes:
        console.print(Text.assemble("- ", (what, "bold"), f": {text}"), soft_wrap=True)


def _make_table(first: str, *numbers: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="bold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table
