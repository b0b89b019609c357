"""Whether NoLoCo's momentum, which its averaging goes through, keeps replicas together. Pure arithmetic.

With x a replica's distance from the mean of all and d its momentum, a round with a random partner j is

    d' = alpha d - gamma (x - x_j) / 2 ;   x' = x + d'

(Kolehmainen et al. 2025, "NoLoCo", section 3, without what gradients add). Partners are independent in a large
swarm, so second moments V = E x^2, C = E x d, D = E d^2 follow a linear map of three numbers, and whether they shrink
is its spectral radius. A dropped swap leaves d' = alpha d, so drops mix a second map in.
"""

from __future__ import annotations

import math

_SQUARINGS = 40

Matrix = tuple[tuple[float, float, float], ...]


def noloco_growth(alpha: float, gamma: float, drop_rate: float = 0.0) -> float:
    """By what factor the mean square distance between replicas grows per round, in the long run; below 1: stable.

    Args:
        drop_rate: the share of swaps that end without averaging.
    """
    return _spectral_radius(_mixed(_moments(alpha, gamma), _moments(alpha, 0.0), drop_rate))


def _moments(alpha: float, gamma: float) -> Matrix:
    """Rows: what V, C and D are made of after a round."""
    momentum = (gamma * gamma / 2, -alpha * gamma, alpha * alpha)
    cross = (-gamma / 2, alpha, 0.0)
    distance = (1 + 2 * cross[0] + momentum[0], 2 * cross[1] + momentum[1], momentum[2])
    mixed = (cross[0] + momentum[0], cross[1] + momentum[1], momentum[2])
    return (distance, mixed, momentum)


def _mixed(kept: Matrix, dropped: Matrix, drop_rate: float) -> Matrix:
    return tuple(
        (
            (1 - drop_rate) * a[0] + drop_rate * b[0],
            (1 - drop_rate) * a[1] + drop_rate * b[1],
            (1 - drop_rate) * a[2] + drop_rate * b[2],
        )
        for a, b in zip(kept, dropped, strict=True)
    )


def _spectral_radius(matrix: Matrix) -> float:
    """Gelfand's formula with repeated squaring; norms are taken out on the way, so that nothing over- or underflows."""
    log_scale, power = 0.0, 1.0
    for _ in range(_SQUARINGS):
        size = math.sqrt(sum(x * x for row in matrix for x in row))
        if size == 0:
            return 0.0
        log_scale += math.log(size) / power
        scaled = tuple((row[0] / size, row[1] / size, row[2] / size) for row in matrix)
        columns = tuple(zip(*scaled, strict=True))
        matrix = tuple(
            (
                sum(a * b for a, b in zip(row, columns[0], strict=True)),
                sum(a * b for a, b in zip(row, columns[1], strict=True)),
                sum(a * b for a, b in zip(row, columns[2], strict=True)),
            )
            for row in scaled
        )
        power *= 2
    return math.exp(log_scale)
