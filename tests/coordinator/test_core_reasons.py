"""Why a worker does what it does, in words: for every state that it can be in."""

from __future__ import annotations

from starlings_coordinator.core.events import EvictionRequested, PauseRequested, WorkerSaid
from starlings_coordinator.core.members import Suspicion
from starlings_coordinator.core.reasons import find_worker, why
from starlings_coordinator.core.straggling import Cause, Colour, Verdict
from starlings_protos.messages import Heartbeat, Leaving, WorkerId
from support.core_world import World, config
from support.streaming_world import lazy_world


def said(world: World, name: str) -> dict[str, str]:
    reply = why(world.core, WorkerId(name), world.now())
    assert reply.worker_id == name
    assert reply.because
    for because in reply.because:
        assert because.text.rstrip().endswith("."), because.text
        assert "None" not in because.text
    merged: dict[str, str] = {}
    for because in reply.because:
        merged[because.topic] = f"{merged.get(because.topic, '')} {because.text}".strip()
    merged["is"] = reply.state
    return merged


def test_a_worker_is_named_by_the_beginning_of_its_id() -> None:
    world = lazy_world()
    assert find_worker(world.core, "wa") == (WorkerId("wa"),)
    assert find_worker(world.core, "w") == tuple(WorkerId(w) for w in ("wa", "wb", "wc", "wd"))
    assert find_worker(world.core, "x") == find_worker(world.core, "") == ()


def test_a_holder_says_what_it_holds_with_whom_and_where_its_work_comes_from() -> None:
    world = lazy_world()
    words = said(world, "wd")
    assert words["is"] == "training"
    assert "holds stage 2 of 3" in words["span"]
    assert "2 other holders or more, so it may leave" in words["span"]
    assert "Its work comes from the holders of stage 1: wa, wc." in words["waiting"]
    world.core.membership.lose(world.core.members[WorkerId("wc")], "a test")
    assert "Nobody else holds stage 0 and 1" in said(world, "wa")["span"]
    assert "tokens/s through that" in said(world, "wa")["span"]


def test_who_is_slow_is_told_what_follows_and_what_helps() -> None:
    world = lazy_world()
    paces = world.core.watch.paces
    paces.verdict = lambda _: Verdict(Colour.RED, 2.4, Cause.HEAT)  # type: ignore[method-assign]
    words = said(world, "wd")
    assert "It is red: 2.4x slower than planned" in words["pace"]
    assert "somebody else should hold its stages" in words["pace"]
    assert "cooling" in words["do"]


def test_suspects_leavers_and_the_lost() -> None:
    world = lazy_world()
    member = world.core.members[WorkerId("wd")]
    member.suspicion = Suspicion(world.now_s - 3, "nothing was heard of it for 4 s")
    assert "suspect for 3 s: nothing was heard" in said(world, "wd")["suspect"]
    member.suspicion = None
    fake = world.fakes[WorkerId("wa")]
    world.feed(WorkerSaid(fake.session, fake.worker_id, Leaving("reboot", 60.0)))
    words = said(world, "wa")
    assert (words["is"], words["state"]) == ("leaving", "It leaves: reboot.")
    world.core.membership.lose(member, "its connection ended")
    words = said(world, "wd")
    assert words["is"] == "gone"
    assert "its connection ended" in words["state"]


def test_before_a_plan_and_beside_one() -> None:
    world = World(config(), {"wa": (0, 2), "wb": (0, 2)})
    world.boot()
    world.join("wx", mute=True)
    world.join("wy")
    assert "being measured" in said(world, "wx")["state"]
    words = said(world, "wy")
    assert words["is"] == "standby"
    assert "waits for a plan" in words["state"]
    assert "waiting for" in words["waiting"]


def test_set_aside_evicted_and_paused() -> None:
    world = lazy_world()
    world.join("wz", lazy=True)
    world.core.membership.set_aside(world.core.members[WorkerId("wz")], "it could not copy")
    words = said(world, "wz")
    assert "set aside for 30 s: it could not copy" in words["failures"]
    assert "engine.log" in words["do"]
    world.feed(PauseRequested(1, "lunch"))
    assert "`starlings resume` goes on" in said(world, "wa")["paused"]
    world.feed(EvictionRequested(2, WorkerId("wd"), "too loud", 60.0))
    words = said(world, "wd")
    assert words["is"] == "evicted"
    assert "too loud" in words["evicted"]
    assert "--readmit" in words["do"]


def test_every_worker_of_a_job_that_is_over_is_explained() -> None:
    world = World(config(), {"wa": (0, 2), "wb": (0, 2)})
    world.start()
    world.run_to_the_end()
    for name in ("wa", "wb"):
        assert said(world, name)["is"] in ("training", "gone")


def test_asking_changes_nothing() -> None:
    world = lazy_world()
    fake = world.fakes[WorkerId("wa")]
    world.feed(WorkerSaid(fake.session, fake.worker_id, Heartbeat(progress=3)))
    before = world.core.snapshot()
    for name in world.spans:
        said(world, str(name))
    assert world.core.snapshot() == before
    assert world.core.handle(PauseRequested(9, "x"), world.now())[0], "and nothing was left on the desk"
