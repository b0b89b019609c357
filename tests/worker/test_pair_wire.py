"""Two engines' data planes exchange in pairs over gRPC and mTLS: every codec, and partners that mean harm."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import torch

from codec_cases import EVERY
from starlings_compression.codec import make_codec
from starlings_job.exchange_rules import ExchangeRules, Phase, rules_for
from starlings_protos import channels, convert, data_pb2, data_pb2_grpc, frames
from starlings_protos.assignments import assignment_metadata
from starlings_protos.errors import refusal_of
from starlings_protos.identity import Identity
from starlings_protos.messages import Refusal, Span, Stage, StateReport, StateWanted, WorkerId
from starlings_protos.pair_messages import (
    PairHeader,
    PairWord,
    PairWordKind,
    RoundOutcome,
    SoloReason,
    SwapResult,
)
from starlings_protos.stream_messages import TrainingPaused
from starlings_worker import wire
from starlings_worker.core.pairing.work import PairKey
from starlings_worker.uplink import LinkClass, Uplink
from support.pair_engines import SILENT_S, PairEngine, pair_engines
from support.scripted_job import prepare_job
from support.scripted_swarm import ScriptedSwarm

pytestmark = pytest.mark.asyncio(loop_scope="module")
# micro: embed, four layers, head. The first stage alone is trained on.
STAGES = (Stage(0, 2), Stage(3, 5))
SPAN = Span(0, 0)
ETA, MU, W = 0.7, 0.9, 0.25
_ROUNDS = count(1000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[PairEngine]]:
    job = prepare_job(
        tmp_path_factory.mktemp("jobs"), more_train='schedule = "async"', more_exchange='preset = "pairs"'
    )
    async with ScriptedSwarm(job) as swarm, pair_engines(swarm, SPAN, STAGES) as engines:
        yield engines


def rules(codec: str = "exact", momentum_codec: str | None = "exact", **changes: Any) -> ExchangeRules:
    return rules_for(
        "pairs", force=True, codec=codec, momentum_codec=momentum_codec, main=Phase(50, ETA, MU), **changes
    )


def key(slot: int = 5, fragment: int = 0, swap: int = 0) -> PairKey:
    return PairKey(0, fragment, slot, swap, next(_ROUNDS))


def draws(engines: Sequence[PairEngine], seed: int) -> list[torch.Tensor]:
    """Weights to begin with, equal on both, and the steps of each."""
    generator = torch.Generator().manual_seed(seed)
    size = engines[0].weights().numel()
    scales = (0.1, 0.01, 0.01)
    return [torch.randn(size, generator=generator) * scale for scale in scales]


async def outcome(engine: PairEngine, which: PairKey) -> RoundOutcome:
    return await engine.next(RoundOutcome, lambda said: said.round_id == which.round_id)


def decoded(codec: str, data: bytes, like: torch.Tensor) -> torch.Tensor:
    return wire.decode(make_codec(codec), data, tuple(like.shape), torch.device("cpu")).double()


@pytest.mark.parametrize("codec", EVERY)
async def test_what_arrives_is_what_was_sent_and_both_move_by_their_share(
    engines: list[PairEngine], codec: str
) -> None:
    """The formulas of the design, over the real wire: z = phi - eta (D + mu D); theta = z + (1 - w) (z^_j - z^_i)."""
    momentum_codec = codec if codec != "exact" else None
    start, *steps = draws(engines, EVERY.index(codec))
    devices = [engine.begin(start, rules(codec, momentum_codec)) for engine in engines]
    which = key()
    for engine, step in zip(engines, steps, strict=True):
        engine.weights().add_(step)
        engine.clock(which.slot, 0.0)
    for engine, partner, weight in zip(engines, engines[::-1], (W, 1 - W), strict=True):
        engine.match(which, partner.id, weight)
    outcomes = [await outcome(engine, which) for engine in engines]
    assert [(o.result, o.fraction) for o in outcomes] == [(SwapResult.COMMITTED, 1.0)] * 2
    assert devices[0].arrived[which] == devices[1].sent[which]
    assert devices[1].arrived[which] == devices[0].sent[which]
    assert set(devices[0].sent[which]) == ({"z", "m"} if momentum_codec else {"z"})
    phi = start.double()
    thetas = [(start + step).double() for step in steps]
    zs = [phi - ETA * (1 + MU) * (phi - theta) for theta in thetas]
    seen = [decoded(codec, device.sent[which]["z"], start) for device in devices]
    for engine, z, own, theirs, share in zip(engines, zs, seen, seen[::-1], (1 - W, W), strict=True):
        expected = z + share * (theirs - own)
        assert torch.allclose(engine.weights().double(), expected, rtol=0, atol=1e-5), codec
    mean = W * engines[0].weights().double() + (1 - W) * engines[1].weights().double()
    assert torch.allclose(mean, W * zs[0] + (1 - W) * zs[1], rtol=0, atol=1e-6)
    # Momentum likewise, where it travels: the first m is the displacement itself.
    ms = [phi - theta for theta in thetas]
    if momentum_codec:
        sent = [decoded(codec, device.sent[which]["m"], start) for device in devices]
        kept = [
            m + share * (theirs - own)
            for m, own, theirs, share in zip(ms, sent, sent[::-1], (1 - W, W), strict=True)
        ]
        assert torch.allclose(W * kept[0] + (1 - W) * kept[1], W * ms[0] + (1 - W) * ms[1], rtol=0, atol=1e-6)
        ms = kept
    for device, m in zip(devices, ms, strict=True):
        assert torch.allclose(device._states[0, 0].momentum.double(), m, rtol=0, atol=1e-5), codec


async def test_swaps_and_fragments_follow_each_other_and_each_is_averaged_once(
    engines: list[PairEngine],
) -> None:
    start, *steps = draws(engines, 77)
    for engine, step in zip(engines, steps, strict=True):
        engine.begin(start, rules(fragments=3))
        engine.weights().add_(step)
    after = [(start + step).double() for step in steps]
    for slot in (7, 8, 9):
        first, second = key(slot, slot % 3, 0), key(slot, slot % 3, 1)
        for engine, partner, weight in zip(engines, engines[::-1], (W, 1 - W), strict=True):
            engine.clock(slot, 0.0, fragments=3)
            engine.match(first, partner.id, weight)
            engine.match(second, partner.id, 1 - weight)
        for which in (first, second):
            assert [(await outcome(engine, which)).result for engine in engines] == [SwapResult.COMMITTED] * 2
    phi = start.double()
    zs = [phi - ETA * (1 + MU) * (phi - theta) for theta in after]
    mean = W * zs[0] + (1 - W) * zs[1]
    for engine in engines:
        assert torch.allclose(engine.weights().double(), mean, rtol=0, atol=2e-6)


async def test_a_warm_up_averages_weights_and_no_momentum_travels(engines: list[PairEngine]) -> None:
    start, *steps = draws(engines, 78)
    devices = [
        engine.begin(start, rules(warmup=Phase(5, 1.0, 0.0), warmup_fraction=0.2)) for engine in engines
    ]
    which = key()
    for engine, partner, step in zip(engines, engines[::-1], steps, strict=True):
        engine.weights().add_(step)
        engine.clock(which.slot, 0.0, warmup=True)
        engine.match(which, partner.id, 0.5)
    for engine in engines:
        assert (await outcome(engine, which)).result is SwapResult.COMMITTED
        assert torch.allclose(engine.weights(), start + (steps[0] + steps[1]) / 2, rtol=0, atol=1e-6)
    assert [set(device.sent[which]) for device in devices] == [{"z"}, {"z"}]


async def test_a_slow_link_is_not_taken_for_silence(engines: list[PairEngine]) -> None:
    """The payload takes twice as long as a silent partner gets, and its bytes go by all the time."""
    start, *steps = draws(engines, 79)
    which = key()
    for engine, step in zip(engines, steps, strict=True):
        engine.begin(start, rules())
        engine.weights().add_(step)
    engine = engines[0]
    engine.links._uplink = Uplink(LinkClass(2 * 4 * start.numel() / (2 * SILENT_S)))
    try:
        for one, partner in zip(engines, engines[::-1], strict=True):
            one.clock(which.slot, 0.0)
            one.match(which, partner.id, 0.5)
        outcomes = [await outcome(one, which) for one in engines]
    finally:
        engine.links._uplink = Uplink()
    assert [o.result for o in outcomes] == [SwapResult.COMMITTED] * 2, outcomes
    assert all(o.seconds > 1.5 * SILENT_S for o in outcomes)


# ------------------------------------------------------------------ partners that mean harm


class Caller:
    """Somebody with a certificate and an assignment, who says what it likes to the first engine."""

    def __init__(self, engines: Sequence[PairEngine], identity: Identity, stub: Any) -> None:
        self.victim, self.id, self.stub = engines[0], WorkerId(identity.id), stub
        self.metadata = assignment_metadata(engines[0].swarm.signed(identity.id, SPAN))

    async def push(
        self, header: data_pb2.Header, buffers: Sequence[bytes], *, flip: bool = False
    ) -> tuple[Refusal | None, str]:
        """None and no words: taken. `flip`: one bit of what travels is another than what the header is about."""
        sent = list(frames.write_transfer(header, buffers))
        if flip:
            chunk = bytearray(sent[-1].chunk)
            chunk[len(chunk) // 2] ^= 1
            sent[-1] = data_pb2.Frame(chunk=bytes(chunk))

        async def said() -> AsyncIterator[data_pb2.Frame]:
            for frame in sent:
                yield frame

        return await _answer(self.stub.Pair(said(), metadata=self.metadata, timeout=20))

    async def tell(self, word: PairWord) -> tuple[Refusal | None, str]:
        message = convert.to_proto(word, data_pb2.PairWord())
        return await _answer(self.stub.TellPair(message, metadata=self.metadata, timeout=20))


async def _answer(call: Any) -> tuple[Refusal | None, str]:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error), str(error.details())
    return None, ""


def payload(
    which: PairKey, vectors: dict[str, torch.Tensor], codec: str = "exact", **changes: Any
) -> tuple[data_pb2.Header, list[bytes]]:
    """Of a partner: `changes` are of the header."""
    made = make_codec(codec)
    buffers = [
        bytes(v.numpy().tobytes() if codec == "exact" else wire.encode(made, v, n))
        for n, v in vectors.items()
    ]
    tensors = [
        frames.tensor_header(name, data_pb2.DATA_TYPE_FLOAT32, tuple(vector.shape), len(data), codec=codec)
        for (name, vector), data in zip(vectors.items(), buffers, strict=True)
    ]
    subject = replace(which.header(hashlib.sha256(b"".join(buffers)).hexdigest()), **changes)
    assert isinstance(subject, PairHeader)
    return frames.make_header(subject, tensors), buffers


@pytest_asyncio.fixture(loop_scope="module")
async def partner(engines: list[PairEngine]) -> AsyncIterator[Caller]:
    """In the plan, where no engine answers: so what it says is all that the first engine hears of it."""
    (identity,) = engines[0].swarm.strangers
    async with channels.peer_channel(engines[0].address, engines[0].id, identity) as channel:
        yield Caller(engines, identity, data_pb2_grpc.DataStub(channel))


async def met(engine: PairEngine, partner: WorkerId, seed: int) -> tuple[PairKey, torch.Tensor, torch.Tensor]:
    """A slot that has begun, with a match with `partner`; the weights after the own outer step, and those before."""
    start, step, _ = draws([engine], seed)
    engine.begin(start, rules())
    engine.weights().add_(step)
    which = key()
    engine.match(which, partner, 0.5)  # Without a clock: of no use.
    assert engine.life.core.counters["senseless_matches"] > 0
    engine.clock(which.slot, 0.0)
    engine.match(which, partner, 0.5)
    solo = start - ETA * (1 + MU) * -step
    return which, solo, start


async def test_what_is_not_the_swaps_payload_is_refused_before_it_is_read_and_changes_nothing(
    engines: list[PairEngine], partner: Caller
) -> None:
    engine = engines[0]
    which, solo, start = await met(engine, partner.id, 101)
    z, m = solo + 0.001, (start - solo) / ETA
    fine = {"z": z, "m": m}
    size = z.numel()
    cases: dict[str, tuple[tuple[data_pb2.Header, list[bytes]], Refusal]] = {
        "another round": (payload(which, fine, round_id=1), Refusal.BUSY),
        "another slot": (payload(which, fine, slot=which.slot + 1), Refusal.MALFORMED),
        "another swap": (payload(which, fine, swap=1), Refusal.MALFORMED),
        "another fragment": (payload(which, fine, fragment=1), Refusal.MALFORMED),
        "a stage of others": (payload(which, fine, stage=1), Refusal.NOT_HELD),
        "another codec": (payload(which, fine, "fp16"), Refusal.MALFORMED),
        "too many elements": (payload(which, {"z": torch.zeros(size + 1)}), Refusal.LIMIT),
        "far too many": (payload(which, {"z": torch.zeros(3 * size)}), Refusal.LIMIT),
        "too few": (payload(which, {"z": torch.zeros(size - 1)}), Refusal.MALFORMED),
        "momentum alone": (payload(which, {"m": m}), Refusal.MALFORMED),
        "something else": (payload(which, {"z": z, "weight": torch.zeros(size)}), Refusal.MALFORMED),
        "a digest that is none": (payload(which, fine, sha256="0" * 63), Refusal.MALFORMED),
    }
    for name, ((header, buffers), expected) in cases.items():
        refusal, words = await partner.push(header, buffers)
        assert refusal is expected, (name, refusal, words)
    refusal, words = await partner.push(*payload(which, fine), flip=True)
    assert (refusal, words) == (
        Refusal.MALFORMED,
        "the payload's bytes have another digest than its header says",
    )
    # The other engine is no partner of this swap.
    other = engines[1]
    async with channels.peer_channel(engine.address, engine.id, other.identity) as channel:
        stranger = Caller(engines, other.identity, data_pb2_grpc.DataStub(channel))
        refusal, words = await stranger.push(*payload(which, fine))
        assert (refusal, "with another worker" in words) == (Refusal.MALFORMED, True)
        told, words = await stranger.tell(PairWord(which.round_id, PairWordKind.DECLINED))
        assert (told, "with another worker" in words) == (Refusal.MALFORMED, True)
    for word, expected in (
        (PairWord(which.round_id, PairWordKind.PREPARED, "f" * 64), Refusal.MALFORMED),
        (PairWord(which.round_id, PairWordKind.PREPARED, "xyz"), Refusal.MALFORMED),
        (PairWord(which.round_id, PairWordKind.UNSPECIFIED), Refusal.MALFORMED),
        (PairWord(which.round_id, PairWordKind.DECLINED, reason="x" * 1000), Refusal.LIMIT),
        (PairWord(1, PairWordKind.WAITING), Refusal.BUSY),
    ):
        refusal, words = await partner.tell(word)
        assert refusal is expected, (word, words)
    assert torch.allclose(engine.weights(), solo, rtol=0, atol=1e-6)
    # None of that was in the way of the swap itself.
    assert await partner.push(*payload(which, fine)) == (None, "")
    assert await partner.push(*payload(which, fine)) == (None, "")  # It has it already.
    refusal, words = await partner.push(*payload(which, {"z": z + 1, "m": m}))
    assert (refusal, words) == (Refusal.MALFORMED, "another payload came for this round")
    assert await partner.tell(PairWord(which.round_id, PairWordKind.WAITING)) == (None, "")
    digest = engine.life.computer.pairs.sent[which]  # type: ignore[union-attr]
    prepared = hashlib.sha256(b"".join(digest.values())).hexdigest()
    assert await partner.tell(PairWord(which.round_id, PairWordKind.PREPARED, prepared)) == (None, "")
    # Averaged; and since the partner is not there to be told, it says one-sided in time.
    found = await outcome(engine, which)
    assert (found.result, found.partner) == (SwapResult.ONE_SIDED, partner.id)
    assert torch.allclose(engine.weights(), (solo + z) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", ["nan", "inf", "1e30", "scaled", "flipped", "momentum"])
async def test_implausible_values_change_nothing_and_are_named(
    engines: list[PairEngine], partner: Caller, bad: str
) -> None:
    engine = engines[0]
    which, solo, start = await met(engine, partner.id, 102)
    z, m = solo + 0.001, (start - solo) / ETA
    match bad:
        case "nan" | "inf":
            z[z.numel() // 2] = struct.unpack("<f", struct.pack("<f", float(bad)))[0]
        case "1e30":
            z[7] = 1e30
        case "scaled":
            z = 1000 * z
        case "flipped":
            z = -z
        case "momentum":
            m[3] = 1e30
    assert await partner.push(*payload(which, {"z": z, "m": m})) == (None, "")
    found = await outcome(engine, which)
    assert (found.result, found.solo_reason, found.partner) == (
        SwapResult.SOLO,
        SoloReason.REFUSED,
        partner.id,
    )
    assert found.detail
    assert found.fraction == 0
    assert torch.allclose(engine.weights(), solo, rtol=0, atol=1e-6)
    refusal, words = await partner.push(*payload(which, {"z": solo, "m": m}))
    assert (refusal, words) == (Refusal.STALE, "the swap is over here")


async def test_a_payload_that_breaks_off_can_come_again(engines: list[PairEngine], partner: Caller) -> None:
    engine = engines[0]
    which, solo, start = await met(engine, partner.id, 103)
    fine = {"z": solo + 0.001, "m": (start - solo) / ETA}
    header, buffers = payload(which, fine)
    begun = asyncio.Event()

    async def half() -> AsyncIterator[data_pb2.Frame]:
        yield next(iter(frames.write_transfer(header, buffers)))
        begun.set()
        await asyncio.Event().wait()

    call = partner.stub.Pair(half(), metadata=partner.metadata)
    assert await call.initial_metadata()
    await begun.wait()
    refusal, words = await partner.push(header, buffers)
    assert (refusal, words) == (Refusal.BUSY, "this payload is being read")
    call.cancel()
    async with asyncio.timeout(10):
        while (answer := await partner.push(header, buffers))[0] is Refusal.BUSY:
            await asyncio.sleep(0.02)
    assert answer == (None, "")


async def test_a_partner_that_freezes_in_its_payload_costs_the_time_of_silence_and_its_late_bytes_are_dropped(
    engines: list[PairEngine], partner: Caller
) -> None:
    """The outcome is that of a slot without a partner, to the bit; and the next exchange is as if nothing had been."""
    engine, other = engines
    start, *steps = draws(engines, 106)
    lonely = other.begin(start, rules())
    other.weights().add_(steps[0])
    other.clock(5, 0.0)
    await other.until(lambda: True if (0, 0) in lonely._phases else None)
    alone = other.weights().clone()

    which, solo, _ = await met(engine, partner.id, 106)
    header, buffers = payload(which, {"z": solo + 0.001, "m": solo})
    *first, body = frames.write_transfer(header, buffers)
    middle, thawed = len(body.chunk) // 2, asyncio.Event()

    async def half() -> AsyncIterator[data_pb2.Frame]:
        for frame in (*first, data_pb2.Frame(chunk=body.chunk[:middle])):
            yield frame
        await thawed.wait()
        yield data_pb2.Frame(chunk=body.chunk[middle:])

    began_s = time.monotonic()
    late = asyncio.create_task(_answer(partner.stub.Pair(half(), metadata=partner.metadata, timeout=20)))
    found = await outcome(engine, which)
    assert (found.result, found.solo_reason, found.fraction) == (SwapResult.SOLO, SoloReason.SILENT, 0.0)
    assert SILENT_S - 0.1 < time.monotonic() - began_s < 10 * SILENT_S
    assert torch.equal(engine.weights(), alone)
    thawed.set()
    refusal, words = await late
    assert refusal is Refusal.STALE, words
    assert torch.equal(engine.weights(), alone)
    assert which not in engine.life.computer.pairs._kept  # type: ignore[union-attr]

    following = key(6)
    for one, peer, step in zip(engines, engines[::-1], steps, strict=True):
        one.clock(following.slot, 0.0)
        one.match(following, peer.id, 0.5)
        one.weights().add_(step)
    assert [(await outcome(one, following)).result for one in engines] == [SwapResult.COMMITTED] * 2


async def test_weights_that_the_coordinator_cannot_mean_match_nobody(engines: list[PairEngine]) -> None:
    engine, other = engines
    start, step, _ = draws(engines, 104)
    engine.begin(start, rules())
    engine.weights().add_(step)
    engine.clock(5, 0.0)
    before = engine.life.core.counters["senseless_matches"]
    for weight in (1e9, 1.0, 0.0, -0.5, float("nan"), float("inf")):
        engine.match(key(), other.id, weight)
    assert engine.life.core.counters["senseless_matches"] == before + 6


async def test_when_training_is_paused_nobody_meets_any_more(
    engines: list[PairEngine], partner: Caller
) -> None:
    """The last of this file: what was kept for exchanges is free, and payloads are refused."""
    engine = engines[0]
    which, solo, start = await met(engine, partner.id, 105)
    engine.life.control(TrainingPaused(5, 1))
    engine.life.control(StateWanted(5))
    await engine.next(StateReport)
    assert engine.life.computer.pairs is None
    refusal, words = await partner.push(*payload(which, {"z": solo, "m": start}))
    assert (refusal, words) == (Refusal.NOT_HELD, "no exchange in pairs runs here")
    assert (await partner.tell(PairWord(which.round_id, PairWordKind.WAITING)))[0] is Refusal.BUSY
