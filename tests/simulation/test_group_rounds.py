"""Group exchanges, both halves together with real arithmetic and bytes, on a virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from starlings_job.exchange_rules import ExchangeRules, rules_for
from starlings_protos.group_messages import GroupLeg
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import RoundOutcome, SoloReason, SwapResult
from support.group_world import SIZE, GroupWorld, Worker

W = [WorkerId(f"w{k}") for k in range(8)]
H = 10


def rules(preset: str = "diloco", **changes: object) -> ExchangeRules:
    base = rules_for(preset)  # type: ignore[arg-type]
    return replace(base, main=replace(base.main, inner_steps=H), **changes)  # type: ignore[arg-type]


def results(worker: Worker, since: int = 0) -> list[SwapResult]:
    return [o.result for o in worker.outcomes if o.slot >= since]


def of_slot(worker: Worker, slot: int) -> RoundOutcome:
    (found,) = [o for o in worker.outcomes if o.slot == slot]
    return found


def agree(world: GroupWorld) -> bool:
    phis = [worker.phi for worker in world.workers.values()]
    return all(torch.equal(phis[0], phi) for phi in phis)


def now(world: GroupWorld) -> int:
    return world.coordinator.clock.slot_at(world.now_s)


def reference(world: GroupWorld, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """DiLoCo, algorithm 1, weighted: starting point and momentum after a slot, from what its members had before."""
    rate, mu = world.rules.main.outer_rate, world.rules.main.outer_momentum
    weights = {seat.worker_id: seat.weight for seat in world.matches[slot].seats}
    mean = torch.zeros(SIZE, dtype=torch.float64)
    for who, weight in weights.items():
        theta, phi, momentum = (t.double() for t in world.workers[who].before[slot])
        mean += weight / sum(weights.values()) * (phi - theta)
    momentum = mu * momentum + mean
    return phi - rate * (mean + mu * momentum), momentum


def test_rounds_are_those_of_the_paper() -> None:
    world = GroupWorld(1, 3, rules(codec="exact", feedback_decay=None))
    world.run_slots(8)
    world.check()
    assert agree(world)
    compared = 0
    for worker in world.workers.values():
        assert results(worker, 2) == [SwapResult.COMMITTED] * len(results(worker, 2))
        for slot, (phi, momentum) in worker.after.items():
            expected_phi, expected_momentum = reference(world, slot)
            torch.testing.assert_close(phi.double(), expected_phi, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(momentum.double(), expected_momentum, rtol=1e-5, atol=1e-6)
            compared += 1
    assert compared >= 15
    # They did not wait for long, and trained on from where the round ended.
    assert all(worker.held_s < 0.1 * world.now_s for worker in world.workers.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        rules(),
        rules(codec="int4:64"),
        rules(fragments=3, merge_alpha=0.5),
        rules("sparseloco"),
        rules("sparseloco", codec="topk:16/64|int8:64", robust="centered_clip"),
    ],
    ids=lambda r: f"{r.preset}-{r.codec}-{r.fragments}",
)
def test_replicas_stay_equal_bit_for_bit_and_what_a_codec_drops_comes_later(how: ExchangeRules) -> None:
    world = GroupWorld(2, 4, how)
    world.run_slots(40)
    world.check()
    assert agree(world)
    rounds = [o for worker in world.workers.values() for o in worker.outcomes if o.slot > 2]
    assert {o.result for o in rounds} == {SwapResult.COMMITTED}
    assert all(o.fraction == 1.0 and len(o.members) == 4 and not o.dropped for o in rounds)
    middle = torch.stack([worker.target for worker in world.workers.values()]).mean(0)
    started, ended = (world.start - middle).norm(), (world.workers[W[0]].phi - middle).norm()
    assert ended < 0.35 * started


def test_a_lone_replica_is_lookahead_with_nesterov() -> None:
    world = GroupWorld(3, 1, rules(codec="exact", feedback_decay=None))
    world.run_slots(5)
    (worker,) = world.workers.values()
    assert len(worker.after) >= 4
    for slot, (phi, _) in worker.after.items():
        torch.testing.assert_close(phi.double(), reference(world, slot)[0], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- failures


def into_round(world: GroupWorld, *, after_s: float = 0.03) -> int:
    """A few rounds, then just after the next slot has begun. Returns its number."""
    world.run_slots(3)
    slot = now(world) + 1
    world.run(world.coordinator.clock.begins_at(slot) + after_s)
    return slot


def clean_rounds_follow(world: GroupWorld, first: int, rounds: int = 20) -> None:
    world.run(world.coordinator.clock.begins_at(first + rounds) + 5.0)
    world.check()
    assert agree(world)
    for worker in world.workers.values():
        assert results(worker, first)[:rounds] == [SwapResult.COMMITTED] * rounds, worker.worker_id


def test_a_killed_member_costs_its_contribution_and_nobody_hangs() -> None:
    world = GroupWorld(4, 4, rules())
    slot = into_round(world)
    world.kill(W[1], noticed_after_s=60.0)
    length_s = world.coordinator.clock.length_of(slot)
    world.run(world.now_s + 0.95 * length_s)
    for who in (W[0], W[2], W[3]):
        outcome = of_slot(world.workers[who], slot)
        assert outcome.result is SwapResult.COMMITTED
        assert outcome.members == (W[0], W[2], W[3])
        # Its own part had no owner.
        assert 0.5 < outcome.fraction < 1.0
        assert [dropped.worker_id for dropped in outcome.dropped] == [W[1]]
        assert world.workers[who].held_s < 0.7 * length_s
    clean_rounds_follow(world, slot + 1)


@pytest.mark.slow
def test_who_is_frozen_is_left_out_and_copies_where_the_others_are() -> None:
    world = GroupWorld(5, 3, rules())
    slot = into_round(world)
    world.freeze(W[2], 25.0)
    world.run(world.now_s + 40.0)
    assert of_slot(world.workers[W[0]], slot).members == (W[0], W[1])
    assert any(o.solo_reason is SoloReason.BEHIND for o in world.workers[W[2]].outcomes)
    clean_rounds_follow(world, now(world) + 1)


def test_two_that_lose_each_other_change_nothing_and_go_on_from_there() -> None:
    world = GroupWorld(6, 2, rules(codec="exact", feedback_decay=None))
    slot = into_round(world, after_s=-0.5)
    world.cut.add((None, None, GroupLeg.CONTRIBUTION))
    before = {w: worker.phi.clone() for w, worker in world.workers.items()}
    world.run(world.coordinator.clock.begins_at(slot + 1) - 1.0)
    for w, worker in world.workers.items():
        assert of_slot(worker, slot).result is SwapResult.SOLO
        assert of_slot(worker, slot).fraction == 0.0
        assert torch.equal(worker.phi, before[w])
    world.cut.clear()
    clean_rounds_follow(world, slot + 1, 5)
    # What was trained in two slots came with the round after.
    for worker in world.workers.values():
        torch.testing.assert_close(
            worker.after[slot + 1][0].double(), reference(world, slot + 1)[0], rtol=1e-5, atol=1e-6
        )


def test_a_member_that_lacks_an_aggregate_applies_nothing_and_copies_later() -> None:
    world = GroupWorld(7, 4, rules())
    slot = into_round(world, after_s=-0.5)
    world.cut.add((None, W[3], GroupLeg.AGGREGATE))
    world.run(world.coordinator.clock.begins_at(slot + 1) - 0.5)
    assert of_slot(world.workers[W[3]], slot).result is SwapResult.SOLO
    assert "no aggregate came from" in of_slot(world.workers[W[3]], slot).detail
    for who in W[:3]:
        assert of_slot(world.workers[who], slot).fraction == 1.0
    world.cut.clear()
    world.run(world.coordinator.clock.begins_at(slot + 2) - 0.5)
    assert of_slot(world.workers[W[3]], slot + 1).solo_reason is SoloReason.BEHIND
    clean_rounds_follow(world, slot + 2)


@pytest.mark.slow
def test_newcomers_and_unlike_seeds_copy_what_the_group_has() -> None:
    world = GroupWorld(8, 3, rules(fragments=2))
    world.run_slots(5)
    late = world.join(W[3], start=torch.randn(SIZE, generator=world.torch_rng))
    world.run_slots(4)
    assert [o.solo_reason for o in late.outcomes if o.solo_reason is SoloReason.BEHIND] == [
        SoloReason.BEHIND
    ] * 2
    clean_rounds_follow(world, now(world) + 1)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_starting_point_that_fits_into_no_slot_is_copied_in_longer_ones(fragments: int) -> None:
    world = GroupWorld(12, 3, rules(fragments=fragments))
    world.run_slots(3)
    usual_s = world.coordinator.clock.length_of(now(world))
    world.anchor_s = 1.5 * usual_s
    late = world.join(W[3])
    world.run_slots(20)
    assert SoloReason.BEHIND in {o.solo_reason for o in late.outcomes}
    assert results(late, now(world) - 1)[-1] is SwapResult.COMMITTED
    world.run_slots(8)
    assert world.coordinator.clock.length_of(now(world)) == pytest.approx(usual_s, rel=0.2)
    clean_rounds_follow(world, now(world) + 1, 5)


def test_whose_link_is_too_thin_to_copy_is_named_and_holds_nobody_up_for_long() -> None:
    world = GroupWorld(13, 3, rules())
    world.run_slots(3)
    usual_s = world.coordinator.clock.length_of(now(world))
    world.anchor_s = 1e6
    late = world.join(W[3])
    world.run_slots(45)
    assert world.coordinator.clock.length_of(now(world)) == pytest.approx(usual_s, rel=0.2)
    (named,) = world.coordinator.book.named
    assert (named.worker_id, named.by) == (W[3], None)
    assert "larger [exchange] every or more fragments" in named.reason
    assert late.outcomes[-1].solo_reason is SoloReason.NOT_MATCHED
    others = [results(worker, 2) for w, worker in world.workers.items() if w != W[3]]
    assert all(set(found) == {SwapResult.COMMITTED} for found in others)


@pytest.mark.slow
def test_unlike_beginnings_are_caught_before_anything_is_averaged() -> None:
    world = GroupWorld(9, 0, rules())
    for who in W[:3]:
        world.join(who)
    world.join(W[3], start=world.start + 1.0)
    world.run_slots(4)
    odd = world.workers[W[3]]
    assert odd.outcomes[0].result is SwapResult.SOLO
    assert SoloReason.BEHIND in {o.solo_reason for o in odd.outcomes}
    assert all(W[3] not in of_slot(world.workers[W[0]], slot).members for slot in (1,))
    clean_rounds_follow(world, now(world) + 1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.03, 0.1, 0.2, 0.4])
def test_a_coordinator_that_is_started_anew_in_a_round_parts_nobody_for_long(after_s: float) -> None:
    world = GroupWorld(10, 4, rules())
    into_round(world, after_s=after_s)
    world.restart_coordinator()
    world.run(world.now_s + 60.0)
    clean_rounds_follow(world, now(world) + 1)


# ---------------------------------------------------------------------- members that mean harm


def settled(how: ExchangeRules, poison: dict[int, float | str], slots: int = 30) -> GroupWorld:
    """Eight replicas, of which some send something else than they found."""
    world = GroupWorld(11, 8, how)
    for number, kind in poison.items():
        worker = world.workers[W[number]]

        def change(theta: torch.Tensor, worker: Worker = worker, kind: float | str = kind) -> None:
            if kind == "nan":
                theta[5] = float("nan")
            else:
                assert not isinstance(kind, str)
                phi = worker.phi
                theta.copy_(phi + kind * (theta - phi))

        worker.poison = change
    world.run_slots(slots)
    world.check()
    return world


def distance(world: GroupWorld, honest: list[int]) -> float:
    """How far the group is from the middle of the honest ones' targets, as a share of where it began."""
    middle = torch.stack([world.workers[W[k]].target for k in honest]).mean(0)
    return float((world.workers[W[honest[0]]].phi - middle).norm() / (world.start - middle).norm())


