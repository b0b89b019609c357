"""Topics, payloads and presence of the MQTT bus: pure."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from starlings_protos import bus_pb2, common_pb2, control_pb2
from starlings_protos.bus import payloads, presence
from starlings_protos.bus.payloads import Form, MalformedPayload
from starlings_protos.bus.topics import Kind, Topic, all_of, parse

JOB = "first-flight"
ALICE = "w" + "a" * 16
BOB = "w" + "b" * 16
ONLINE, OFFLINE, LOST = bus_pb2.PRESENCE_ONLINE, bus_pb2.PRESENCE_OFFLINE, bus_pb2.PRESENCE_LOST
TOPICS = [Topic(JOB, kind, ALICE if kind in (Kind.STATUS, Kind.TELEMETRY) else "") for kind in Kind]


@pytest.mark.parametrize("topic", TOPICS, ids=str)
def test_topics_are_read_as_written(topic: Topic) -> None:
    assert parse(str(topic)) == topic
    assert str(topic).startswith(all_of(JOB).removesuffix("#"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "starlings/v1",
        f"starlings/v2/{JOB}/plan",
        f"starlings/v1/{JOB}/plan/",
        f"starlings/v1/{JOB}/status",
        f"starlings/v1/{JOB}/worker/{ALICE}/plan",
        f"starlings/v1/{JOB}/worker/{ALICE}x/status",
        f"starlings/v1/{JOB}/worker/o{'a' * 16}/status",
        f"starlings/v1/+/worker/{ALICE}/status",
        f"starlings/v1/{JOB}/worker/{ALICE}/status\n",
        f"/starlings/v1/{JOB}/plan",
    ],
)
def test_other_topics_are_not_ours(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize("job", ["", "a/b", "a+", "#", "$SYS", "a\0", "x" * 64])
def test_no_job_can_reach_into_anothers_topics(job: str) -> None:
    with pytest.raises(ValueError, match="no name of a job"):
        Topic(job, Kind.PLAN)
    with pytest.raises(ValueError, match="no name of a job"):
        all_of(job)


def messages() -> list[tuple[Topic, payloads.BusMessage]]:
    sample = control_pb2.TelemetrySample(wall_time_s=1.5, progress=3, forward_bytes=2**40, compute_s=0.25)
    held = bus_pb2.Holding(worker_id=ALICE, span=common_pb2.Span(first_stage=1, last_stage=2))
    return list(
        zip(
            sorted(TOPICS, key=lambda topic: list(Kind).index(topic.kind)),
            [
                bus_pb2.BusStatus(
                    worker_id=ALICE, presence=ONLINE, session=2**63 + 1, sequence=4, state="training"
                ),
                control_pb2.Telemetry(worker_id=ALICE, incarnation=2, samples=[sample] * 3),
                bus_pb2.PlanNotice(plan_version=7, phase="training", holdings=[held]),
                bus_pb2.EventNotice(step=3, losses=[control_pb2.LossPoint(step=2, loss=4.5)]),
                bus_pb2.CommandHint(kind="call", reason="started again"),
            ],
            strict=True,
        )
    )


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(("topic", "message"), messages(), ids=lambda value: getattr(value, "kind", ""))
def test_payloads_are_read_as_written(topic: Topic, message: Message, form: Form) -> None:
    payload = payloads.encode(message, form)
    assert (payload[:1] == b"{") == (form is Form.JSON)
    assert payloads.fits(topic.kind, payload)
    assert payloads.decode(topic, payload) == message


def test_a_reader_takes_fields_of_later_versions() -> None:
    read = payloads.decode(TOPICS[0], b'{"worker_id": "%s", "mood": "good"}' % ALICE.encode())
    assert read == bus_pb2.BusStatus(worker_id=ALICE)


@pytest.mark.parametrize(
    "payload", [b"{", b"\xff" * 9, b'{"session": "x"}', b'{"worker_id": 7}', b"{" * 900, b"{\xff}"]
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedPayload):
        payloads.decode(TOPICS[0], payload)


def test_nobody_speaks_for_another_even_where_the_broker_lets_him() -> None:
    with pytest.raises(MalformedPayload, match="speaks on"):
        payloads.decode(TOPICS[0], payloads.encode(bus_pb2.BusStatus(worker_id=BOB), Form.PROTOBUF))


@pytest.mark.parametrize("topic", TOPICS, ids=str)
def test_size_is_checked_before_anything_is_parsed(topic: Topic) -> None:
    with pytest.raises(MalformedPayload, match="bytes on"):
        payloads.decode(topic, b" " * (payloads.LIMIT_BYTES[topic.kind] + 1))


@given(
    st.sampled_from(TOPICS), st.binary(max_size=300) | st.binary(max_size=300).map(lambda tail: b"{" + tail)
)
def test_any_bytes_are_a_message_or_malformed(topic: Topic, payload: bytes) -> None:
    with contextlib.suppress(MalformedPayload):
        payloads.decode(topic, payload)


# ------------------------------------------------------------------ presence


def said(word: bus_pb2.Presence, session: int, sequence: int = 1) -> bus_pb2.BusStatus:
    return bus_pb2.BusStatus(worker_id=ALICE, presence=word, session=session, sequence=sequence)


def after(*statuses: bus_pb2.BusStatus | None) -> bus_pb2.BusStatus | None:
    known = None
    for now_s, status in enumerate(statuses):
        known = presence.fold(known, status, float(now_s))
    return known.status if known else None


def test_a_will_ends_its_own_session() -> None:
    assert after(said(ONLINE, 1, 5), said(LOST, 1, 0)) == said(LOST, 1, 0)


def test_an_old_will_does_not_overrule_a_newer_online() -> None:
    assert after(said(ONLINE, 1), said(ONLINE, 2), said(LOST, 1, 0)) == said(ONLINE, 2)


def test_a_will_of_a_session_that_was_never_seen_does_not_either() -> None:
    assert after(said(ONLINE, 2), said(LOST, 1, 0)) == said(ONLINE, 2)


def test_a_goodbye_is_the_last_word_of_its_session_and_not_of_the_worker() -> None:
    assert after(said(ONLINE, 1), said(OFFLINE, 1, 2), said(LOST, 1, 0)) == said(OFFLINE, 1, 2)
    assert after(said(ONLINE, 1), said(OFFLINE, 1, 2), said(ONLINE, 2)) == said(ONLINE, 2)


def test_what_is_delivered_twice_or_late_changes_nothing() -> None:
    assert after(said(ONLINE, 1, 2), said(ONLINE, 1, 1)) == said(ONLINE, 1, 2)


def test_an_empty_payload_forgets() -> None:
    assert after(said(ONLINE, 1), None) is None
    assert after(said(ONLINE, 1), None, said(ONLINE, 1)) == said(ONLINE, 1)


@given(st.permutations([said(LOST, 1, 0), said(LOST, 2, 0), said(ONLINE, 1), said(ONLINE, 2)]))
def test_wherever_old_wills_land_the_newest_online_session_counts(order: list[bus_pb2.BusStatus]) -> None:
    """A broker orders one session's words; between sessions anything may come late, but `online` came in order."""
    if order.index(said(ONLINE, 1)) > order.index(said(ONLINE, 2)):
        return
    if order.index(said(LOST, 2, 0)) < order.index(said(ONLINE, 2)):
        return
    newest = said(LOST, 2, 0)
    assert after(*order) == newest
    assert after(*(status for status in order if status != newest)) == said(ONLINE, 2)


def test_a_worker_repeats_itself_when_the_broker_keeps_something_else() -> None:
    own = said(ONLINE, 2, 7)
    assert presence.contradicts(own, None)
    assert presence.contradicts(own, said(LOST, 1, 0))
    assert presence.contradicts(own, said(LOST, 2, 0))
    assert not presence.contradicts(own, said(ONLINE, 2, 3))
