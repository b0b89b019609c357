"""Scatter plots as SVG, with both axes logarithmic: no package, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

_WIDTH, _HEIGHT = 560, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 130, 34, 46
_COLOURS = ("#1b6ca8", "#c0392b", "#27824f", "#8e44ad", "#b9770e", "#34495e", "#0e7c7b", "#7f8c8d")

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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" '
        f'viewBox="0 0 {columns * _WIDTH} {rows * _HEIGHT + 30}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="14" y="22" font-size="16">{escape(title)}</text>',
    ]
    for number, (name, points) in enumerate(kept.items()):
        place = f"translate({number % columns * _WIDTH},{number // columns * _HEIGHT + 30})"
        parts.append(f'<g transform="{place}">')
        parts += _panel(name, points, x_range, y_range, x_label, y_label)
        parts.append("</g>")
    file.write_text("\n".join([*parts, "</svg>"]) + "\n", "utf-8")


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
        f'<text x="{_LEFT}" y="{_TOP - 10}" font-size="13">{escape(name)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}V{_TOP}Z" fill="none" stroke="#999"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14,{(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
    for value in _ticks(x_range, 2):
        parts.append(
            f'<path d="M{across(value):.1f} {_TOP}V{bottom}" stroke="#ddd"/>'
            f'<text x="{across(value):.1f}" y="{bottom + 14}" text-anchor="middle">{value:g}</text>'
        )
    for value in _ticks(y_range, 10):
        parts.append(
            f'<path d="M{_LEFT} {down(value):.1f}H{right}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    # Labels beside their points, pushed down where they would lie on each other.
    written: list[tuple[float, float]] = []
    for number, (label, (x, y)) in enumerate(sorted(points.items(), key=lambda item: -item[1][1])):
        colour = _COLOURS[number % len(_COLOURS)]
        left, line = across(x), down(y)
        while any(abs(left - other) < 120 and abs(line - height) < 11 for other, height in written):
            line += 2
        written.append((left, line))
        parts.append(f'<circle cx="{left:.1f}" cy="{down(y):.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 7:.1f}" y="{line + 4:.1f}" fill="{colour}">{escape(label)}</text>')
    return parts


def _ticks(ends: tuple[float, float], base: int) -> list[float]:
    """Powers of `base` between two logarithms to base 10."""
    step = math.log10(base)
    return [base**power for power in range(math.ceil(ends[0] / step), math.floor(ends[1] / step) + 1)]
