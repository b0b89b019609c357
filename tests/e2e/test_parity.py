"""A synchronous swarm of real processes computes what a plain single-process loop computes on the same samples.

Four workers, three or more stages, exact codecs, float32: every loss, and the weights as a whole, over twenty steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from starlings_job.checkpoint import load_manifest, read_block
from starlings_job.model import torch_tensor
from starlings_job.prepared import checkpoint_url, load_prepared
from starlings_job.reference import ReferenceRun, train_reference
from starlings_job.state import PARAMETER
from swarms import LiveSwarm, job_text, prepared_job, spans

STEPS, BATCH, LENGTH = 20, 8, 32

_DECODER: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# A quarter of a sample: local layers forget what global ones see.
_WINDOW: Mapping[str, Any] = {"sliding_window": 8}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **_DECODER},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 256,
        "n_embd": 48,
        "n_inner": 112,
        "n_layer": 5,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
OTHER_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**_DECODER, **_WINDOW, "head_dim": 16, "use_sliding_window": True, "max_window_layers": 2},
    # Eight small experts have about the parameters of one dense network.
    "qwen3_moe": {
        **_DECODER,
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
    },
    "mistral": {**_DECODER, **_WINDOW},
    "olmo2": {**_DECODER, "rope_theta": 5e5},
    "phi3": {**_DECODER, **_WINDOW, "partial_rotary_factor": 0.5},
    "gpt_neox": {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"},
    "smollm3": {**_DECODER, "no_rope_layer_interval": 2},
    "gemma3_text": {
        **_DECODER,
        **_WINDOW,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 30.0,
    },
}


RATES: Mapping[str, Mapping[str, float]] = {"sgd": {"lr": 0.1, "momentum": 0.9}}


@dataclass(frozen=True)
class Cell:
    family: str
    tied: bool
    optimizer: str

    def __str__(self) -> str:
        return f"{self.family}-{'tied' if self.tied else 'untied'}-{self.optimizer}"

    @property
    def tolerance(self) -> float:
        """Relative. AdamW turns rounding noise into steps where gradients are tiny: it divides by their own size.

        The reference of Muon iterates in bfloat16, and that of 8-bit moments has float32 ones.
        """
        return {"sgd": 1e-5, "adamw": 1e-4, "nadam": 1e-4, "muon": 2e-2, "adamw8bit": 2e-2}[self.optimizer]


# Tied weights and AdamW. GPT-2 and SGD are compared by tests/worker/test_engine_processes.py, without a coordinator.
FAST = (Cell("llama", True, "adamw"),)
GRID = tuple(
    cell
    for family in CONFIGS
    for tied in (True, False)
    for optimizer in ("sgd", "adamw")
    if (cell := Cell(family, tied, optimizer)) not in FAST
)


# Each of the other families once; tied where that is its habit.
OTHERS = (
    Cell("qwen3", True, "adamw"),
    Cell("qwen3_moe", False, "sgd"),
    Cell("mistral", False, "adamw"),
    Cell("olmo2", False, "sgd"),
    Cell("phi3", False, "adamw"),
    Cell("gpt_neox", False, "sgd"),
    Cell("smollm3", True, "adamw"),
    Cell("gemma3_text", True, "sgd"),
)


@pytest.mark.parametrize("cell", FAST, ids=str)
def test_representative_cells(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", GRID, ids=str)
def test_the_whole_grid(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


OPTIMIZERS = (
    Cell("llama", True, "nadam"),
    Cell("gpt2", False, "nadam"),
    Cell("llama", True, "muon"),
    Cell("llama", False, "adamw8bit"),
)


@pytest.mark.slow
@pytest.mark.parametrize("cell", OPTIMIZERS, ids=str)
def test_the_other_optimizers(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", OTHERS, ids=str)
def test_the_other_families(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


def prepare(cell: Cell, folder: Path) -> Path:
    config = {**CONFIGS, **OTHER_CONFIGS}[cell.family]
    (folder / "config.json").write_text(
        json.dumps({"model_type": cell.family, **config, "tie_word_embeddings": cell.tied})
    )
    rate = RATES.get(cell.optimizer, {"lr": 3e-3})
    text = job_text(
        STEPS * BATCH * LENGTH,
        model={"config": "config.json"},
        data={"sequence_length": LENGTH},
        train={"batch": BATCH, "microbatch": 1, "optimizer": cell.optimizer, "clip": 0.5, **rate},
        pipeline={"codec": "exact"},
        exchange={"codec": "exact"},
        swarm={"min_workers": 4},
    )
    return prepared_job(folder, text)


def check(cell: Cell, folder: Path) -> None:
    job = prepare(cell, folder)
    with LiveSwarm.of(job, folder) as swarm:
        # Nobody can hold everything; the last one computes with other instructions than the others.
        swarm.join("--precision", "fp32", "--memory", "2.8MB")
        swarm.join("--precision", "fp32", "--memory", "2.8MB")
        swarm.join("--precision", "fp32", "--memory", "1.4MB")
        swarm.join("--precision", "fp32", "--memory", "2MB", environment={"ATEN_CPU_CAPABILITY": "default"})
        reply = swarm.finish(within_s=240)
        events = list(swarm.history.events)
        losses = [point.loss for point in swarm.history.points]
    assert len(reply.stages) >= 3
    held = [span for span in spans(reply) if span is not None]
    assert len(held) == 4
    assert len(set(held)) > 1, "the spans are all alike"
    assert max(sum(first <= stage <= last for first, last in held) for stage in range(len(reply.stages))) >= 2
    assert reply.samples_lost == 0
    assert reply.samples_leased == reply.samples_trained == STEPS * BATCH
    # Every replica had the same bits to the end: otherwise the states would have been averaged.
    assert [event.text for event in events if event.kind in ("average", "step_restarted", "lost")] == []

    reference = train_reference(job, STEPS)
    assert len(losses) == STEPS
    off = [abs(ours - theirs) / theirs for ours, theirs in zip(losses, reference.losses, strict=True)]
    distance = relative_distance(job, reference)
    print(f"{cell}: {len(reply.stages)} stages, loss {losses[0]:.3f} to {losses[-1]:.3f}, ", end="")
    print(f"at most {max(off):.1e} off; weights {distance:.1e} off")
    for step, (ours, theirs) in enumerate(zip(losses, reference.losses, strict=True)):
        assert abs(ours - theirs) / theirs < cell.tolerance, f"loss of step {step}: {ours} against {theirs}"
    assert distance < cell.tolerance


def relative_distance(job: Path, reference: ReferenceRun) -> float:
    """|swarm - reference| / |reference| over all weights of the last version."""
    url = checkpoint_url(job, load_prepared(job))
    manifest = load_manifest(url, STEPS)
    difference = norm = 0.0
    blocks = {block for block, _ in reference.state}
    for block in blocks:
        ours = read_block(url, STEPS, block, optimizer=False, manifest=manifest)
        for (theirs_block, name), theirs in reference.state.items():
            if theirs_block != block or PARAMETER + name not in ours:
                continue
            mine = torch_tensor(ours[PARAMETER + name]).double()
            difference += float((mine - theirs.double()).square().sum())
            norm += float(theirs.double().square().sum())
    assert norm > 0
    return math.sqrt(difference / norm)
