"""COMM-COST against its definition, by trying everything on small swarms; bounds that hold; searches that repeat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_coordinator.planner.dtfm import order as orders
from starlings_coordinator.planner.dtfm.bound import lower_bound_s, slow_boundaries
from starlings_coordinator.planner.dtfm.matching import bottleneck_matching
from starlings_coordinator.planner.dtfm.problem import DtfmProblem, Grid
from starlings_coordinator.planner.dtfm.search import _level, _levels_of_swaps, search
from starlings_coordinator.planner.dtfm.seeds import neighbours_together, packed_runs, structured_grids

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 4), (4, 1)])


def drawn(seed: int, stages: int, replicas: int, regions: int = 0) -> DtfmProblem:
    """Links of any speed, or only by who is in which region."""
    rng = np.random.default_rng(seed)
    count = stages * replicas
    groups = rng.integers(0, regions, count) if regions else np.arange(count)
    size = max(count, regions)
    delay, rate = rng.uniform(0, 1, (size, size)), rng.lognormal(0, 1, (size, size))
    pairs = np.ix_(groups, groups)
    return DtfmProblem(
        np.maximum(delay, delay.T)[pairs],
        np.maximum(rate, rate.T)[pairs],
        stages,
        rng.uniform(0.1, 3),
        rng.uniform(0.1, 3),
    )


def islands(sizes: list[int], stages: int) -> DtfmProblem:
    """Machines of several devices with fast links inside, slow ones between; shuffled."""
    home = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    same = home[:, None] == home[None, :]
    return DtfmProblem(np.where(same, 0.0, 0.01), np.where(same, 100.0, 1.0), stages, 5.0, 4.0)


def comm_cost(problem: DtfmProblem, stages: list[list[int]]) -> float:
    """Written from the paper's definition, with every order and every matching."""

    def exchange(d: int, e: int) -> float:
        rate = problem.replicas * float(problem.bytes_per_s[d, e])
        return 2 * (float(problem.delay_s[d, e]) + problem.stage_bytes / rate)

    def transfer(d: int, e: int) -> float:
        return float(problem.delay_s[d, e]) + problem.boundary_bytes / float(problem.bytes_per_s[d, e])

    data = max(sum(exchange(d, e) for e in stage if e != d) for stage in stages for d in stage)

    def between(j: int, k: int) -> float:
        return min(
            max(transfer(d, e) for d, e in zip(stages[j], match, strict=True))
            for match in itertools.permutations(stages[k])
        )

    pairs = {(j, k): between(j, k) for j in range(len(stages)) for k in range(j)}
    pipeline = min(
        sum(pairs[max(j, k), min(j, k)] for j, k in itertools.pairwise(order))
        for order in itertools.permutations(range(len(stages)))
    )
    return data + 2 * pipeline


def partitions(devices: tuple[int, ...], size: int) -> Iterator[list[list[int]]]:
    if not devices:
        yield []
        return
    for others in itertools.combinations(devices[1:], size - 1):
        rest = tuple(d for d in devices[1:] if d not in others)
        for more in partitions(rest, size):
            yield [[devices[0], *others], *more]


def least_cost(problem: DtfmProblem) -> float:
    devices = tuple(range(problem.devices))
    return min(comm_cost(problem, stages) for stages in partitions(devices, problem.replicas))


def random_grid(problem: DtfmProblem, seed: int) -> Grid:
    order = np.random.default_rng(seed).permutation(problem.devices)
    return order.reshape(problem.stages, problem.replicas)


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES)
def test_an_arranged_grid_costs_what_the_definition_says(seed: int, shape: tuple[int, int]) -> None:
    problem = drawn(seed, *shape)
    grid = random_grid(problem, seed)
    arranged = problem.arranged(grid)
    assert sorted(map(sorted, arranged.tolist())) == sorted(map(sorted, grid.tolist()))
    cost = comm_cost(problem, grid.tolist())
    assert problem.grid_cost_s(arranged) == pytest.approx(cost)
    assert problem.grid_cost_s(grid) >= cost - 1e-9


