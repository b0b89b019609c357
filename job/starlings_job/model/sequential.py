"""`torch.nn.Sequential` factories that ship with the package: each child is a block.

A factory must be deterministic in its arguments, use no buffers, and pass one tensor from child to child.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from starlings_job.description import SHAPES_CLASSES


class ResidualLayer(nn.Module):
    """x + conv(gelu(norm(x))), same shape. Group norm: batch statistics would differ by microbatch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.conv = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.conv(nn.functional.gelu(self.norm(x)))
        return out


class ClassifierHead(nn.Module):
    """Mean over the image, then one logit per class: (n, width, rows, columns) -> (n, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(nn.functional.gelu(self.norm(x)).mean(dim=(2, 3)))
        return out


def shapes_classifier(config: Mapping[str, Any]) -> nn.Sequential:
    """Classifies drawn shapes: images (n, 1, 16, 16) -> logits (n, 8).

    Args:
        config: `width` channels, `layers` residual layers.
    """
    width = int(config["width"])
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, stride=2, padding=1),
        *(ResidualLayer(width) for _ in range(int(config["layers"]))),
        ClassifierHead(width, SHAPES_CLASSES),
    )


FACTORIES: dict[str, Callable[[Mapping[str, Any]], nn.Sequential]] = {"shapes_classifier": shapes_classifier}
