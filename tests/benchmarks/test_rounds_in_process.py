"""Rounds between local steps in one process: presets exchange what they say, when they say, for the bytes they say."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from convergence_rows import PRESETS, all_rows, preset_rules
from inprocess.local import train_locally
from inprocess.rounds import Course, Rounds, rounds_of
from inprocess.swarm import Setup, Swarm
from inprocess.text import Text
from inprocess.training import train_synchronously

from starlings_job.exchange_rules import Phase
from starlings_job.exchange_traffic import job_bytes
from starlings_job.model import initial_state
from starlings_job.sections import TrainSection
from starlings_worker.optimizers.adam import AdamW

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
EVERY_TWO = {"main": Phase(2, 1.0, 0.0)}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(tmp_path_factory.mktemp("text"), held_out=8, source=f"{DOCUMENTS}/*.md")


def make_swarm(text: Text, replicas: int, **chosen: Any) -> Swarm:
    return Swarm(
        text.description,
        dict(initial_state(text.description, 0)),
        Setup(AdamW(), replicas=replicas, **chosen),
    )


def train(text: Text, swarm: Swarm, rounds: Rounds, steps: int, **chosen: Any) -> list[float]:
    replicas = len(swarm.replicas)
    section = TrainSection(batch=replicas, microbatch=1, lr=1e-3)
    return train_locally(swarm, text, section, rounds, seed=0, steps=steps, **chosen)


def weights(swarm: Swarm, stage: int = 0) -> list[torch.Tensor]:
    return [vector.parameters for w in swarm.replicas_of(stage) for vector in w.held.vectors.values()]


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "allreduce"])
def test_a_preset_sends_what_its_rules_say(text: Text, preset: str) -> None:
    """Four steps of two replicas, and the exact average at the end; sizes are estimates for sparse codecs."""
    rules = preset_rules(preset, **({} if preset in ("gossip", "noloco") else EVERY_TWO))  # type: ignore[arg-type]
    if preset == "noloco":
        rules = preset_rules("noloco", main=Phase(2, 0.7, 0.5))
    if preset in ("pairs", "palsgd"):
        rules = preset_rules(preset, swaps=1, warmup=None, main=Phase(2, 0.7, 0.9))  # type: ignore[arg-type]
    swarm = make_swarm(text, 2, gradient_codec=rules.codec if preset == "diloco" else "exact")
    rounds = rounds_of(swarm, rules, Course(4, 0))
    losses = train(text, swarm, rounds, 4)
    assert len(losses) == 4
    assert rounds.rounds == (4 if preset == "gossip" else 2)
    assert rounds.refused == 0
    rounds.finish()
    first, second = weights(swarm)
    assert torch.equal(first, second)
    estimate = job_bytes(rules, first.numel(), 2, 4)
    assert rounds.sent_bytes / 2 == pytest.approx(estimate, rel=0.02)


def test_with_h_one_everything_exact_pairs_of_two_stay_equal(text: Text) -> None:
    """Both replicas have the mean after each round, as diloco with eta 1 and mu 0 has."""
    found = {}
    for preset, swaps in (("pairs", {"swaps": 1, "warmup": None, "momentum_codec": None}), ("diloco", {})):
        rules = preset_rules(preset, codec="exact", main=Phase(1, 1.0, 0.0), **swaps)  # type: ignore[arg-type]
        swarm = make_swarm(text, 2)
        train(text, swarm, rounds_of(swarm, rules, Course(3, 0)), 3)
        first, second = weights(swarm)
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)
        found[preset] = first
    torch.testing.assert_close(found["pairs"], found["diloco"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("swaps", [1, 2])
def test_a_swap_that_stands_late_keeps_the_steps_taken_meanwhile(text: Text, swaps: int) -> None:
    """The slot is after step 3, its swaps stand in steps 4 to 6: the replicas' mean moves by their own steps alone."""
    rules = preset_rules(
        "pairs", codec="exact", momentum_codec=None, warmup=None, main=Phase(3, 1.0, 0.0), swaps=swaps
    )
    swarm = make_swarm(text, 4)
    rounds = rounds_of(swarm, rules, Course(5, 0, 0.9))
    train(text, swarm, rounds, 4)
    apart = torch.stack(weights(swarm)).double()
    rounds.finish()
    together = weights(swarm)
    assert float((apart - apart.mean(0)).norm()) > 1e-3
    for one in together:
        torch.testing.assert_close(one, apart.mean(0).float(), rtol=1e-6, atol=1e-7)


def test_a_pipeline_of_one_stage_has_no_delay(text: Text) -> None:
    found = []
    for delayed in (False, True):
        swarm = make_swarm(text, 2, recompute=delayed)
        rounds = rounds_of(swarm, preset_rules("diloco", codec="exact", **EVERY_TWO), Course(3, 0))
        found.append(train(text, swarm, rounds, 3, delayed=delayed))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_gradients_are_as_old_as_the_pipeline_is_long(text: Text) -> None:
    swarm = make_swarm(text, 2, stages=3, recompute=True)
    rounds = rounds_of(swarm, preset_rules("pairs", swaps=1, warmup=None), Course(6, 0))
    losses = train(text, swarm, rounds, 6, delayed=True)
    # The first loss comes when the first microbatch has come to the last stage; stage 0 hears of it two ticks later.
    assert len(losses) == 4
    assert [swarm.replicas_of(stage)[0].held.version for stage in range(3)] == [2, 3, 4]


def test_local_steps_see_the_samples_that_a_synchronous_step_sees(text: Text) -> None:
    """The first losses, before anything was updated, are those of synchronous training."""
    section = TrainSection(batch=2, microbatch=1, lr=1e-3)
    together = train_synchronously(make_swarm(text, 2), text, section, seed=0, steps=1)
    swarm = make_swarm(text, 2)
    apart = train(text, swarm, rounds_of(swarm, preset_rules("diloco"), Course(1, 0)), 1)
    assert apart == pytest.approx(together, rel=1e-3)


def test_every_row_has_a_name_and_settings_of_its_own() -> None:
    rows = all_rows()
    assert len({row.key for row in rows}) == len(rows)
    for one, other in combinations([row for row in rows if row.group == "parts"], 2):
        assert one.settings != other.settings, f"{one.name} is {other.name}"
