"""Pictures of measurements as plain SVG, written without a library: curves, and means with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import svg

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 40, 50


@dataclass(frozen=True, slots=True)
class Curve:
    """points: (x, y), x rising."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values from `low` to `high` at the pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """About six round values."""
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        unit = next(power * step for step in (1, 2, 5, 10) if power * step >= rough)
        first = math.ceil(self.low / unit - 1e-9)
        return [n * unit for n in range(first, math.floor(self.high / unit + 1e-9) + 1)]


def draw_curves(file: Path, title: str, x_name: str, y_name: str, curves: Sequence[Curve]) -> None:
    """One picture with all curves and their names beside it; nothing is written without curves."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return
    across = _axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    up = _axis([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
    parts = _grid(across, up)
    for number, curve in enumerate(curves):
        colour = svg.COLOURS[number % len(svg.COLOURS)]
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in curve.points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>')
        parts.append(svg.text(_WIDTH - _RIGHT + 12, _TOP + 10 + 18 * number, curve.name, "start", colour))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts += [svg.text(middle, _HEIGHT - 12, x_name), svg.text(_LEFT, _TOP - 8, y_name)]
    svg.write(file, title, parts, _WIDTH, _HEIGHT)


def draw_intervals(
    file: Path, title: str, intervals: Mapping[str, tuple[float, float, float]], bounds: Sequence[float] = ()
) -> None:
    """One line per name: (mean, low, high); `bounds` are drawn as vertical lines."""
    if not intervals:
        return
    height = _TOP + _BOTTOM + 26 * len(intervals)
    values = [value for three in intervals.values() for value in three]
    across = _axis([*values, *bounds], 190, _WIDTH - 30)
    parts = []
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(svg.line(f"M{x:.1f} {_TOP}V{height - _BOTTOM}"))
        parts.append(svg.text(x, height - _BOTTOM + 18, f"{tick:.6g}"))
    for bound in bounds:
        x = across.at(bound)
        parts.append(
            svg.line(f"M{x:.1f} {_TOP}V{height - _BOTTOM}", svg.COLOURS[1], 'stroke-dasharray="4 3"')
        )
    for number, (name, (mean, low, high)) in enumerate(intervals.items()):
        y = _TOP + 14 + 26 * number
        parts.append(svg.text(180, y + 4, name, "end"))
        ends = f"M{across.at(low):.1f} {y}H{across.at(high):.1f}"
        parts.append(svg.line(ends, svg.COLOURS[0], 'stroke-width="2"'))
        parts.append(svg.dot(across.at(mean), y, svg.COLOURS[0]))
    svg.write(file, title, parts, _WIDTH, height)


def _axis(values: Sequence[float], begin: float, end: float) -> _Axis:
    """With zero in it and a little room at both ends."""
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.03 * (high - low) or 1.0
    return _Axis(low - (room if low < 0 else 0.0), high + room, begin, end)


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        colour = "#888" if abs(tick) < 1e-12 else "#ddd"
        parts.append(svg.line(f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}", colour))
        parts.append(svg.text(_LEFT - 8, y + 4, f"{tick:.6g}", "end"))
    for tick in across.ticks():
        parts.append(svg.text(across.at(tick), _HEIGHT - _BOTTOM + 18, f"{tick:,.6g}"))
    return parts