@pytest.mark.slow
@pytest.mark.parametrize("robust", ["trimmed", "centered_clip"])
def test_one_sign_flipping_and_one_scaling_peer_of_eight(robust: str) -> None:
    honest = [0, 1, 2, 4, 5, 7]
    poison: dict[int, float | str] = {3: -1.0, 6: 8.0}
    clean = distance(settled(rules(), {}), honest)
    plain = distance(settled(rules(), poison), honest)
    held = distance(settled(rules(robust=robust), poison), honest)
    print(f"clean {clean:.3f}, no defence {plain:.3f}, {robust} {held:.3f}")
    assert held < 0.5 * plain
    assert held < clean + 0.25


@pytest.mark.parametrize("kind", ["nan", 1e30, 50.0])
def test_nonsense_of_one_changes_nobody_and_is_named(kind: float | str) -> None:
    world = settled(rules(), {3: kind}, slots=6)
    honest = [worker for w, worker in world.workers.items() if w != W[3]]
    assert all(torch.isfinite(worker.phi).all() for worker in honest)
    assert distance(world, [0, 1, 2, 4, 5, 6, 7]) < 1.0
    named = {d.worker_id for worker in honest for o in worker.outcomes for d in o.dropped}
    assert named == {W[3]}
    assert world.coordinator.book.named[0].worker_id == W[3]


