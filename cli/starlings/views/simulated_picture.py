"""A simulated day as a picture (SVG): throughput, workers that are there and that hold something, and new plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from starlings.views.figures import count, duration
from starlings.views.simulated import throughput

_WIDTH, _LEFT, _RIGHT = 900, 70, 20
_RATES = (60, 220)
_WORKERS = (270, 390)
_HEIGHT = 430


def draw(answer: Mapping[str, Any]) -> str:
    """The SVG of an answer of `simulate_answer`."""
    whole_s = max(1.0, float(answer["virtual_s"]))

    def x(at_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at_s / whole_s

    rates = throughput(answer)
    points = answer["timeline"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 22, f"{answer['job']} on {answer['fleet'] or 'the fleet'}", 15),
        _text(
            _LEFT,
            40,
            f"{count(answer['tokens'])} tokens in {duration(whole_s)}; workers computed for "
            f"{answer['utilisation']:.0%} of their time",
        ),
    ]
    for event in answer["events"]:
        if event["kind"] == "plan":
            at = x(event["at_s"])
            parts.append(
                f'<line x1="{at:.1f}" y1="{_RATES[0]}" x2="{at:.1f}" y2="{_WORKERS[1]}" stroke="#ddd">'
                f"<title>{duration(event['at_s'])} {escape(event['text'])}</title></line>"
            )
    parts += _panel("tokens/s", _RATES, [(x(t), rate) for t, rate in rates], "#1b6ca8")
    there = [(x(p["at_s"]), float(p["workers"])) for p in points]
    holding = [(x(p["at_s"]), float(p["holders"])) for p in points]
    parts += _panel("workers", _WORKERS, there, "#b8860b")
    parts += _line(_WORKERS, holding, max((n for _, n in there), default=1.0) or 1.0, "#2e933c")
    parts.append(
        _text(
            _LEFT,
            _HEIGHT - 12,
            "brown: workers that are there; green: that hold stages; grey: a new plan",
            10,
        )
    )
    for hour in range(int(whole_s // 3600) + 1):
        if hour % max(1, int(whole_s // 3600) // 12) == 0:
            parts.append(_text(x(3600 * hour), _WORKERS[1] + 16, f"{hour} h", 10, "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, rows: tuple[int, int], curve: Sequence[tuple[float, float]], colour: str) -> list[str]:
    top, bottom = rows
    most = max((value for _, value in curve), default=1.0) or 1.0
    return [
        _text(_LEFT - 6, top + 8, count(most), 10, "end"),
        _text(_LEFT - 6, bottom, "0", 10, "end"),
        _text(_LEFT, top - 6, name, 10),
        f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}" stroke="#999"/>',
        *_line(rows, curve, most, colour),
    ]


def _line(rows: tuple[int, int], curve: Sequence[tuple[float, float]], most: float, colour: str) -> list[str]:
    top, bottom = rows
    path = " ".join(f"{at:.1f},{bottom - (bottom - top) * min(1.0, value / most):.1f}" for at, value in curve)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'] if path else []


def _text(x: float, y: float, text: str, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