@settings(max_examples=10, deadline=None)
@given(SEEDS, SHAPES, st.integers(0, 3))
def test_small_swarms_get_the_least_cost_there_is_and_no_bound_is_above_it(
    seed: int, shape: tuple[int, int], regions: int
) -> None:
    problem = drawn(seed, *shape, regions=regions)
    *_, found = search(problem, seed=seed, evaluations=1000)
    least = least_cost(problem)
    assert found.cost_s == pytest.approx(least)
    assert lower_bound_s(problem) <= least + 1e-9


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.sampled_from([(4, 4), (6, 3), (8, 8), (1, 9), (24, 2)]), st.integers(0, 5))
def test_bounds_hold_for_what_a_search_finds(seed: int, shape: tuple[int, int], regions: int) -> None:
    problem = drawn(seed, *shape, regions=regions)
    *_, found = search(problem, seed=seed, evaluations=300)
    assert lower_bound_s(problem) <= found.cost_s + 1e-9


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([(2, 2), (3, 4), (4, 3), (1, 6), (6, 1)]))
def test_swaps_are_worth_what_the_swapped_grid_is_worth(seed: int, shape: tuple[int, int]) -> None:
    problem = drawn(seed, *shape)
    grid = random_grid(problem, seed)

    def sums(of: Grid) -> np.ndarray:
        return np.asarray(problem.exchange_s[of[:, :, None], of[:, None, :]].sum(axis=2))

    row, column = divmod(seed % problem.devices, problem.replicas)
    rows, columns = np.divmod(np.arange(problem.devices), problem.replicas)
    rows, columns = rows[rows != row], columns[rows != row]
    if not len(rows):
        return
    levels = _levels_of_swaps(problem, grid, sums(grid), row, column, rows, columns)
    for level, r, c in zip(levels, rows, columns, strict=True):
        swapped = grid.copy()
        swapped[row, column], swapped[r, c] = grid[r, c], grid[row, column]
        transfers = problem.transfer_s[swapped[:-1], swapped[1:]]
        assert level == pytest.approx(_level(problem, sums(swapped)[None], transfers[None])[0])


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 6), st.booleans())
def test_matchings_have_the_lightest_heaviest_edge(seed: int, size: int, coarse: bool) -> None:
    weights = np.random.default_rng(seed).uniform(0, 1, (size, size))
    if coarse:
        weights = np.round(weights * 3)
    value, match = bottleneck_matching(weights)
    assert sorted(match) == list(range(size))
    assert weights[np.arange(size), match].max() == value
    assert value == min(
        max(weights[r, c] for r, c in enumerate(columns)) for columns in itertools.permutations(range(size))
    )


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 6))
def test_orders_are_the_shortest_and_good_ones_beyond(seed: int, places: int) -> None:
    cost = np.random.default_rng(seed).uniform(0, 1, (places, places))
    cost += cost.T
    shortest = min(orders.path_cost(cost, order) for order in itertools.permutations(range(places)))
    found = orders.best_order(cost)
    assert sorted(found) == list(range(places))
    assert orders.path_cost(cost, found) == pytest.approx(shortest)
    if places > 2:
        good = orders._improved(cost, orders._nearest(cost))
        assert sorted(good) == list(range(places))
        assert shortest - 1e-9 <= orders.path_cost(cost, good) <= 1.3 * shortest + 1e-9


@pytest.mark.parametrize(
    ("sizes", "stages"),
    [
        # Whole pipelines inside machines.
        ([8] * 4, 8),
        # Machines of half a pipeline, and single devices: these hold the last four stages.
        ([4] * 8 + [1] * 32, 8),
        # Nothing divides: runs of seven inside machines, the eighth device of a machine elsewhere.
        ([8] * 5 + [7, 7, 2], 8),
    ],
)
def test_structured_first_grids_reach_the_bound_of_pipelines(sizes: list[int], stages: int) -> None:
    problem = islands(sizes, stages)
    boundaries = slow_boundaries(np.array(sizes), stages, problem.replicas)
    slow_s, fast_s = float(problem.transfer_s.max()), float(problem.transfer_s[problem.transfer_s > 0].min())
    found = next(iter(sorted(search(problem, seed=1, evaluations=400), key=lambda f: f.cost_s)))
    costs = problem.boundary_costs_s(found.grid)
    assert costs.sum() == pytest.approx(boundaries * slow_s + (stages - 1 - boundaries) * fast_s)


def test_better_and_better_and_the_same_for_the_same_seed() -> None:
    problem = drawn(5, 4, 6)
    one = list(search(problem, seed=3, evaluations=2500))
    two = list(search(problem, seed=3, evaluations=2500))
    assert [(f.cost_s, f.evaluations, f.grid.tolist()) for f in one] == [
        (f.cost_s, f.evaluations, f.grid.tolist()) for f in two
    ]
    costs = [f.cost_s for f in one]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) > 2
    # A smaller budget gives a beginning of the same.
    few = list(search(problem, seed=3, evaluations=one[1].evaluations + 1))
    assert [f.cost_s for f in few[:2]] == costs[:2]
    assert len(list(search(problem, seed=3, evaluations=1))) == 1


def test_every_first_grid_holds_every_device_once() -> None:
    problem = islands([5, 5, 3, 3, 2, 2, 2, 1, 1], 4)
    grids = structured_grids(problem)
    assert len(grids) >= 8
    for grid in grids:
        assert sorted(grid.ravel().tolist()) == list(range(problem.devices))
    assert packed_runs([[0, 1], [2, 3]], 4, 1, 3) is None


def test_neighbours_stand_together_and_groups_are_found() -> None:
    home = np.array([0, 1, 2, 0, 1, 0, 2, 1, 0])
    order, groupings = neighbours_together(np.where(home[:, None] == home[None, :], 1.0, 5.0))
    assert [int(home[d]) for d in order] == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert sorted(map(sorted, groupings[0])) == [[0, 3, 5, 8], [1, 4, 7], [2, 6]]


@pytest.mark.parametrize(
    ("delay", "rate", "stages", "says"),
    [
        (np.zeros((4, 4)), np.ones((4, 3)), 2, "square"),
        (np.zeros((4, 4)), np.ones((4, 4)), 3, "evenly"),
        (np.zeros((4, 4)), np.zeros((4, 4)), 2, "bandwidth"),
        (np.full((4, 4), np.nan), np.ones((4, 4)), 2, "delay"),
        (np.triu(np.ones((4, 4))), np.ones((4, 4)), 2, "way back"),
    ],
)
def test_impossible_problems_are_refused(delay: np.ndarray, rate: np.ndarray, stages: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DtfmProblem(delay, rate, stages, 1.0, 1.0)
