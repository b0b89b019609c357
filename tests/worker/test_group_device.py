"""The device's part of exchanges in groups: what is refused, what an error leaves untouched, unlike members' bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from starlings_compression.codec import make_codec
from starlings_job.exchange_rules import ExchangeRules, rules_for
from starlings_protos.group_messages import GroupLeg, GroupSeat
from starlings_protos.messages import WorkerId
from starlings_worker import wire
from starlings_worker.core.groups.work import (
    Applied,
    Apply,
    Displace,
    Displaced,
    GroupKey,
    GroupResult,
    GroupTask,
    GroupWork,
    Judge,
    Judged,
    Reduce,
    Reduced,
    TaskFailed,
)
from starlings_worker.errors import EngineFault
from starlings_worker.group_device import PART, GroupDevice, rule_of
from support.group_world import SIZE, Vector

KEY = GroupKey(0, 0, 5, 77)
SEATS = tuple(GroupSeat(WorkerId(f"w{k}"), 1, 1 / 3, 1.0) for k in range(3))
A_SHA = "a" * 64


class Member:
    def __init__(self, rules: ExchangeRules, place: int, seed: int) -> None:
        start = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
        self.vector, self.place = Vector(start.clone()), place
        self.device = GroupDevice(rules, {0: self.vector})  # type: ignore[dict-item]
        noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
        self.vector.parameters.sub_(0.01 * (1 + noise))
        displaced = self.do(Displace(KEY, SEATS, place, False))
        assert isinstance(displaced, Displaced)

    def do(self, task: GroupTask) -> GroupResult:
        return self.device.execute(GroupWork(task)).result

    def part_for(self, owner: int) -> bytes:
        (part,) = self.device.outgoing(KEY.header(GroupLeg.CONTRIBUTION, owner, A_SHA))
        return bytes(part.data)

    def hear(self, leg: GroupLeg, part: int, sender: int, data: bytes, codec: str) -> None:
        header = KEY.header(leg, part, A_SHA)
        assert self.device.keep(header, SEATS[sender].worker_id, {PART: (data, codec)})

    def reduce(self) -> GroupResult:
        return self.do(Reduce(KEY, SEATS, (0, 1, 2), self.place))


def group(rules: ExchangeRules) -> list[Member]:
    members = [Member(rules, place, 10 + place) for place in range(3)]
    for owner in members:
        for sender in members:
            if sender is not owner:
                data = sender.part_for(owner.place)
                owner.hear(GroupLeg.CONTRIBUTION, owner.place, sender.place, data, rules.codec)
    return members


def spread(members: list[Member]) -> None:
    """Everybody's aggregate to everybody."""
    for owner in members:
        assert isinstance(owner.reduce(), Reduced)
        (part,) = owner.device.outgoing(KEY.header(GroupLeg.AGGREGATE, owner.place, A_SHA))
        for other in members:
            if other is not owner:
                other.hear(GroupLeg.AGGREGATE, owner.place, owner.place, bytes(part.data), part.codec)


@pytest.mark.parametrize("preset", ["diloco", "sparseloco"])
def test_all_apply_the_same_bits_and_a_part_that_is_not_applied_stays(preset: str) -> None:
    members = group(rules_for(preset))  # type: ignore[arg-type]
    spread(members)
    before = [member.vector.parameters.clone() for member in members]
    applied = [member.do(Apply(KEY, (0, 2), False)) for member in members]
    anchors = {result.anchor for result in applied if isinstance(result, Applied)}
    assert len(anchors) == 1
    begin, end = members[0].device._kept[KEY].parts[1]
    fractions = [result.fraction for result in applied if isinstance(result, Applied)]
    assert fractions == [1 - (end - begin) / SIZE] * 3
    for member, theta in zip(members, before, strict=True):
        assert torch.equal(member.vector.parameters[begin:end], theta[begin:end])
        assert not torch.equal(member.vector.parameters[:begin], theta[:begin])


def test_an_aggregate_that_does_not_decode_changes_nothing_at_all() -> None:
    members = group(rules_for("diloco"))
    spread(members)
    one = members[0]
    one.hear(GroupLeg.AGGREGATE, 2, 2, b"nonsense", "int8:128")
    before = one.vector.parameters.clone(), one.device._states[0, 0].phi.clone()
    assert isinstance(one.do(Judge(KEY, 2)), TaskFailed)
    assert isinstance(one.do(Apply(KEY, (0, 1, 2), False)), TaskFailed)
    assert torch.equal(one.vector.parameters, before[0])
    assert torch.equal(one.device._states[0, 0].phi, before[1])


def test_malformed_and_huge_contributions_are_left_out_and_named() -> None:
    rules = rules_for("diloco")
    members = group(rules)
    begin, end = members[0].device._kept[KEY].parts[0]
    huge = wire.encode(make_codec(rules.codec), torch.full((end - begin,), 1e30), "x")
    members[0].hear(GroupLeg.CONTRIBUTION, 0, 1, bytes(huge), rules.codec)
    members[0].hear(GroupLeg.CONTRIBUTION, 0, 2, b"", rules.codec)
    reduced = members[0].reduce()
    assert isinstance(reduced, Reduced)
    assert {d.worker_id for d in reduced.dropped} == {"w1", "w2"}
    # What is left is its own.
    (part,) = members[0].device.outgoing(KEY.header(GroupLeg.AGGREGATE, 0, A_SHA))
    own = members[0].device._kept[KEY].own_decoded
    assert own is not None
    mean = wire.decode(make_codec(part.codec), part.data, (end - begin,), own.device)
    torch.testing.assert_close(mean, own[begin:end], rtol=0, atol=1e-3)


def test_an_aggregate_out_of_norm_is_refused_by_whoever_gets_it() -> None:
    members = group(rules_for("diloco"))
    spread(members)
    assert members[0].do(Judge(KEY, 1)) == Judged()
    begin, end = members[0].device._kept[KEY].parts[1]
    huge = wire.encode(make_codec("int8:128"), torch.full((end - begin,), 100.0), "x")
    members[0].hear(GroupLeg.AGGREGATE, 1, 1, bytes(huge), "int8:128")
    judged = members[0].do(Judge(KEY, 1))
    assert isinstance(judged, Judged)
    assert "plausible" in judged.refused


def test_what_is_forgotten_comes_to_nothing() -> None:
    members = group(rules_for("diloco"))
    members[0].device.forget(KEY)
    header = KEY.header(GroupLeg.AGGREGATE, 1, A_SHA)
    assert not members[0].device.keep(header, "w1", {PART: (b"", "int8:128")})
    assert members[0].device.outgoing(header) == ()
    for task in (Displace(KEY, SEATS, 0, False), Reduce(KEY, SEATS, (0,), 0), Apply(KEY, (0,), False)):
        assert isinstance(members[0].do(task), TaskFailed)


def test_other_presets_and_too_many_fragments_are_faults() -> None:
    with pytest.raises(EngineFault, match="does not exchange in groups"):
        rule_of(rules_for("pairs"))
    with pytest.raises(EngineFault, match="fewer fragments"):
        GroupDevice(replace(rules_for("diloco"), fragments=1000), {0: Vector(torch.zeros(SIZE))})  # type: ignore[dict-item]
