"""Pair exchanges in every trouble that there is: both halves together, on a virtual clock. A failing seed replays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from starlings_coordinator.core.pairing import rounds as coordinator_rounds
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import RoundReady, SoloReason, SwapResult
from starlings_worker.core.pairing import swap as worker_swap
from support.pair_worker import CALM, ROUGH, Trouble
from support.pair_world import PairWorld

SLOT_S = 10.0
W0 = WorkerId("w0")


def play(seed: int, kind: type[PairWorld] = PairWorld) -> PairWorld:
    """Five slots with random trouble, then two in calm."""
    rng = random.Random(seed)
    world = kind(
        seed,
        rng.randint(2, 8),
        trouble=ROUGH if seed % 4 else CALM,
        fragments=rng.randint(1, 3),
        swaps=rng.randint(1, 2),
    )
    for worker in world.workers.values():
        worker.claims = rng.random() < 0.3
    for _ in range(rng.randint(1, 4)):
        world.at(rng.uniform(5, 48), lambda: hurt(world, rng))
    world.run(50)
    world.trouble, world.poisoned = CALM, None
    world.run(72)
    world.finish()
    return world


def hurt(world: PairWorld, rng: random.Random) -> None:
    if not world.workers:
        return
    victim = rng.choice(sorted(world.workers))
    match rng.randrange(6):
        case 0:
            world.crash(victim, back_after_s=rng.uniform(2, 10))
        case 1:
            world.freeze(victim, rng.uniform(0.5, 6.5))
        case 2:
            world.freeze(victim, rng.uniform(8, 25))
        case 3:
            world.coordinator_away(rng.uniform(1, 20), restarts=False)
        case 4:
            world.coordinator_away(rng.uniform(1, 20), restarts=True)
        case _:
            world.poisoned = victim


@pytest.mark.parametrize("block", range(4))
def test_no_promise_is_broken_under_random_trouble(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(50 * block, 50 * block + 50):
        try:
            seen += play(seed).results()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    # The trouble is real, and so is what is left.
    assert seen["COMMITTED"] > 500
    for kind in ("LATE", "DECLINED", "NOT_MATCHED", "REFUSED", "FENCED", "ONE_SIDED"):
        assert seen[kind] > 0, f"{kind} never happened"


def test_a_seed_replays_exactly() -> None:
    one, other = (play(7) for _ in range(2))
    assert [w.outcomes for w in one.all_lives] == [w.outcomes for w in other.all_lives]
    assert [w.theta for w in one.all_lives] == [w.theta for w in other.all_lives]


def test_in_calm_everything_is_averaged_and_the_mean_is_kept() -> None:
    world = PairWorld(3, 5, fragments=2)
    world.run(20 * SLOT_S + 5)
    world.finish()
    results = world.results()
    assert set(results) <= {"COMMITTED", "NOT_MATCHED"}
    # Four of five have a partner in each swap; who has none in both is told so.
    assert results["COMMITTED"] >= 19 * 2 * 4 - 8
    assert world.coordinator.book.rounds_averaged * 2 == results["COMMITTED"]


FAILURES: dict[str, Callable[[PairWorld], None]] = {
    "crash": lambda world: world.crash(W0),
    "short freeze": lambda world: world.freeze(W0, 6.0),
    "long freeze": lambda world: world.freeze(W0, 20.0),
    "coordinator away": lambda world: world.coordinator_away(15.0, restarts=False),
    "coordinator restarted": lambda world: world.coordinator_away(15.0, restarts=True),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_twenty_clean_rounds_follow_one_failure(failure: str) -> None:
    """Injected in the middle of an exchange: the first payloads of slot 4 are on their way then."""
    world = PairWorld(11, 4)
    began_s = next_slot_s(world, 4)
    world.run(began_s + 0.05)
    FAILURES[failure](world)
    world.run(began_s + 29 * SLOT_S)
    world.finish()
    # A replica that returns within slot 6 comes too late for the match of slot 7.
    first = 4 + 4
    results = world.results(since_slot=first)
    assert set(results) == {"COMMITTED"}, results
    assert all(
        len({o.slot for o in worker.outcomes if o.slot >= first}) >= 20 for worker in world.workers.values()
    )


@pytest.mark.parametrize("frozen_s", [2.0, 6.5])
def test_a_clock_that_a_frozen_replica_hears_late_is_set_right(frozen_s: float) -> None:
    """It would count from when it heard it, and come too late for every match."""
    world = PairWorld(11, 4)
    began_s = next_slot_s(world, 4)
    world.run(began_s + 0.5 * SLOT_S)
    worker = world.workers[W0]
    world.freeze(W0, frozen_s)
    # As when its stream was replaced.
    world._tell(world.coordinator.joined(W0, worker.incarnation, "", world.now_s))
    world.run(began_s + 26 * SLOT_S)
    world.finish()
    assert len(world.all_lives) == 4, "it is no new life"
    begins = dict(worker.slots_taken)
    assert begins[5] - world.coordinator.clock.begins_at(5) > 0.9 * frozen_s
    for slot in range(7, 27):
        assert abs(begins[slot] - world.coordinator.clock.begins_at(slot)) < 0.2
    assert set(world.results(since_slot=7)) == {"COMMITTED"}


def next_slot_s(world: PairWorld, slot: int) -> float:
    world.run(30.0)
    return world.coordinator.clock.begins_at(slot)


@pytest.mark.parametrize("seconds", [6.0, 30.0])
def test_a_frozen_partner_costs_its_partners_five_seconds_and_the_others_nothing(seconds: float) -> None:
    world = PairWorld(5, 6, swaps=1)
    began_s = next_slot_s(world, 4)
    world.run(began_s + 0.03)
    world.freeze(W0, seconds)
    over_s: dict[WorkerId, float] = {}
    for tick in range(100):
        world.run(began_s + 0.1 * tick)
        for worker_id, worker in world.workers.items():
            if worker_id != W0 and any(o.slot == 4 for o in worker.outcomes):
                over_s.setdefault(worker_id, world.now_s - began_s)
    world.run(began_s + 80.0)
    world.finish()
    (hurt_one,) = [
        w for w, worker in world.workers.items() for o in worker.outcomes if o.partner == W0 and o.slot == 4
    ]
    for worker_id, worker in world.workers.items():
        if worker_id == W0:
            continue
        (outcome,) = [o for o in worker.outcomes if o.slot == 4]
        if worker_id == hurt_one:
            assert outcome.solo_reason is SoloReason.SILENT
            assert over_s[worker_id] <= 5.2
        else:
            assert outcome.result is SwapResult.COMMITTED
            assert over_s[worker_id] < 1.0
        # Training and slots went on as if nothing had been.
        begins = [at_s for _, at_s in worker.slots_taken]
        assert all(9.9 < after - before < 10.1 for before, after in pairwise(begins))


def test_who_waits_for_a_partner_with_a_frozen_partner_gets_its_swap() -> None:
    """Swap 1 begins when swap 0 is given up; the third side hears that its partner lives, and waits."""
    for seed in range(6):
        world = PairWorld(seed, 4, swaps=2)
        began_s = next_slot_s(world, 4)
        world.run(began_s + 0.02)
        world.freeze(W0, 9.0)
        world.run(began_s + SLOT_S + 1)
        for worker_id, worker in world.workers.items():
            for outcome in worker.outcomes:
                if outcome.slot == 4 and W0 not in (worker_id, outcome.partner):
                    assert outcome.result is SwapResult.COMMITTED, (seed, worker_id, outcome)
        world.finish()


def test_the_last_word_lost_is_a_one_sided_commit_and_is_reported() -> None:
    """Only answers get lost, so sides learn late, or never, that they were heard."""
    one_sided = 0
    for seed in range(12):
        world = PairWorld(seed, 4, trouble=Trouble(loss=0.45, answer_loss=0.45, jitter_s=0.3))
        world.run(80)
        world.finish()
        one_sided += world.coordinator.book.rounds_one_sided
        said = world.results()["ONE_SIDED"]
        assert said >= world.coordinator.book.rounds_one_sided
    assert one_sided > 0


def test_a_poisoned_payload_is_refused_by_all_and_named() -> None:
    world = PairWorld(9, 4)
    world.poisoned = W0
    world.run(10 * SLOT_S)
    world.finish()
    assert world.coordinator.book.suspects() == (W0,)
    for worker_id, worker in world.workers.items():
        for outcome in worker.outcomes:
            if outcome.partner == W0:
                assert outcome.solo_reason is SoloReason.REFUSED
                assert outcome.detail == "its weights are not finite"
            elif worker_id != W0 and outcome.partner:
                assert outcome.result is SwapResult.COMMITTED


def test_after_four_rounds_alone_the_rule_is_told() -> None:
    world = PairWorld(2, 2, swaps=1)
    world.run(35.0)
    world.crash(WorkerId("w1"), back_after_s=None)
    world.run(100.0)
    world.finish()
    assert max(world.workers[W0].solo_told) >= 4


class Careless(coordinator_rounds.StageRounds):
    """Matches everybody for the slot that comes, whatever their counters say."""

    def _match(self, slot: int, now_s: float) -> list[coordinator_rounds.Told]:
        for replica in self.replicas.values():
            replica.ready = slot if replica.ready else 0
        return super()._match(slot, now_s)


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("fragments", [1, 3])
def test_counters_that_differ_mix_no_rounds_and_no_fragments(ahead: int, fragments: int) -> None:
    """Half of the workers count ahead. Even if the coordinator matches them with the others, they never meet."""
    skews = (0, ahead, 0, ahead)
    world = PairWorld(ahead, 4, fragments=fragments, rounds_class=Careless, skews=skews, trouble=ROUGH)
    world.run(120.0)
    world.finish()
    met: Counter[tuple[bool, bool]] = Counter()
    for number, worker in enumerate(world.workers.values()):
        for outcome in worker.outcomes:
            if outcome.partner:
                alike = skews[number] == skews[int(outcome.partner[1:])]
                met[alike, outcome.result is not SwapResult.SOLO] += 1
    assert met[True, True] > 0
    assert met[False, False] > 0
    assert met[False, True] == 0


# ------------------------------------------------------------------ mutants


def caught(seeds: range) -> str:
    for seed in seeds:
        try:
            play(seed)
        except AssertionError as error:
            return str(error)
    return ""


def test_a_side_that_commits_without_the_partners_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        worker_swap.Swap,
        "may_commit",
        lambda self, now_s: self._plausible and now_s < self.deadline_at_s,
    )
    assert "without the partner's PREPARED" in caught(range(5))


def test_a_side_that_commits_after_its_deadline_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_swap.Swap, "slot_began", lambda self, slot_at_s: None)
    assert "after the deadline" in caught(range(20))


@pytest.mark.parametrize("checked", [True, False])
def test_a_side_that_takes_another_slots_payload_is_caught(
    monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Even if round ids repeat, what else names a swap tells payloads apart; without that, they are mixed."""
    whole = coordinator_rounds.fingerprint

    def by_position(
        seed: int,
        stage: int,
        slot: int,
        fragment: int,
        swap: int,
        one: str,
        life: int,
        other: str,
        *_: object,
    ) -> int:
        return whole(stage, swap, one, other)

    monkeypatch.setattr(coordinator_rounds, "fingerprint", by_position)
    if not checked:
        monkeypatch.setattr(worker_swap.Swap, "fits", lambda self, header, sender: sender == self.partner)
    found = [mixed(seed) for seed in range(12)]
    assert any(found) != checked


