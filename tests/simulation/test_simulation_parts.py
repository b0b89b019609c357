"""The simulator's own parts: clock, processes, streams, transfers, plans, symbols."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from starlings_protos.messages import (
    ExchangeGroup,
    ExchangeMember,
    ExchangePurpose,
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    PlanRequest,
    PlanWorker,
    Receipt,
    Refusal,
    Span,
    Stage,
    StepCommitted,
    WorkerId,
)
from starlings_simulator.checker import Checker
from starlings_simulator.clock import Clock
from starlings_simulator.network import (
    NOT_CONNECTED,
    Conditions,
    Envelope,
    Network,
    Outcome,
    Process,
    Receiver,
)
from starlings_simulator.plans import draw_plan
from starlings_simulator.scenario import draw
from starlings_simulator.symbolic import Device, Inconsistent, Tensors, beside
from starlings_simulator.transcript import Transcript, shorten
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.events import Direction

KEY = MicrobatchKey(LeaseKind.TRAIN, 0, 0, 0)


def test_calls_run_in_order_of_time_then_of_asking() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: seen.append("first"))
    clock.at(1.0, lambda: seen.append("second"))
    clock.at(1.5, lambda: seen.append("never")).cancel()
    while clock.step():
        pass
    assert seen == ["first", "second", "late"]
    assert clock.now_s == 2.0
    clock.at(0.5, lambda: seen.append("past"))
    assert clock.step()
    assert clock.now_s == 2.0


def test_a_frozen_process_gets_its_calls_when_it_thaws_and_a_dead_one_never() -> None:
    process, seen = Process("w"), list[int]()
    process.freeze()
    process.deliver(lambda: seen.append(1))
    assert seen == []
    process.thaw()
    assert seen == [1]
    process.freeze()
    process.deliver(lambda: seen.append(2))
    process.kill()
    process.thaw()
    assert seen == [1]


class Bench:
    """One sender, one receiver with a given answer."""

    def __init__(self, answer: Admission, conditions: Conditions, seed: int = 0) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, random.Random(seed), conditions)
        self.seen: list[str] = []
        self.outcomes: list[Outcome] = []
        self.receiver = Process("b")
        self.network.receivers[WorkerId("b")] = Receiver(
            self.receiver,
            lambda _: answer,
            lambda _: self.seen.append("arrived"),
            lambda _: self.seen.append("aborted"),
        )

    def push(self) -> None:
        header = MicrobatchHeader(KEY, 1, (), 1.0, 1)
        envelope = Envelope(WorkerId("a"), WorkerId("b"), header, "payload", Direction.FORWARD)
        self.network.push(Process("a"), envelope, self.outcomes.append)

    def run(self) -> None:
        while self.clock.step():
            pass


CALM = Conditions(late=0.0)


def test_a_push_arrives_and_its_receipt_comes_back() -> None:
    bench = Bench(Receipt(free_slots=3), CALM)
    bench.push()
    bench.run()
    assert bench.seen == ["arrived"]
    assert bench.outcomes == [Receipt(free_slots=3)]


def test_what_is_refused_or_held_already_has_no_body() -> None:
    refusal = Rejection(Refusal.BUSY, "no free slot")
    bench = Bench(refusal, CALM)
    bench.push()
    bench.run()
    assert (bench.seen, bench.outcomes) == ([], [refusal])
    bench = Bench(Duplicate(Receipt()), CALM)
    bench.push()
    bench.run()
    assert (bench.seen, bench.outcomes) == ([], [Receipt()])


def test_a_dead_receiver_is_no_connection_and_a_frozen_one_a_timeout() -> None:
    bench = Bench(Receipt(), CALM)
    bench.receiver.kill()
    bench.push()
    bench.run()
    assert bench.outcomes == [NOT_CONNECTED]
    bench = Bench(Receipt(), CALM)
    bench.receiver.freeze()
    bench.push()
    bench.run()
    assert bench.outcomes == ["timed out"]


def test_broken_transfers_end_in_every_way_and_tell_the_sender_exactly_once() -> None:
    ways = set()
    for seed in range(60):
        bench = Bench(Receipt(), replace(CALM, broken=1.0), seed)
        bench.push()
        bench.run()
        assert len(bench.outcomes) == 1
        ways.add((tuple(bench.seen), str(bench.outcomes[0])[:30]))
    assert {seen for seen, _ in ways} == {(), ("aborted",), ("arrived",)}
    assert (("arrived",), "connection reset before the re") in ways


@pytest.mark.parametrize("seed", range(40))
def test_drawn_plans_cover_every_stage_and_depend_on_the_request_alone(seed: int) -> None:
    rng = random.Random(seed)
    workers = tuple(PlanWorker(WorkerId(f"w{index}"), {}, {}, 1) for index in range(rng.randint(1, 6)))
    request = PlanRequest(seed, workers, 3, 2, 4, 16.0)
    blocks = rng.randint(2, 7)
    reply = draw_plan(request, blocks, rng.randint(1, 4), 1)
    assert reply == draw_plan(replace(request, workers=workers[::-1]), blocks, len(reply.stages), 1)
    assert [block for stage in reply.stages for block in stage.blocks] == list(range(blocks))
    covered = {stage for worker in reply.workers if worker.span for stage in worker.span.stages}
    assert covered == set(range(len(reply.stages)))


def test_too_few_workers_make_a_plan_impossible_in_words() -> None:
    request = PlanRequest(1, (PlanWorker(WorkerId("w"), {}, {}, 1),), 3, 2, 4, 16.0)
    assert draw_plan(request, 4, 2, 3).impossible == "needs 2 more workers"


def device(numeric_class: str = "") -> Device:
    return Device((Stage(0, 0), Stage(1, 1)), Span(0, 1), 0, {0: "x", 1: "y"}, numeric_class)


def group(name: str, *members: str) -> ExchangeGroup:
    return ExchangeGroup(name, tuple(ExchangeMember(WorkerId(who), 1.0, 1 / len(members)) for who in members))


def trained(*indices: int) -> Device:
    one = device()
    for index in indices:
        tensors = Tensors(samples=(index,))
        key = MicrobatchKey(LeaseKind.TRAIN, 0, 0, index)
        one.forward(tensors, key, 0, 1)
        one.backward(tensors, key, 0, 1)
    for stage in (0, 1):
        one.open(group(f"stage:{stage}", "w"), ExchangePurpose.GRADIENT, 0)
        one.assemble(f"stage:{stage}")
    return one


def test_a_gradient_must_hold_each_microbatch_once() -> None:
    trained(0, 1).exactly_once(0, 0, 2)
    with pytest.raises(Inconsistent):
        trained(0).exactly_once(0, 0, 2)
    with pytest.raises(Inconsistent):
        trained(0, 0, 1).exactly_once(0, 0, 2)
    with pytest.raises(Inconsistent):
        trained(0, 1).exactly_once(0, 1, 2)


def test_equal_commits_give_equal_weights_and_unlike_ones_do_not() -> None:
    first, second, other = trained(0, 1), trained(1, 0), trained(0, 2)
    for one in (first, second, other):
        one.apply(0, 0.1, 1.0)
    assert first.states == second.states
    assert first.states != other.states


def test_a_backward_needs_its_graph_and_the_gradient_of_its_boundary() -> None:
    one, tensors = device(), Tensors()
    with pytest.raises(Inconsistent):
        one.backward(tensors, KEY, 0, 1)
    one.forward(tensors, KEY, 0, 0)
    with pytest.raises(Inconsistent):
        one.backward(tensors, KEY, 0, 0)


def test_a_step_is_computed_with_its_own_version() -> None:
    with pytest.raises(Inconsistent):
        device().forward(Tensors(), MicrobatchKey(LeaseKind.TRAIN, 1, 0, 0), 0, 1)


def test_the_mean_of_equal_states_is_that_state_and_of_unlike_ones_the_same_new_one_for_all() -> None:
    def average(states: tuple[str, str]) -> list[str]:
        devices = []
        for state in states:
            one = device()
            one.states[0] = state
            devices.append(one)
        for position, one in enumerate(devices):
            members = tuple(ExchangeMember(WorkerId(who), 0.5, 0.5) for who in ("a", "b"))
            one.open(ExchangeGroup("stage:0", members), ExchangePurpose.STATE, position)
        for position, one in enumerate(devices):
            other = devices[1 - position]
            (theirs,) = other.vectors["stage:0"].passes
            one.arrived("stage:0", 0).contributions[WorkerId("ab"[1 - position])] = theirs.own
            one.reduce("stage:0")
        parts = [one.arrived("stage:0", 0).aggregates[position] for position, one in enumerate(devices)]
        for position, one in enumerate(devices):
            one.arrived("stage:0", 0).aggregates[1 - position] = parts[1 - position]
            one.assemble("stage:0")
            one.adopt()
        return [one.states[0] for one in devices]

    assert average(("x", "x")) == ["x", "x"]
    mixed = average(("x", "z"))
    assert mixed[0] == mixed[1]
    assert mixed[0] not in ("x", "z")


def test_a_second_sum_belongs_to_the_first() -> None:
    """Two members: the same tags again, beside the same first sum, or the symbols do not add up."""

    def run(spoil: str = "") -> Device:
        devices = [device(), device()]
        members = tuple(ExchangeMember(WorkerId(who), 1.0, 0.5) for who in ("a", "b"))
        for position, one in enumerate(devices):
            one.passes = 2
            one.gradients = {0: Counter({("", 0, 0, position): 1})}
            one.open(ExchangeGroup("stage:0", members), ExchangePurpose.GRADIENT, position)
        for number in range(2):
            for position, one in enumerate(devices):
                own = devices[1 - position].arrived("stage:0", number).own
                if spoil and number:
                    own = () if spoil == "missing" else beside(gradient, (*own, *own))
                one.arrived("stage:0", number).contributions[WorkerId("ab"[1 - position])] = own
                one.reduce("stage:0", number)
            parts = [one.arrived("stage:0", number).aggregates[i] for i, one in enumerate(devices)]
            for position, one in enumerate(devices):
                one.arrived("stage:0", number).aggregates[1 - position] = parts[1 - position]
                if spoil:
                    one.arrived("stage:0", number).aggregates[position] = parts[1 - position]
                assert (one.assemble("stage:0", number) is None) == (number == 0)
        return devices[0]

    gradient = ((("", 0, 0, 0), 1.0),)
    whole = {("", 0, 0, index): 1.0 for index in range(2)}
    assert dict(run().vectors["stage:0"].assembled or ()) == whole
    for spoil in ("missing", "another"):
        with pytest.raises(Inconsistent, match="does not belong to"):
            run(spoil)
    one = device()
    one.open(ExchangeGroup("stage:0", ()), ExchangePurpose.GRADIENT, 0)
    with pytest.raises(Inconsistent, match="pass 1 is not the present one"):
        one.reduce("stage:0", 1)


def test_what_was_loaded_of_a_void_line_says_nothing_about_the_present_one() -> None:
    def at_version_one(numeric_class: str, plan_version: int) -> Device:
        one = trained(0)
        one.numeric_class, one.plan_version = numeric_class, plan_version
        one.apply(0, 0.1, 1.0)
        return one

    def commit(checker: Checker) -> None:
        checker.prepared[0, 0] = {WorkerId("w")}
        checker.step_committed(StepCommitted(0, 0, 0.1, 1.0, 1.0))

    checker = Checker(1)
    checker.loaded(WorkerId("a"), device("a"))
    checker.loaded(WorkerId("b"), device("b"))
    commit(checker)
    checker.rewound(0, plan_version=2)
    copied = at_version_one("a", plan_version=1)
    copied.numeric_class = "b"
    # The copy was under way when the others went back; it ends before there is a version 1 again, and after.
    checker.loaded(WorkerId("b"), copied, observes=True)
    commit(checker)
    checker.holds(WorkerId("b"), at_version_one("b", plan_version=2))
    checker.loaded(WorkerId("b"), copied, observes=True)
    copied.plan_version = 2
    with pytest.raises(Inconsistent):
        checker.holds(WorkerId("b"), copied)


def test_a_transcript_is_readable_and_its_digest_tells_runs_apart() -> None:
    one, two = Transcript(), Transcript()
    for transcript in (one, two):
        transcript.add(1.25, "w00", "<-", KEY)
    assert one.digest() == two.digest()
    assert "MicrobatchKey(kind=1)" in one.tail()
    two.add(1.5, "w00", "!!", "is killed")
    assert one.digest() != two.digest()
    assert shorten("text") == "text"


def test_a_scenario_follows_from_its_seed_and_calm_changes_nothing_else() -> None:
    assert draw(11) == draw(11)
    calm = draw(11, calm=True)
    assert calm.faults == ()
    assert (calm.fleet, calm.steps, calm.microbatches, calm.tied) == (
        draw(11).fleet,
        draw(11).steps,
        draw(11).microbatches,
        draw(11).tied,
    )
