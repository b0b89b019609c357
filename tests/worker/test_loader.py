"""What a newcomer takes from a donor whose stages have steps of their own, through snapshots, frames and the loader."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from starlings_job.prepared import load_prepared, load_profile
from starlings_protos import data_pb2
from starlings_protos.messages import Peer, Stage, WorkerId
from starlings_protos.state_transfer import state_frames
from starlings_simulator.driver import assignment
from starlings_worker.computer import Computer
from starlings_worker.core.effects import Load, StageStep, StepStages, TakeCopy
from starlings_worker.core.events import SpanLoaded
from starlings_worker.device import Device
from starlings_worker.emulation import Throttle
from starlings_worker.loader import Donors, Loader
from starlings_worker.meters import Meters
from support.scripted_job import prepare_job

T = TypeVar("T")
# micro: embed, four layers, head.
STAGES = (Stage(0, 2), Stage(3, 5))
DONOR = WorkerId("wa")


@dataclass
class FromComputer:
    computer: Computer

    async def fetch_state(
        self, donor: WorkerId, request: data_pb2.StateRequest
    ) -> AsyncIterator[data_pb2.Frame]:
        assert donor == DONOR
        shelf = self.computer.snapshots
        blocks = [shelf.serve(request.version, b, optimizer=request.optimizer) for b in request.blocks]
        for frame in state_frames(blocks, request.offset):
            yield frame


async def on_device(work: Callable[[], T]) -> T:
    return work()


@pytest.mark.parametrize("steps", [{0: 3, 1: 1}, {0: 0, 1: 0}])
async def test_the_optimizer_counts_on_where_its_donor_was(tmp_path: Path, steps: dict[int, int]) -> None:
    directory = prepare_job(tmp_path, more_train='schedule = "async"')
    job, profile = load_prepared(directory), load_profile(directory)

    def computer() -> Computer:
        return Computer(DONOR, job, Device(torch.device("cpu"), False), Throttle(1.0), Meters())

    def load(version: int) -> Load:
        place = assignment((0, 1), {}, stages=2, step=version)
        return Load(replace(place, stages=STAGES, donors=(Peer(DONOR),)))

    donor = computer()
    held = donor.prepare(load(0))
    donor.install(held, load(0))
    for stage, count in steps.items():
        for number in range(1, count + 1):
            held.vectors[f"stage:{stage}"].gradient.fill_(0.5)
            donor.execute(StepStages((StageStep(stage, number, 0.0),), 0.01, 0.0))
    assert held.optimizer_steps == steps
    # The job is much further than any of its replicas.
    donor.execute(TakeCopy(90))

    newcomer = computer()
    source = Donors(FromComputer(donor), (Peer(DONOR),))
    loader = Loader(newcomer, source, profile, on_device, lambda *_: None)
    loaded = await loader.load(load(90))
    assert isinstance(loaded, SpanLoaded), loaded
    assert newcomer.held is not None
    assert newcomer.held.block_digests() == held.block_digests()
    # 0 on the wire means the version: a replica that never stepped has no bias to correct.
    expected = {stage: count or 90 for stage, count in steps.items()}
    assert loaded.optimizer_steps == newcomer.held.optimizer_steps == expected
    # And so it steps as its donor does, to the bit.
    for one in (donor, newcomer):
        for stage, count in expected.items():
            one.held.vectors[f"stage:{stage}"].gradient.fill_(0.25)  # type: ignore[union-attr]
            one.execute(StepStages((StageStep(stage, count + 1, 0.0),), 0.01, 0.0))
    assert newcomer.held.block_digests() == held.block_digests()
