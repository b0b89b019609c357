"""Two engines' data planes exchange in a group over gRPC and mTLS: every codec, and payloads that mean harm."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count

import pytest
import pytest_asyncio
import torch

from codec_cases import EVERY
from starlings_compression.codec import make_codec
from starlings_compression.spec import parse_spec
from starlings_coordinator.core.grouping.round import GroupRound
from starlings_job.codecs import linear_rank, return_spec
from starlings_job.exchange_rules import ExchangeRules, Phase, rules_for
from starlings_protos import data_pb2, frames
from starlings_protos.group_messages import GroupHeld, GroupLeg, GroupMatched, GroupPrepared, GroupSeat
from starlings_protos.messages import Refusal, Span, Stage
from starlings_protos.pair_messages import RoundOutcome, SwapResult
from starlings_worker import wire
from starlings_worker.core.groups.work import GroupKey
from starlings_worker.group_device import GroupDevice
from starlings_worker.links import PushError
from starlings_worker.stage import stage_group
from support.pair_engines import INCARNATION, PairEngine, pair_engines
from support.scripted_job import prepare_job
from support.scripted_swarm import ScriptedSwarm

pytestmark = pytest.mark.asyncio(loop_scope="module")
STAGES = (Stage(0, 2), Stage(3, 5))
SPAN = Span(0, 0)
ETA, MU = 0.7, 0.9
WEIGHTS = (300.0, 100.0)
# Its factors need a sum, and a group refuses some.
CODECS = [codec for codec in EVERY if linear_rank(parse_spec(codec)) is None]
_ROUNDS = count(1000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[PairEngine]]:
    job = prepare_job(
        tmp_path_factory.mktemp("jobs"), more_train='schedule = "async"', more_exchange='preset = "diloco"'
    )
    async with ScriptedSwarm(job) as swarm, pair_engines(swarm, SPAN, STAGES) as engines:
        yield sorted(engines, key=lambda engine: engine.id)


def begin(engine: PairEngine, weights: torch.Tensor, rules: ExchangeRules) -> GroupDevice:
    held = engine.life.computer.held
    assert held is not None
    engine.weights().copy_(weights)
    device = GroupDevice(rules, {0: held.vectors[stage_group(0)]})
    engine.life.computer.groups = device
    rounds = engine.life.core.meeting.rounds
    assert rounds is not None
    rounds.hold(SPAN)
    engine.said.clear()
    return device


def draws(engines: Sequence[PairEngine], seed: int) -> list[torch.Tensor]:
    """Weights to begin with, equal on both, and the steps of each."""
    generator = torch.Generator().manual_seed(seed)
    size = engines[0].weights().numel()
    return [torch.randn(size, generator=generator) * scale for scale in (0.1, 0.01, 0.01)]


def match_of(engines: Sequence[PairEngine], anchor: str, slot: int = 5) -> GroupMatched:
    seats = tuple(
        GroupSeat(engine.id, INCARNATION, 0.5, weight)
        for engine, weight in zip(engines, WEIGHTS, strict=True)
    )
    return GroupMatched(0, slot, 0, next(_ROUNDS), seats, anchor, 20.0, (), engines[0].id)


async def play(engines: Sequence[PairEngine], match: GroupMatched) -> list[RoundOutcome]:
    """The coordinator's part, until both have told what came of the round."""
    loop = asyncio.get_running_loop()
    for engine in engines:
        engine.clock(match.slot, 0.3)
        engine.life.control(match)
    round_ = GroupRound(match, loop.time() + 0.3)
    heard: list[set[int]] = [set() for _ in engines]
    async with asyncio.timeout(60):
        while True:
            told = round_.look(loop.time())
            for engine, known in zip(engines, heard, strict=True):
                assert not engine.bugs
                for message in [m for m in engine.said if id(m) not in known]:
                    known.add(id(message))
                    if isinstance(message, GroupHeld):
                        told += round_.hold(engine.id, message, loop.time())
                    elif isinstance(message, GroupPrepared):
                        told += round_.prepare(engine.id, message, loop.time())
            for who, word in told:
                next(engine for engine in engines if engine.id == who).life.control(word)  # type: ignore[arg-type]
            found = [
                [m for m in engine.said if isinstance(m, RoundOutcome) and m.round_id == match.round_id]
                for engine in engines
            ]
            if all(found):
                return [outcomes[0] for outcomes in found]
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("codec", CODECS)
async def test_both_step_by_the_weighted_mean_of_what_travelled_to_the_same_bits(
    engines: list[PairEngine], codec: str
) -> None:
    """DiLoCo, algorithm 1: D = sum of w_i q_i; m = D at first; phi = phi - eta (1 + mu) D."""
    rules = rules_for("diloco", force=True, codec=codec, main=Phase(50, ETA, MU))
    start, *steps = draws(engines, EVERY.index(codec))
    devices = [begin(engine, start, rules) for engine in engines]
    match = match_of(engines, devices[0]._anchor(0, 0))
    for engine, step in zip(engines, steps, strict=True):
        engine.weights().add_(step)
    outcomes = await play(engines, match)
    assert [(o.result, o.fraction, len(o.members)) for o in outcomes] == [(SwapResult.COMMITTED, 1.0, 2)] * 2
    assert torch.equal(engines[0].weights(), engines[1].weights()), codec
    assert not torch.equal(engines[0].weights(), start)
    # What each sent decodes to its displacement without what it still owes.
    sent = [device._states[0, 0].outgoing - device._states[0, 0].residual for device in devices]  # type: ignore[operator]
    for displaced, step in zip([d._states[0, 0].outgoing for d in devices], steps, strict=True):
        assert displaced is not None
        torch.testing.assert_close(displaced, -step, rtol=0, atol=1e-6)
    mean = (WEIGHTS[0] * sent[0] + WEIGHTS[1] * sent[1]) / sum(WEIGHTS)
    back = make_codec(return_spec(parse_spec(codec), 2).text)
    expected = torch.empty_like(mean)
    half = devices[0]._kept.get(GroupKey.of(match))
    assert half is not None
    for begin_at, end in half.parts:
        data = wire.encode(back, mean[begin_at:end], "mean")
        expected[begin_at:end] = wire.decode(back, data, (end - begin_at,), mean.device)
    moved = (start - engines[0].weights()).double()
    # One step of the return codec, where a last bit of the mean falls to the other side.
    allowed = 0.02 * float(mean.abs().max()) + 1e-6
    assert (moved - ETA * (1 + MU) * expected.double()).abs().max() < ETA * (1 + MU) * allowed, codec


