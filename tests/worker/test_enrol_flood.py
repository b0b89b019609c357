"""A thousand enrolments at once: none gets in, memory stays flat, and an honest worker joins meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import psutil
import pytest

from starlings_coordinator.enrolment import EnrolmentLimits
from starlings_coordinator.rates import Rate
from starlings_protos import channels, control_pb2, control_pb2_grpc
from starlings_protos.errors import refusal_of
from starlings_protos.identity import make_csr, new_key
from starlings_protos.messages import Refusal
from starlings_worker.enrol import enrol
from support.enrolment_server import enrolment_world

FLOOD = 1000
# HTTP/2's REFUSED_STREAM (RFC 9113, section 8.7), in the words of the library.
NOT_LOOKED_AT = "Received RST_STREAM with error code 7"


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """A call that only the collector would free counts against its connection's limit until then."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("at_once", [1, FLOOD])
async def test_a_flood_of_wrong_tokens_keeps_nobody_out(tmp_path: Path, at_once: int) -> None:
    """Eight connections with `at_once` calls on each: who waits for answers gets only coded ones, and who does not is
    turned away by HTTP/2 itself, which says that the call was not looked at.
    """
    limits = EnrolmentLimits(guesses=Rate(burst=50, per_s=0.1))
    async with enrolment_world(tmp_path / "job", limits=limits) as world:
        invite, csr = world.invite(), make_csr(new_key())
        request = control_pb2.EnrolRequest(
            token_id=invite.token_id,
            token_secret="wrong",
            csr_pem=csr,
            job=invite.job,
            protocol_min=1,
            protocol_max=1,
            wall_time_s=time.time(),
        )
        opened = [
            channels.enrolment_channel(f"127.0.0.1:{world.port}", world.authority.ca.certificate_pem)
            for _ in range(8)
        ]
        answers: Counter[Refusal | str | None] = Counter()
        rooms = [asyncio.Semaphore(at_once) for _ in opened]

        async def guess(number: int) -> None:
            try:
                async with rooms[number % 8]:
                    await control_pb2_grpc.EnrolmentStub(opened[number % 8]).Enrol(request, timeout=30)
            except grpc.aio.AioRpcError as error:
                answers[refusal_of(error) or error.details()] += 1

        before = psutil.Process().memory_info().rss
        flood = asyncio.gather(*(guess(n) for n in range(FLOOD)))
        joined = await asyncio.wait_for(enrol(invite, tmp_path / "honest", patience_s=20), 30)
        await flood
        for channel in opened:
            await channel.close()
        assert joined.membership.worker_id
        assert answers.total() == FLOOD
        coded = {Refusal.INVITE_WRONG, Refusal.LIMIT, Refusal.BUSY}
        uncoded = set(answers) - coded
        # The library puts these words in other ones when the connection went on meanwhile.
        assert all(at_once > 1 and NOT_LOOKED_AT in str(words) for words in uncoded), uncoded
        assert answers[Refusal.INVITE_WRONG] <= 50
        assert psutil.Process().memory_info().rss - before < 64 << 20
