"""The few pieces of SVG that pictures of measurements are made of: no library, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#7b4fa3", "#00798c", "#8d5524", "#555555")


def text(
    x: float, y: float, words: str, anchor: str = "middle", colour: str = "#222", *, turned: bool = False
) -> str:
    """`words` at a place; `turned`: upwards."""
    place = f'transform="translate({x:.1f},{y:.1f}) rotate(-90)"' if turned else f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {place} text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def line(path: str, colour: str = "#ddd", extra: str = "") -> str:
    """A path that is not filled."""
    return f'<path d="{path}" fill="none" stroke="{colour}"{extra and " " + extra}/>'


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def moved(x: float, y: float, parts: Sequence[str]) -> list[str]:
    """`parts` with their origin there."""
    return [f'<g transform="translate({x},{y})">', *parts, "</g>"]


def write(file: Path, title: str, parts: Sequence[str], width: float, height: float) -> None:
    """A picture of `parts` on white, with its title above."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    heading = f'<text x="{width / 2}" y="18" text-anchor="middle" font-size="14">{escape(title)}</text>'
    file.write_text("\n".join([head, background, heading, *parts, "</svg>"]) + "\n", "utf-8")
