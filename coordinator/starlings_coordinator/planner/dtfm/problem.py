"""COMM-COST, the objective of DT-FM (Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous
Environments", NeurIPS 2022, arXiv 2206.01288, section 3): what one batch costs in communication.

N equal devices form K stages of D = N / K replicas each. With delay a[d, e] in seconds and bandwidth b[d, e]:

    COMM-COST = DATAP + PIPELINEP
    DATAP     = max over stages, over devices d of the stage, of the sum over the stage's other devices e of
                2 (a[d, e] + stage_bytes / (D b[d, e]))           (reduce-scatter and gather of gradients, a D-th each)
    PIPELINEP = 2 min over orders of the stages of the sum over neighbours in the order of
                min over perfect matchings of the max over pairs of (a[d, e] + boundary_bytes / b[d, e])
                (activations ahead, their gradients back; each pipeline passes from a device to its match)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from starlings_coordinator.planner.dtfm.matching import bottleneck_matching
from starlings_coordinator.planner.dtfm.order import best_order

Floats = npt.NDArray[np.float64]
# [k, r]: the device that holds the k-th stage of pipeline r. Every device is there once.
Grid = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DtfmProblem:
    """`delay_s[d, e]` and `bytes_per_s[d, e]` are symmetric; what stands on their diagonals means nothing.

    `stage_bytes`: gradients of one stage. `boundary_bytes`: what one pipeline sends across one boundary per batch.

    Raises:
        ValueError: matrices that are not square, alike, finite and symmetric, or devices that do not fill the stages.
    """

    delay_s: Floats
    bytes_per_s: Floats
    stages: int
    stage_bytes: float
    boundary_bytes: float

    def __post_init__(self) -> None:
        shape = self.delay_s.shape
        if len(shape) != 2 or shape[0] != shape[1] or self.bytes_per_s.shape != shape:
            raise ValueError(
                f"delay and bandwidth must be square and alike: {shape}, {self.bytes_per_s.shape}"
            )
        if self.stages < 1 or shape[0] % self.stages or not shape[0]:
            raise ValueError(f"{shape[0]} devices do not fill {self.stages} stages evenly")
        beside = ~np.eye(shape[0], dtype=bool)
        for name, matrix, least in (
            ("delay", self.delay_s, 0.0),
            ("bandwidth", self.bytes_per_s, np.nextafter(0, 1)),
        ):
            values = matrix[beside]
            if not np.isfinite(values).all() or (values < least).any():
                raise ValueError(f"a {name} is negative, zero or not a number")
            if not np.array_equal(matrix, matrix.T):
                raise ValueError(f"the {name} from one device to another must be that of the way back")

    @property
    def devices(self) -> int:
        return len(self.delay_s)

    @property
    def replicas(self) -> int:
        return self.devices // self.stages

    @cached_property
    def exchange_s(self) -> Floats:
        """[d, e]: what d spends on e when both are replicas of a stage; 0 on the diagonal."""
        return self._without_diagonal(
            2 * (self.delay_s + self.stage_bytes / (self.replicas * self.bytes_per_s))
        )

    @cached_property
    def transfer_s(self) -> Floats:
        """[d, e]: one way across a boundary between d and e; 0 on the diagonal."""
        return self._without_diagonal(self.delay_s + self.boundary_bytes / self.bytes_per_s)

    def _without_diagonal(self, matrix: Floats) -> Floats:
        return np.where(np.eye(self.devices, dtype=bool), 0.0, matrix)

    # ------------------------------------------------------------------ cost

    def exchange_cost_s(self, grid: Grid) -> float:
        """DATAP; the order of rows and within rows does not matter."""
        inside = self.exchange_s[grid[:, :, None], grid[:, None, :]]
        return float(inside.sum(axis=2).max())

    def boundary_costs_s(self, grid: Grid) -> Floats:
        """[k]: the slowest pipeline's transfer across boundary k, pipelines being the columns of `grid`."""
        return np.asarray(self.transfer_s[grid[:-1], grid[1:]].max(axis=1))

    def grid_cost_s(self, grid: Grid) -> float:
        """With stages in this order and pipelines as the columns say: never below COMM-COST of the grid's stages."""
        return self.exchange_cost_s(grid) + 2 * float(self.boundary_costs_s(grid).sum())

    def arranged(self, grid: Grid) -> Grid:
        """The same stages in the best order, with the best matchings: `grid_cost_s` of it is COMM-COST.

        The order is the best there is up to `order.EXACT_MOST` stages, else good.
        """
        cost, match = np.zeros((self.stages, self.stages)), {}
        for j in range(self.stages):
            for k in range(j + 1, self.stages):
                weights = self.transfer_s[np.ix_(grid[j], grid[k])]
                cost[j, k], match[j, k] = bottleneck_matching(weights)
                cost[k, j], match[k, j] = cost[j, k], np.argsort(match[j, k])
        order = best_order(cost)
        column = np.arange(self.replicas)
        rows = [grid[order[0]]]
        for before, after in pairwise(order):
            column = match[before, after][column]
            rows.append(grid[after][column])
        return np.stack(rows)
