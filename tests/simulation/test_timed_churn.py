"""When workers are there, by traces and by lifetimes; and what a trace file may look like."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_protos.messages import WorkerId
from starlings_simulator.timed.churn import TraceError, by_lifetimes, by_trace, load_trace
from starlings_simulator.timed.machines import Stay

WORKERS = tuple(WorkerId(name) for name in "abc")


def there(stays: tuple[Stay, ...], at_s: float) -> set[str]:
    return {stay.worker_id for stay in stays if stay.from_s <= at_s < stay.until_s}


def overlaps(stays: tuple[Stay, ...]) -> bool:
    own: dict[str, list[Stay]] = {}
    for stay in stays:
        own.setdefault(stay.worker_id, []).append(stay)
    ordered = [sorted(found, key=lambda s: s.from_s) for found in own.values()]
    return any(one.until_s > two.from_s for found in ordered for one, two in pairwise(found))


def test_nodes_of_a_trace_are_played_by_workers_and_the_trace_begins_again() -> None:
    trace = [(100.0, 1, "x"), (100.0, 1, "y"), (160.0, -1, "x"), (180.0, 1, "z"), (200.0, -1, "y")]
    stays = by_trace(trace, WORKERS, 150.0)
    assert there(stays, 10) == {"a", "b"}
    assert there(stays, 70) == {"b"}
    assert there(stays, 90) == {"b", "c"}
    # "z" stays, "x" and "y" come again.
    assert len(there(stays, 120)) == 3
    assert not overlaps(stays)


def test_more_nodes_than_workers_are_left_out() -> None:
    trace = [(float(n), 1, f"n{n}") for n in range(9)] + [(20.0, -1, "n0"), (21.0, 1, "late")]
    stays = by_trace(trace, WORKERS, 21.0)
    assert there(stays, 10) == set(WORKERS)
    assert len(there(stays, 20.5)) == 2


@given(st.integers(0, 1000), st.floats(60.0, 1e5))
def test_lifetimes_alternate_and_do_not_overlap(seed: int, lifetime_s: float) -> None:
    stays = by_lifetimes(dict.fromkeys(WORKERS, lifetime_s), 20 * lifetime_s, seed)
    assert not overlaps(stays)
    assert all(stay.until_s > stay.from_s for stay in stays)
    assert stays == by_lifetimes(dict.fromkeys(WORKERS, lifetime_s), 20 * lifetime_s, seed)


def test_workers_are_there_two_thirds_of_the_time_and_some_always() -> None:
    workers = {WorkerId(f"w{n}"): 3600.0 for n in range(200)}
    stays = by_lifetimes({**workers, WorkerId("always"): math.inf}, 86400.0, 3)
    mean = sum(len(there(stays, at_s)) for at_s in range(0, 86400, 600)) / 144
    assert mean == pytest.approx(200 * 2 / 3 + 1, rel=0.05)
    assert Stay(WorkerId("always")) in stays


def test_both_forms_of_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([[0, 1, "a"], [60, -1, "a"]]))
    assert load_trace(path) == [(0.0, 1, "a"), (60.0, -1, "a")]
    path.write_text(json.dumps({"events": [[0, 2], [30, 1], [60, 3]]}))
    changes = load_trace(path)
    assert [(at_s, change) for at_s, change, _ in changes] == [(0, 1), (0, 1), (30, -1), (60, 1), (60, 1)]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "7", '[["x", 1]]', "[[0]]", "[[1e999, 2]]", "[[true, 1]]", '{"events": 3}', "[" * 9000],
)
def test_what_is_no_trace_says_what_one_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceError, match="live"):
        load_trace(path)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        load_trace(tmp_path / "nowhere.json")
