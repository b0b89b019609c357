"""A seed is a run: the same on every machine, in every process, with every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from starlings_simulator import replay
from starlings_simulator.cores import simulation_of
from starlings_simulator.scenario import draw

SEED = 8


def replayed(hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "starlings_simulator.replay", "--seed", str(SEED), "--verdict"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_one_seed_replays_exactly_whatever_the_hash_seed() -> None:
    here = replay.summary(simulation_of(draw(SEED)).run())
    assert replayed("1") == here
    assert replayed("2") == here


def test_seeds_differ() -> None:
    digests = {simulation_of(draw(seed)).run().transcript.digest() for seed in (1, 2, 3)}
    assert len(digests) == 3


def test_the_transcript_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["--seed", str(SEED), "--calm", "--only", "StepCommitted"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("<- ControlReceived(message=StepCommitted(step=1" in line for line in lines)
    assert lines[-1].startswith(f"seed {SEED}: done")
