"""Draw charts as inline SVG, without a library or a script; every text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 42
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777", "#4d7c0f", "#475569")
MAX_POINTS = 400  # of a line
MARKED_POINTS = 25  # a line of fewer points has a dot at each
Values = npt.NDArray[np.float64]


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        name: in the legend; without one it has no place there.
        xs, ys: its points; one that is not finite leaves a gap.
        colour: of `COLOURS`.
        is_faint: drawn thin and pale, for values behind their mean.
        is_dashed: drawn dashed, for what the others are compared with.
    """

    name: str
    xs: Sequence[float] | Values
    ys: Sequence[float] | Values
    colour: str
    is_faint: bool = False
    is_dashed: bool = False


class Axis(NamedTuple):
    """A range of values on so many pixels."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def draw_lines(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float | None, float | None] = (None, None),
    mark: str = "",
    marked_x: float = 0.0,
) -> Markup:
    """Draw lines over common axes, with a legend below.

    Args:
        lines: at least one of them with a finite point.
        title: what it shows, for readers of the screen.
        x_label: of the horizontal axis.
        x_range: of the horizontal axis; None: that of the points.
        y_range: of the vertical axis; None: that of the points.
        mark: id of a vertical line, which a script may move; none where empty.
        marked_x: value at which it stands.
    """
    thinned = [line._replace(xs=xs, ys=ys) for line in lines for xs, ys in [thin(line.xs, line.ys)]]
    x_axis = Axis(*_find_range([line.xs for line in thinned], *(x_range or (None, None))), LEFT, WIDTH - RIGHT)
    y_axis = Axis(*_find_range([line.ys for line in thinned], *y_range), HEIGHT - BOTTOM, TOP)
    parts = [_draw_axes(x_axis, y_axis, x_label)]
    for line in sorted(thinned, key=lambda line: not line.is_faint):
        parts += _draw_line(line, x_axis, y_axis)
    if mark:
        x = x_axis.place(marked_x)
        parts.append(
            Markup(
                '<line id="{}" class="mark" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}" '
                'data-start="{:.2f}" data-end="{:.2f}"/>'
            ).format(mark, x, x, TOP, HEIGHT - BOTTOM, x_axis.start, x_axis.end)
        )
    legend = Markup("").join(
        Markup('<span><i style="background:{}"></i>{}</span>').format(line.colour, show_text(line.name, 40))
        for line in lines
        if line.name
    )
    return Markup('{}<div class="legend">{}</div>').format(_make_svg(parts, title, HEIGHT), legend)


def draw_bars(rows: Sequence[tuple[str, float, str]], *, title: str) -> Markup:
    """Draw a horizontal bar for each row of a name, a value of at least 0, and a text behind the bar."""
    step, left = 26, 150
    longest = max((value for _, value, _ in rows), default=0) or 1.0
    parts = []
    for number, (name, value, text) in enumerate(rows):
        top, width = TOP + number * step, (WIDTH - left - 130) * value / longest
        parts.append(
            Markup(
                '<text x="{}" y="{}" text-anchor="end">{}</text><rect x="{}" y="{}" width="{:.1f}" height="{}" '
                'fill="{}"/><text x="{:.1f}" y="{}">{}</text>'
            ).format(
                left - 8, top + 17, show_text(name, 22), left, top + 4, width, step - 8, COLOURS[0],
                left + width + 6, top + 17, show_text(text, 40),
            )
        )  # fmt: skip
    return _make_svg(parts, title, 2 * TOP + step * len(rows))


def draw_reliability(bins: Sequence[tuple[float, float, float, float, int]], *, title: str, x_label: str) -> Markup:
    """Draw the share that is right in each bin of scores; a bar on the dashed line is calibrated.

    Args:
        bins: low and high end, mean score, share that is right, and count of each.
        title: what it shows.
        x_label: of the horizontal axis.
    """
    x_axis, y_axis = Axis(0, 1, LEFT, WIDTH - RIGHT), Axis(0, 1, HEIGHT - BOTTOM, TOP)
    parts = [_draw_axes(x_axis, y_axis, x_label)]
    total = max(sum(count for *_, count in bins), 1)
    for low, high, score, right, count in bins:
        if count:
            left, top, ink = x_axis.place(low) + 1, y_axis.place(right), 0.25 + 0.75 * count / total
            parts.append(
                Markup(
                    '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}" fill-opacity="{:.2f}">'
                    "<title>{}</title></rect>"
                ).format(
                    left, top, x_axis.place(high) - left - 1, y_axis.start - top, COLOURS[0], ink,
                    f"scores {low:.1f} to {high:.1f}, mean {score:.3f}: {right:.3f} of {count} are right",
                )
            )  # fmt: skip
            parts.append(
                Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(
                    x_axis.place((low + high) / 2), max(top - 4, TOP + 8), count
                )
            )
    parts.append(_draw_path(Line("", [0, 1], [0, 1], "#475569", is_dashed=True), x_axis, y_axis))
    return _make_svg(parts, title, HEIGHT)


def thin(xs: Sequence[float] | Values, ys: Sequence[float] | Values) -> tuple[Values, Values]:
    """Return at most `MAX_POINTS` points: of each stretch of more of them, those with the lowest and highest value."""
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    if len(x) <= MAX_POINTS:
        return x, y
    chosen: set[int] = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), MAX_POINTS // 2 - 1):
        finite = stretch[np.isfinite(y[stretch])]
        chosen |= (
            {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])} if len(finite) else {stretch[0]}
        )
    kept = sorted(chosen)
    return x[kept], y[kept]


def find_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Find about `count` round numbers within a range that is not empty."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= min((1, 2, 2.5, 5, 10), key=lambda factor: abs((high - low) / (step * factor) - count))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def show_text(text: object, limit: int = 80) -> str:
    """Return a text for people: on one line, without letters that are not shown or turn the direction, and not long.

    It is not escaped.
    """
    shown = "".join(letter if letter.isprintable() else " " for letter in str(text)).strip()
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}\N{HORIZONTAL ELLIPSIS}"


def _find_range(
    columns: Sequence[Sequence[float] | Values], low: float | None, high: float | None
) -> tuple[float, float]:
    finite = np.concatenate([np.asarray(column, np.float64) for column in columns] or [np.zeros(0)])
    finite = finite[np.isfinite(finite)]
    lowest = low if low is not None else float(finite.min(initial=math.inf))
    highest = high if high is not None else float(finite.max(initial=-math.inf))
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return 0.0, 1.0
    if high is None:
        highest += 0.04 * (highest - lowest) if low is not None else 0
    if highest > lowest:
        return lowest, highest
    return (min(lowest, 0.0), max(highest, 0.0)) if highest else (0.0, 1.0)


def _draw_axes(x_axis: Axis, y_axis: Axis, x_label: str) -> Markup:
    parts = []
    for value in find_ticks(y_axis.low, y_axis.high):
        y = y_axis.place(value)
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
                '<text x="{}" y="{:.1f}" text-anchor="end">{:.4g}</text>'
            ).format(LEFT, WIDTH - RIGHT, y, y, LEFT - 6, y + 4, value)
        )
    for value in find_ticks(x_axis.low, x_axis.high, 6):
        x = x_axis.place(value)
        parts.append(
            Markup(
                '<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>'
                '<text x="{:.1f}" y="{}" text-anchor="middle">{:.6g}</text>'
            ).format(x, x, TOP, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 16, value)
        )
    parts.append(
        Markup('<text class="label" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label
        )
    )
    return Markup("").join(parts)


def _draw_line(line: Line, x_axis: Axis, y_axis: Axis) -> list[Markup]:
    parts = [_draw_path(line, x_axis, y_axis)]
    if len(line.xs) <= MARKED_POINTS and not (line.is_faint or line.is_dashed):
        parts += [
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"><title>{}</title></circle>').format(
                x_axis.place(x), y_axis.place(y), line.colour, f"{show_text(line.name)} {y:.4g} at {x:.6g}"
            )
            for x, y in zip(line.xs, line.ys, strict=True)
            if math.isfinite(y)
        ]
    return parts


def _draw_path(line: Line, x_axis: Axis, y_axis: Axis) -> Markup:
    words, pen = [], "M"
    for x, y in zip(line.xs, line.ys, strict=True):
        if not math.isfinite(y):
            pen = "M"
            continue
        words.append(f"{pen}{x_axis.place(x):.1f} {y_axis.place(y):.1f}")
        pen = "L"
    style = ' stroke-width="1" stroke-opacity=".3"' if line.is_faint else ' stroke-width="1.8"'
    style += ' stroke-dasharray="5 4"' if line.is_dashed else ""
    return Markup('<path d="{}" fill="none" stroke="{}"{}><title>{}</title></path>').format(
        "".join(words), line.colour, Markup(style), show_text(line.name)
    )


def _make_svg(parts: Sequence[Markup], title: str, height: float) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img"><title>{}</title>{}</svg>').format(
        WIDTH, height, title, Markup("").join(parts)
    )
