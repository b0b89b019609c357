"""Jobs that are not the usual ones: an image classifier, and a fleet that is too small at first."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarms import LiveSwarm, job_text, prepared_job, spans


@pytest.mark.slow
def test_a_classifier_trains_over_a_pipeline(tmp_path: Path) -> None:
    text = job_text(
        64 * 12,
        model={"preset": "shapes"},
        data={"source": "shapes", "sequence_length": 1, "held_out": 32},
        train={"batch": 64, "microbatch": 16, "lr": 3e-3},
        swarm={"min_workers": 2},
    )
    with LiveSwarm.of(prepared_job(tmp_path, text), tmp_path) as swarm:
        swarm.join()
        swarm.join()
        reply = swarm.finish(within_s=180)
    assert reply.samples_trained == 64 * 12
    assert reply.samples_lost == 0
    assert reply.has_validation_loss
    assert reply.sample_text == ""


@pytest.mark.slow
def test_a_job_waits_for_room_and_starts_when_somebody_joins(tmp_path: Path) -> None:
    with LiveSwarm.of(prepared_job(tmp_path, job_text(8 * 32 * 4)), tmp_path) as swarm:
        swarm.join("--memory", "1500kB")
        waiting = swarm.wait(lambda r: "needs" in r.waiting_for, within_s=120)
        assert waiting.phase == "gathering"
        assert waiting.waiting_for.startswith("waiting for")
        swarm.join()
        reply = swarm.wait(lambda r: r.phase in ("training", "finishing", "done"), within_s=120)
        assert any(span is not None for span in spans(reply))
        assert swarm.finish(within_s=120).samples_lost == 0