HARM = {
    "another round": (Refusal.BUSY, {"round_id": 7}),
    "another fragment": (Refusal.MALFORMED, {"fragment": 3}),
    "another slot": (Refusal.MALFORMED, {"slot": 9}),
    "another's part": (Refusal.MALFORMED, {"part": 0}),
    "no leg": (Refusal.MALFORMED, {"leg": GroupLeg.UNSPECIFIED}),
    "an anchor nobody asked for": (Refusal.MALFORMED, {"leg": GroupLeg.ANCHOR}),
    "another digest": (Refusal.MALFORMED, {"sha256": "0" * 64}),
    "another codec": (Refusal.MALFORMED, {"codec": "int4:64"}),
    "too long": (Refusal.LIMIT, {}),
}


@pytest.mark.parametrize("harm", HARM)
async def test_what_does_not_fit_the_round_is_refused_and_the_round_goes_on(
    engines: list[PairEngine], harm: str
) -> None:
    rules = rules_for("diloco", force=True, codec="exact", main=Phase(50, ETA, MU))
    start, *steps = draws(engines, 99)
    devices = [begin(engine, start, rules) for engine in engines]
    match = match_of(engines, devices[0]._anchor(0, 0))
    one, other = engines
    other.clock(match.slot, 5.0)
    other.life.control(match)
    expected, changes = HARM[harm]
    elements = one.weights().numel() + 64 if harm == "too long" else 64
    data = bytes(4 * elements)
    codec = str(changes.get("codec", "exact"))
    fields = {k: v for k, v in changes.items() if k != "codec"}
    sha256 = hashlib.sha256(data).hexdigest()
    header = replace(GroupKey.of(match).header(GroupLeg.CONTRIBUTION, 1, sha256), **fields)  # type: ignore[arg-type]
    tensor = frames.tensor_header("part", data_pb2.DATA_TYPE_FLOAT32, (elements,), len(data), codec=codec)
    with pytest.raises(PushError) as caught:
        await one.links.push(other.id, "Group", frames.make_header(header, [tensor]), [data], kind="exchange")
    assert caught.value.refusal is expected, str(caught.value)
    for engine, step in zip(engines, steps, strict=True):
        engine.weights().add_(step)
    assert [o.result for o in await play(engines, match)] == [SwapResult.COMMITTED] * 2
    assert torch.equal(one.weights(), other.weights())
