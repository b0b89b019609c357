"""A plan as a picture (SVG): workers from top to bottom, stages from left to right, as dark as they are busy."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from starlings.views.figures import count

_LEFT, _TOP, _ROW, _NAMES = 12, 64, 18, 220
_WIDTH = 900
# One colour per site, in the order in which sites appear.
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#b8860b", "#7b4fa3", "#00798c", "#8d5524", "#555555")


def draw(answer: Mapping[str, Any]) -> str:
    """The SVG of an answer of `plan_answer`; idle workers are an empty row."""
    rows = sorted(
        answer["placement"],
        key=lambda row: (row.get("first_stage", 1 << 30), row.get("last_stage", 0), row["worker"]),
    )
    stages = len(answer["stages"])
    height = _TOP + _ROW * len(rows) + 40
    cell = (_WIDTH - _LEFT - _NAMES - 20) / stages
    colours = {
        site: _COLOURS[i % len(_COLOURS)] for i, site in enumerate(dict.fromkeys(row["site"] for row in rows))
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(
            _LEFT, 20, f"{answer['job']} on {answer['fleet']}: {count(answer['tokens_per_s'])} tokens/s", 15
        ),
        _text(_LEFT, 38, f"{answer['of_bound']:.0%} of the bound; binds: {answer['binding']}", 11),
    ]
    for stage in range(stages):
        x = _LEFT + _NAMES + stage * cell
        if stages <= 60:
            parts.append(_text(x + cell / 2, _TOP - 6, str(stage), 9, "middle"))
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _ROW * len(rows)}" stroke="#eee"/>'
        )
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW
        parts.append(_text(_LEFT, y + 13, f"{row['worker']}  ({row['site']})", 11))
        if "first_stage" not in row:
            parts.append(_text(_LEFT + _NAMES + 4, y + 13, "idle", 10, colour="#999"))
            continue
        x = _LEFT + _NAMES + row["first_stage"] * cell
        width = (row["last_stage"] - row["first_stage"] + 1) * cell
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{y + 2}" width="{max(1.0, width - 2):.1f}" height="{_ROW - 4}" rx="3" '
            f'fill="{colours[row["site"]]}" fill-opacity="{0.25 + 0.75 * min(1.0, row["load"]):.2f}">'
            f"<title>{escape(row['worker'])}: {escape(row['reason'])}</title></rect>"
        )
        parts.append(_text(x + width - 6, y + 13, f"{row['load']:.0%}", 10, "end", "white"))
    parts.append(
        _text(_LEFT, height - 12, "colour: site; darkness and number: how busy the worker's compute is", 10)
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, font: int, anchor: str = "start", colour: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{font}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(words)}</text>'