def mixed(seed: int) -> bool:
    """Whether a payload of another slot was taken, where many come late."""
    world = PairWorld(seed, 3, trouble=Trouble(duplicate=0.9, jitter_s=0.5), swaps=1)
    try:
        world.run(80.0)
    except AssertionError as error:
        assert "another swap" in str(error)  # noqa: PT017
        return True
    return False


def liars() -> PairWorld:
    """All train alike, and two of them claim a billion tokens."""
    world = PairWorld(4, 4)
    for worker_id in ("w0", "w2"):
        world.workers[WorkerId(worker_id)].claims = True
    world.run(60.0)
    world.finish()
    return world


def weights_of(world: PairWorld) -> list[float]:
    return [e.match.weight for w in world.workers.values() for e in w.evidence.values()]


def test_a_claim_of_a_billion_tokens_changes_no_weight_and_is_named() -> None:
    world = liars()
    assert len(weights_of(world)) > 30
    assert all(0.4 < weight < 0.6 for weight in weights_of(world))
    assert {named.worker_id for named in world.coordinator.book.named} == {"w0", "w2"}


def test_readiness_names_the_slot_that_comes() -> None:
    world = PairWorld(1, 2)
    said: list[RoundReady] = []
    original = world.control_up

    def listen(worker: object, message: object) -> None:
        if isinstance(message, RoundReady):
            said.append(message)
        original(worker, message)  # type: ignore[arg-type]

    world.control_up = listen  # type: ignore[method-assign]
    world.run(45.0)
    assert [m.slot for m in said[:4]] == [0, 0, 1, 1]
    assert sorted({m.slot for m in said}) == [0, 1, 2, 3, 4, 5]
    assert all(0 < m.begins_in_s <= SLOT_S for m in said if m.slot)
    assert all(m.tokens > 0 for m in said[4:])
