"""Scatter plots as SVG, with both axes logarithmic: no package, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import svg

_WIDTH, _HEIGHT = 560, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 130, 34, 46

# (x, y), both positive, by what is written beside the point.
Points = Mapping[str, tuple[float, float]]


def write_panels(
    file: Path, title: str, panels: Mapping[str, Points], x_label: str, y_label: str, columns: int = 2
) -> None:
    """One panel per entry, all with the same axes, side by side. Points that are not positive are left out."""
    kept = {name: {label: p for label, p in points.items() if min(p) > 0} for name, points in panels.items()}
    every = [point for points in kept.values() for point in points.values()]
    x_range, y_range = _range([x for x, _ in every]), _range([y for _, y in every])
    rows = math.ceil(len(kept) / columns)
    parts: list[str] = []
    for number, (name, points) in enumerate(kept.items()):
        panel = _panel(name, points, x_range, y_range, x_label, y_label)
        parts += svg.moved(number % columns * _WIDTH, number // columns * _HEIGHT + 30, panel)
    svg.write(file, title, parts, columns * _WIDTH, rows * _HEIGHT + 30)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Logarithms of the ends, with a margin."""
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = 0.06 * max(high - low, 1.0)
    return low - margin, high + margin


def _panel(
    name: str,
    points: Points,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_label: str,
    y_label: str,
) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + (math.log10(value) - x_range[0]) / (x_range[1] - x_range[0]) * (right - _LEFT)

    def down(value: float) -> float:
        return bottom - (math.log10(value) - y_range[0]) / (y_range[1] - y_range[0]) * (bottom - _TOP)

    parts = [
        svg.text(_LEFT, _TOP - 10, name, "start"),
        svg.line(f"M{_LEFT} {_TOP}V{bottom}H{right}V{_TOP}Z", "#999"),
        svg.text((_LEFT + right) / 2, _HEIGHT - 10, x_label),
        svg.text(14, (_TOP + bottom) / 2, y_label, turned=True),
    ]
    for value in _ticks(x_range, 2):
        parts.append(svg.line(f"M{across(value):.1f} {_TOP}V{bottom}"))
        parts.append(svg.text(across(value), bottom + 14, f"{value:g}"))
    for value in _ticks(y_range, 10):
        parts.append(svg.line(f"M{_LEFT} {down(value):.1f}H{right}"))
        parts.append(svg.text(_LEFT - 6, down(value) + 4, f"{value:g}", "end"))
    # Labels beside their points, pushed down where they would lie on each other.
    written: list[tuple[float, float]] = []
    for number, (label, (x, y)) in enumerate(sorted(points.items(), key=lambda item: -item[1][1])):
        colour = svg.COLOURS[number % len(svg.COLOURS)]
        left, line = across(x), down(y)
        while any(abs(left - other) < 120 and abs(line - height) < 11 for other, height in written):
            line += 2
        written.append((left, line))
        parts.append(svg.dot(left, down(y), colour))
        parts.append(svg.text(left + 7, line + 4, label, "start", colour))
    return parts


def _ticks(ends: tuple[float, float], base: int) -> list[float]:
    """Powers of `base` between two logarithms to base 10."""
    step = math.log10(base)
    return [base**power for power in range(math.ceil(ends[0] / step), math.floor(ends[1] / step) + 1)]