# ---------------------------------------------------------------------- anything


def play(seed: int) -> GroupWorld:
    rng = random.Random(seed)
    how = rng.choice([rules(), rules(fragments=2), rules("sparseloco"), rules(merge_alpha=0.5)])
    world = GroupWorld(seed, rng.randint(2, 6), how)
    world.loss, world.jitter_s = rng.choice([0.0, 0.1]), rng.choice([0.0, 0.3])
    for _ in range(rng.randint(1, 4)):
        world.at(rng.uniform(12, 70), lambda: hurt(world, rng))
    world.run(90)
    world.loss, world.jitter_s = 0.0, 0.0
    # Who is frozen comes back, and copies; each fragment has its turn.
    world.run(150)
    return world


def hurt(world: GroupWorld, rng: random.Random) -> None:
    victim = rng.choice(sorted(world.workers))
    match rng.randrange(4):
        case 0 if len(world.workers) > 1:
            world.kill(victim, noticed_after_s=rng.uniform(0.1, 10))
            world.after(15.0, lambda: world.join(victim))
        case 1:
            world.freeze(victim, rng.uniform(0.2, 15))
        case 2:
            world.restart_coordinator()
        case _:
            world.cut.add((victim, None, rng.choice(list(GroupLeg))))
            world.after(rng.uniform(5, 15), world.cut.clear)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
def test_no_promise_is_broken_under_random_trouble(block: int) -> None:
    for seed in range(12 * block, 12 * block + 12):
        world = play(seed)
        clean_rounds_follow(world, now(world) + 1, 2)
