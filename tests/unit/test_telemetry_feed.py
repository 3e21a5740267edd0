"""What a node tells on the bus, and when: readers, floods, sums, and any order of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.engine import Decode, TokenDecoded
from kakeya_zmq.protocol import effects as fx
from kakeya_zmq.telemetry_feed import (
    EVENTS_BURST,
    REFUSALS_MAX,
    EventsDropped,
    Leaving,
    Noted,
    PublishSnapshot,
    Refused,
    Subscribed,
    TakeFigures,
    encode_fitting,
    encode_last,
)
from kakeya_zmq.telemetry_feed_jobs import FINAL_STATES
from tests.unit.telemetry_kit import (
    Rig,
    accepted,
    anything,
    append,
    appended,
    figures,
    progress,
    published,
    requests,
    result,
    submit,
    token,
)
from wire.bus import Topic
from wire.events import (
    TOPIC_OF,
    EvictionEvent,
    JobEvent,
    LogEvent,
    RequestEvent,
    SecurityEvent,
    SecurityKind,
    decode_event,
    encode_event,
)
from wire.limits import ANSWER_BYTES_MAX, REQUEST_RECORDS_MAX, TEXT_CHARACTERS_MAX


def test_without_listeners_nothing_is_told_and_no_clock_runs() -> None:
    rig = Rig(frozenset())
    effects = rig.see(
        submit(1), accepted(1), progress(1, 5), result(1), append(2), appended(2), Noted("info", "x"),
        Refused(SecurityKind.CARD_REFUSED, "x"),
    )  # fmt: skip
    assert effects == []
    assert rig.feed.deadline() is None


def test_a_snapshot_comes_at_once_and_then_regularly() -> None:
    rig = Rig(frozenset({Topic.NODE}))
    assert rig.see(Subscribed(Topic.NODE)) == [PublishSnapshot()]
    assert rig.later(10.0) == [PublishSnapshot()] * 5
    assert rig.see(Leaving()) == [PublishSnapshot()]
    rig.listeners = frozenset()
    assert rig.later(100.0) == []
    assert rig.see(Leaving()) == []


def test_many_readers_that_join_at_once_cost_one_snapshot_in_a_tenth_of_a_second() -> None:
    rig = Rig(frozenset({Topic.NODE}))
    effects = [effect for _ in range(200) for effect in rig.see(Subscribed(Topic.NODE))]
    assert effects == [PublishSnapshot()]
    assert rig.later(0.2) == [PublishSnapshot()]
    assert rig.later(1.5) == []


def test_a_late_reader_hears_of_active_jobs_and_former_requests() -> None:
    rig = Rig()
    rig.told(submit(1), accepted(1), progress(1, 500), submit(2, job=b"k" * 16), accepted(2), result(2))
    for number in range(10, 110):
        rig.told(append(number), appended(number))
    rig.now += 1
    (job,) = published(rig.see(Subscribed(Topic.JOB)))
    assert isinstance(job, JobEvent)
    assert (job.tokens_done, job.state) == (500, "running")
    told = requests(published(rig.see(Subscribed(Topic.REQUEST))))
    assert tuple(told) == rig.feed.last_requests(64)


def test_a_flood_is_held_back_and_counted_but_the_end_of_a_job_is_told() -> None:
    rig = Rig(frozenset({Topic.JOB, Topic.LOG}))
    effects = [effect for number in range(1_000) for effect in rig.see(Noted("info", f"line {number}"))]
    assert len(published(effects)) == int(EVENTS_BURST)
    assert sum(e.count for e in effects if isinstance(e, EventsDropped)) == 1_000 - int(EVENTS_BURST)
    ends = [
        event
        for number in range(600)
        for event in rig.told(submit(number, job=number.to_bytes(16, "big")), accepted(number), result(number))
        if isinstance(event, JobEvent) and event.state == "completed"
    ]
    assert len(ends) == 600
    rig.now += 10
    assert rig.told(Noted("warning", "again")) == [LogEvent(level="warning", text="again")]


def test_evictions_are_summed_up_over_a_second() -> None:
    rig = Rig(frozenset({Topic.EVICTION}))
    assert rig.see(Subscribed(Topic.EVICTION)) == [TakeFigures()]
    assert rig.see(figures(5, 500)) == []  # what was before
    assert rig.later(1.0) == [TakeFigures()]
    assert rig.told(figures(8, 900)) == [
        EvictionEvent(parts=3, size_bytes=400, interval_ms=1_000, bytes_used=7, max_bytes=10)
    ]
    assert rig.later(1.0) == [TakeFigures()]
    assert rig.told(figures(8, 900)) == []


def test_what_happened_while_nobody_listened_is_no_news() -> None:
    rig = Rig(frozenset({Topic.EVICTION}))
    rig.see(Subscribed(Topic.EVICTION), figures(5))
    rig.listeners = frozenset()
    assert rig.later(60.0) == []
    rig.listeners = frozenset({Topic.EVICTION})
    assert rig.see(Subscribed(Topic.EVICTION)) == [TakeFigures()]
    assert rig.told(figures(900)) == []


def test_refusals_are_summed_up_by_kind_and_subject() -> None:
    rig = Rig(frozenset({Topic.SECURITY}))
    rig.see(Subscribed(Topic.SECURITY))
    for number in range(50):
        rig.see(Refused(SecurityKind.CONNECTION_REFUSED, f"wrong key from 10.0.0.{number}"))
    rig.see(Refused(SecurityKind.NODE_APPEARED, "the node appeared", "worker-1"))
    told = published(rig.later(1.0))
    assert told == [
        SecurityEvent(kind="connection_refused", count=50, text="wrong key from (address)"),
        SecurityEvent(kind="node_appeared", subject="worker-1", count=1, text="the node appeared"),
    ]
    assert published(rig.later(5.0)) == []
    for number in range(REFUSALS_MAX + 100):
        rig.see(Refused(SecurityKind.NODE_APPEARED, "the node appeared", f"node-{number}"))
    told = published(rig.later(1.0))
    assert len(told) == REFUSALS_MAX + 1
    assert sum(event.count for event in told if isinstance(event, SecurityEvent)) == REFUSALS_MAX + 100


def test_a_decoded_token_is_nobodys_business_but_the_requests() -> None:
    rig = Rig()
    seen = fx.CommandEvent(fx.Ticket(1), TokenDecoded("sess-1", 5))
    command = fx.RunCommand(fx.Ticket(1), Decode("sess-1", 1, 8, ()))
    assert rig.see(seen, command, token(1)) == []


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_the_order_jobs_end_once_and_events_are_valid(data: st.DataObject) -> None:
    rig = Rig()
    choices = [seen for number in (1, 2) for seen in anything(number)]
    ended: set[str] = set()
    for seen in data.draw(st.lists(st.sampled_from(choices), max_size=40)):
        effects = rig.see(seen)
        if data.draw(st.booleans()):
            effects += rig.later(data.draw(st.sampled_from([0.01, 0.3, 3.0])))
        for event in published(effects):
            assert decode_event(TOPIC_OF[type(event)], encode_fitting(event)) == event
            # A worker's asker may use an id again when its job has ended.
            if isinstance(event, JobEvent) and event.place == "primary":
                assert event.job_id not in ended
                assert event.tokens_done <= event.tokens_total
                ended |= {event.job_id} if event.state in FINAL_STATES else set()


def test_of_the_last_records_as_many_are_told_as_fit_into_one_answer() -> None:
    def record(number: int, text: str) -> RequestEvent:
        return RequestEvent(request_id=f"r{number}", operation="append", outcome="ready", reasons=(text,) * 32)

    small = tuple(record(number, "w") for number in range(REQUEST_RECORDS_MAX))
    assert len(encode_last(small, ANSWER_BYTES_MAX)) == len(small)
    large = tuple(record(number, "w" * TEXT_CHARACTERS_MAX) for number in range(REQUEST_RECORDS_MAX))
    told = encode_last(large, ANSWER_BYTES_MAX)
    assert ANSWER_BYTES_MAX / 2 < sum(map(len, told)) <= ANSWER_BYTES_MAX
    assert told == tuple(map(encode_event, large[-len(told) :]))
    assert encode_last(large, 100) == ()
