"""A procedural image classification set: eight shapes, drawn with noise; nothing to download."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import hypot
from pathlib import Path

from starlings_job.description import SHAPES_CLASSES
from starlings_job.records import IMAGES, DatasetMeta

SIDE = 16
POPULATION = 4096
_NOISE = 40


def write_shapes(
    directory: Path, held_out: int, seed: int, progress: Callable[[float], None] | None = None
) -> DatasetMeta:
    """Draws the images and writes `tokens.bin` and `held_out.bin`; the same seed draws the same pixels."""
    done, total = 0, POPULATION + held_out
    for name, count in (("tokens.bin", POPULATION), ("held_out.bin", held_out)):
        rng = random.Random(f"{seed}:{name}")
        with (directory / name).open("wb") as file:
            for _ in range(count):
                file.write(_record(rng))
                done += 1
                if progress is not None and done % 256 == 0:
                    progress(done / total)
    return DatasetMeta(
        kind=IMAGES,
        population=POPULATION,
        held_out=held_out,
        sequence_length=1,
        vocabulary_size=SHAPES_CLASSES,
        image_shape=(1, SIDE, SIDE),
    )


def _record(rng: random.Random) -> bytes:
    label = rng.randrange(SHAPES_CLASSES)
    x, y = rng.uniform(6, SIDE - 7), rng.uniform(6, SIDE - 7)
    size, ink = rng.uniform(3.5, 5.5), rng.uniform(120, 215)
    noise = rng.randbytes(SIDE * SIDE)
    pixels = bytearray()
    for row in range(SIDE):
        for column in range(SIDE):
            drawn = ink if _inside(label, column - x, row - y, size) else 0.0
            pixels.append(min(255, int(drawn) + noise[row * SIDE + column] * _NOISE // 255))
    return bytes(pixels) + bytes((label,))


def _inside(label: int, dx: float, dy: float, size: float) -> bool:
    width, height = abs(dx), abs(dy)
    match label:
        case 0:  # disc
            return hypot(dx, dy) <= size
        case 1:  # ring
            return size - 1.5 <= hypot(dx, dy) <= size
        case 2:  # square
            return max(width, height) <= size * 0.85
        case 3:  # frame
            return size * 0.85 - 1.3 <= max(width, height) <= size * 0.85
        case 4:  # upright cross
            return min(width, height) <= 0.9 and max(width, height) <= size
        case 5:  # diagonal cross
            return abs(width - height) <= 1.1 and max(width, height) <= size
        case 6:  # triangle
            return height <= size and width <= (dy + size) / 2
        case _:  # bars
            return max(width, height) <= size and int(dy + SIDE) % 3 == 0
