"""For every test: in which order files are run, and how Hypothesis judges."""

from __future__ import annotations

from itertools import groupby

import grpc.aio
import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does; speed is for benchmarks/.
settings.register_profile("starlings", deadline=None)
settings.load_profile("starlings")

# Held until the process ends: when the last channel goes, grpc.aio waits for its poller, and for ever if the garbage
# collector finds that channel after the event loop of its test.
grpc.aio.init_grpc_aio()

SWARMS = "tests/e2e/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the files whose tests start whole swarms evenly among the first three quarters of the others.

    Files are handed out in this order to several test processes: two swarms at once would take longer than one beside
    tests that mostly wait, and a swarm at the very end would keep the others waiting. Within a file nothing moves.
    """
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    swarms = [tests for tests in files if tests[0].nodeid.startswith(SWARMS)]
    ordered = [tests for tests in files if not tests[0].nodeid.startswith(SWARMS)]
    distance = 0.75 * len(ordered) / max(1, len(swarms))
    for number, tests in reversed(list(enumerate(swarms))):
        ordered.insert(round(number * distance), tests)
    items[:] = [item for tests in ordered for item in tests]
