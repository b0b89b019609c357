"""How a real curve is compared with that of the same job in one process."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from convergence_swarm import curve_difference, job_text

from starlings_job.spec import parse_job


def test_a_curve_is_compared_in_windows_after_its_first_quarter() -> None:
    losses = [4.0 - 0.01 * step for step in range(120)]
    # Whatever is in the first quarter, and in which order a window's losses come.
    real = {step: 9.0 if step < 30 else losses[step ^ 1] for step in range(120)}
    assert curve_difference(real, losses) == pytest.approx(0.0, abs=1e-9)
    assert curve_difference({step: 1.02 * loss for step, loss in enumerate(losses)}, losses) == pytest.approx(
        0.02
    )
    assert math.isnan(curve_difference({3: 1.0}, losses))


def test_replicas_of_pairs_step_after_each_microbatch_as_in_one_process() -> None:
    job = parse_job(job_text("pairs", 240))
    assert job.train.microbatches_per_inner_step == 1
    assert job.pair_rules is not None
    assert parse_job(job_text("allreduce", 240)).pair_rules is None
