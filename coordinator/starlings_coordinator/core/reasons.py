"""Why a worker does what it does, in words, for the owner: from what the core knows. Nothing changes by asking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_never

from starlings_coordinator.core.events import Now
from starlings_coordinator.core.members import Member, MemberState
from starlings_coordinator.core.observers import stage_words
from starlings_coordinator.core.operating import eviction_words
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.straggling import Cause, Colour
from starlings_coordinator.core.views import EVICTED
from starlings_protos.invite import spoken_duration
from starlings_protos.messages import Span, WorkerId
from starlings_protos.status import Because, WhyReply

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

GONE = "gone"

_HELP = {
    Cause.NONE: "see what else the machine is busy with",
    Cause.COMPUTE: "see what else uses its device; when it joins again it is measured anew, and counted on for less",
    Cause.UPLINK: "see what else uses its uplink; a smaller [pipeline] codec or a larger [exchange] every sends less",
    Cause.QUEUE: "its peers are what is slow: ask why of those that hold the stages next to its own",
    Cause.HEAT: "better cooling, or a lower power limit, which costs less speed than heat does",
    Cause.POWER: "a higher power limit, or the supply that the device asks for",
}


def find_worker(core: Core, named: str) -> tuple[WorkerId, ...]:
    """Ids that begin with `named`, or the one that it is: of those who are here, were here, or may not be."""
    known = core.members.keys() | core.state.evicted.keys() | core.state.incarnations.keys()
    if not named:
        return ()
    return (WorkerId(named),) if named in known else tuple(sorted(w for w in known if w.startswith(named)))


def why(core: Core, worker_id: WorkerId, now: Now) -> WhyReply:
    """The most telling reason first."""
    member = core.members.get(worker_id)
    if member is None:
        return _away(core, worker_id)
    because = [
        *_trouble(core, member, now),
        *_pause(core),
        *_place(core, member, now),
        *_pace(core, member),
    ]
    return WhyReply(worker_id, member.state.value, tuple(because))


def _away(core: Core, worker_id: WorkerId) -> WhyReply:
    eviction = core.state.evicted.get(worker_id)
    if eviction is not None:
        back = (
            "It is let in again then, with what it holds by then loaded anew; its process has ended with exit code 16 "
            "and has to be started again, unless a service manager does that."
        )
        do = f"`starlings evict {worker_id[:7]} --readmit` lets it back now."
        because = (
            Because("evicted", f"It was {eviction_words(eviction)}."),
            Because(
                "waiting", back if eviction.until_s else "It is not let in before the owner lets it back."
            ),
            Because("do", do),
        )
        return WhyReply(worker_id, EVICTED, because)
    reason = core.membership.partings.get(worker_id)
    words = f"It is not connected. The last time, {reason}." if reason else "It is not connected."
    return WhyReply(
        worker_id, GONE, (Because("state", words), Because("do", "Start `starlings join` there again."))
    )


# ---------------------------------------------------------------- what is wrong


def _trouble(core: Core, member: Member, now: Now) -> Iterator[Because]:
    if member.suspicion is not None:
        since_s = now.monotonic_s - member.suspicion.since_s
        over = (
            "a word of it ends that"
            if member.suspicion.of_silence
            else "anything that it gets done ends that"
        )
        yield Because(
            "suspect",
            f"It has been suspect for {spoken_duration(since_s)}: {member.suspicion.reason}. It gets no new work "
            f"meanwhile and is given up if that goes on; {over}.",
        )
    if member.session is None:
        yield Because("state", "Its connection has ended just now; it is waited for, for a moment.")
    until_s = member.set_aside_until_s
    if until_s is not None and until_s > now.monotonic_s:
        yield Because(
            "failures",
            f"It is {member.reason.removesuffix('.')}. No plan counts on it for "
            f"{spoken_duration(until_s - now.monotonic_s)} more; each time that it fails again it waits longer.",
        )
        yield Because("do", "Its own log (engine.log in the worker's directory) says what failed.")


def _pause(core: Core) -> Iterator[Because]:
    if core.operating.holds_up:
        yield Because("paused", f"The job is {core.operating.words()}. `starlings resume` goes on.")


# ---------------------------------------------------------------- what it does, and what it waits for


def _place(core: Core, member: Member, now: Now) -> Iterator[Because]:
    match member.state:
        case MemberState.JOINING:
            yield Because("state", f"It has joined and {member.reason or 'has not been measured yet'}.")
            if (other := _measured_now(core, member)) is not None:
                yield Because(
                    "waiting",
                    f"{other} of the same machine is being measured; two at once would measure each other.",
                )
        case MemberState.PROBING:
            since_s = now.monotonic_s - (member.probe_started_at_s or now.monotonic_s)
            yield Because(
                "state",
                f"Its device is being measured, for {spoken_duration(since_s)} so far: how long each kind of block "
                "takes, and how much memory it has. Nothing is planned with it before.",
            )
        case MemberState.STANDBY:
            yield from _idle(core, member)
        case MemberState.OBSERVING:
            yield Because("state", f"It {member.reason}. It gets work as soon as it has caught up.")
        case MemberState.LOADING:
            since_s = now.monotonic_s - member.load_started_at_s
            ready = member.ready is not None
            yield Because(
                "state", "It is ready." if ready else f"It loads its span, for {spoken_duration(since_s)}."
            )
            yield Because(
                "waiting", f"Training begins when everybody is ready: {core.planning.loading_words()}."
            )
            yield from _span(core, member)
        case MemberState.TRAINING:
            yield from _training(core, member)
            yield from _span(core, member)
        case MemberState.LEAVING:
            yield Because("state", f"It leaves: {member.leaving or member.reason}.")
            if member in core.finishing.last_holders():
                yield Because(
                    "waiting", "It is the last holder of a stage: its state is saved before it may go."
                )
            else:
                yield Because("waiting", "It finishes what it has begun, and goes then.")
        case MemberState.LOST:
            yield Because("state", f"It is lost: {member.reason}.")
        case _:
            assert_never(member.state)


def _measured_now(core: Core, member: Member) -> WorkerId | None:
    return next(
        (
            other.worker_id
            for _, other in sorted(core.members.items())
            if other.host == member.host and other.state is MemberState.PROBING
        ),
        None,
    )


def _idle(core: Core, member: Member) -> Iterator[Because]:
    if member.set_aside_until_s is not None:
        return
    reason = member.reason or "there is no plan yet"
    yield Because("state", f"It is idle: {reason}.")
    if core.phase in (Phase.GATHERING, Phase.PLANNING, Phase.LOADING):
        yield Because(
            "waiting", f"The whole job is {core.waiting_words()}." if core.waiting_words() else "A plan."
        )
    elif core.phase is Phase.TRAINING:
        if member.worker_id in core.joining.placing.placed:
            yield Because("waiting", "It has a place, and begins to copy with the next version.")
        elif not core.joining.placing.is_worthwhile(core.state.step + 1):
            yield Because("waiting", "The job ends so soon that copying the weights is not worth it.")
        else:
            yield Because("waiting", "The planner places it once nobody has come or gone for a while.")
    elif core.phase is Phase.FINISHING:
        yield Because("waiting", "The job is ending, and nobody is needed beside those that hold a stage.")
    if "more memory" in reason:
        yield Because(
            "do", "A device with more memory; or, before anything is trained, a cut into more stages."
        )


def _span(core: Core, member: Member) -> Iterator[Because]:
    state, span = core.state, core.state.spans.get(member.worker_id)
    if span is None:
        return
    planned, probe = state.planned.get(member.worker_id), member.probe
    words = f"It holds {stage_words(span)} of {len(state.stages)}"
    if planned is not None and probe is not None and planned.memory_bytes:
        words += f", which takes {planned.memory_bytes / 1e9:.2f} of its {probe.memory_bytes / 1e9:.2f} GB"
    capacity = core.watch.capacity_tokens_per_s(member)
    if capacity:
        words += f"; by its measurement it can pass {capacity:,.0f} tokens/s through that"
    yield Because("span", f"{words}. {_company(core, member.worker_id, span)}")


def _company(core: Core, worker_id: WorkerId, span: Span) -> str:
    others = {stage: [w for w in core.holders_of(stage) if w != worker_id] for stage in span.stages}
    alone = [stage for stage, holders in others.items() if not holders]
    if alone:
        stages = " and ".join(map(str, alone))
        return f"Nobody else holds stage {stages}: without it training goes back to the newest saved version."
    fewest = min(others, key=lambda stage: len(others[stage]))
    count = len(others[fewest])
    return f"Each of its stages has {count} other holder{'s' * (count != 1)} or more, so it may leave without loss."


def _training(core: Core, member: Member) -> Iterator[Because]:
    span = core.state.spans.get(member.worker_id)
    if span is None or core.phase is not Phase.TRAINING:
        yield Because("state", f"The job is {core.phase.value}. {member.reason}".strip())
        return
    rate = core.rates.worker_tokens_per_s(member.worker_id)
    yield Because(
        "state", f"It trains: {rate:,.0f} tokens/s of late." if rate else "It takes part in training."
    )
    stuck = core.waiting_words()
    if stuck and not core.paused:
        yield Because("waiting", f"The whole job is {stuck}.")
    if span.first_stage == 0:
        if member.wish:
            yield Because("waiting", f"It could begin {member.wish} more microbatches than it was given.")
    else:
        givers = [w for w in core.holders_of(span.first_stage - 1) if w != member.worker_id]
        some = ", ".join(givers[:3]) + (" and others" if len(givers) > 3 else "")
        yield Because("waiting", f"Its work comes from the holders of stage {span.first_stage - 1}: {some}.")
    if member.counters is not None and (total := sum(member.counters.seconds().values())) > 0:
        shares = member.counters.seconds()
        yield Because(
            "waiting",
            f"Since its start its device has computed for {shares['compute'] / total:.0%} of the time and had nothing "
            f"to do for {shares['wait'] / total:.0%}.",
        )


def _pace(core: Core, member: Member) -> Iterator[Because]:
    if member.worker_id not in core.state.spans or core.phase is not Phase.TRAINING:
        return
    verdict = core.watch.paces.verdict(member.worker_id)
    match verdict.colour:
        case Colour.GREEN:
            if verdict.cause is Cause.QUEUE:
                yield Because(
                    "pace", "It is as fast as planned, but its peers have no room for what it computes."
                )
                yield Because("do", f"{_HELP[Cause.QUEUE].capitalize()}.")
            return
        case Colour.YELLOW:
            follows = "so it is leased less, and others send it less"
        case Colour.RED:
            follows = "so it is leased less, and somebody else should hold its stages"
        case _:
            assert_never(verdict.colour)
    yield Because("pace", f"It is {verdict.colour.name.lower()}: {verdict.words()}, {follows}.")
    yield Because("do", f"{_HELP[verdict.cause].capitalize()}.")
