"""Real engine processes over the pipe and over mTLS: the same training as one plain process, and the same
bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from starlings_job.reference import train_reference
from starlings_protos.messages import Span, Stage
from support.scripted_swarm import ScriptedSwarm, prepare_job

torch.set_num_threads(1)
# micro: embed, four layers, head.
THREE = (Stage(0, 1), Stage(2, 3), Stage(4, 5))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


async def test_three_engines_train_as_one_plain_process_does(job: Path):
    """Two workers share the middle stage, one holds both ends; one runs without vector instructions."""
    reference = train_reference(job, 5)
    async with ScriptedSwarm(job) as swarm:
        await swarm.start({}, {"ATEN_CPU_CAPABILITY": "default"}, {})
        classes = {e.numeric_class for e in swarm.engines}
        assert len(classes) == 2
        a, b, c = (e.id for e in swarm.engines)
        ready = await swarm.assign(THREE, {a: Span(0, 1), b: Span(1, 2), c: Span(0, 2)})
        assert len({r.block_digests["layers.1"] for r in ready.values()}) == 1
        losses = [(await swarm.step(step))[0] for step in range(5)]
        assert losses == pytest.approx(reference.losses, rel=1e-5)
        reports = await swarm.state(5)
        by_block: dict[str, set[str]] = {}
        for report in reports:
            assert report.version == 5
            for block, digest in report.block_digests.items():
                by_block.setdefault(block, set()).add(digest)
        assert set(by_block) == set(swarm.job.description.blocks)
        assert all(len(digests) == 1 for digests in by_block.values()), by_block
