"""What the report of a short demo must say, wherever the demo was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check_outcome(outcome: dict[str, Any]) -> None:
    """Everything that the report promises, for a run of six steps with four workers."""
    assert outcome["steps"] == 6
    assert len(outcome["loss_curve"]) == 6
    assert outcome["samples_leased"] == outcome["samples_trained"] > 0
    assert outcome["samples_lost"] == 0
    assert outcome["validation_loss"] > 0
    assert 2.3 < outcome["bigram_entropy"] < outcome["unigram_entropy"] < 4
    assert outcome["tokens_per_second"] > 0
    assert {"join", "plan", "evaluation", "checkpoint", "done"} <= {
        event["kind"] for event in outcome["events"]
    }
    assert {"forward", "backward", "exchange"} <= {
        kind for kind, sent in outcome["bytes_sent"].items() if sent > 0
    }
    check_plan(outcome)
    model = Path(outcome["export_path"])
    assert {"config.json", "model.safetensors"} <= {p.name for p in model.iterdir()}


def check_plan(outcome: dict[str, Any]) -> None:
    """Three classes, unlike spans, a stage with two holders, a worker with several stages."""
    workers, plan = outcome["workers"], outcome["plan"]
    assert isinstance(workers, list)
    assert isinstance(plan, dict)
    assert len(workers) == 4
    assert len({w["class"] for w in workers}) == 3
    spans = [tuple(w["span"]) for w in workers]
    assert len(set(spans)) >= 2
    assert any(last > first for first, last in spans)
    holders = [sum(first <= s <= last for first, last in spans) for s in range(len(plan["stages"]))]
    assert min(holders) >= 1
    assert max(holders) >= 2
    shared = [w for w in workers if w["gossip_peers"]]
    assert len(shared) >= 2
