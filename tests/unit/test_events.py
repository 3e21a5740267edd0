"""Telemetry events: their form on the wire, for readers that are older or newer than the node."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import events
from wire.bus import PAYLOAD_BYTES_MAX, Topic
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.events import (
    EVENT_TYPES,
    TOPIC_OF,
    Event,
    EvictionEvent,
    JobEvent,
    LogEvent,
    NodeSnapshot,
    RequestEvent,
    SecurityEvent,
    TransferEvent,
    decode_event,
    encode_event,
)

SMALLEST: dict[type[Event], Event] = {
    NodeSnapshot: NodeSnapshot(roles=("cache",)),
    JobEvent: JobEvent(job_id="j", state="queued"),
    RequestEvent: RequestEvent(request_id="r", operation="append", outcome="ready"),
    TransferEvent: TransferEvent(direction="in"),
    EvictionEvent: EvictionEvent(parts=1, size_bytes=2),
    SecurityEvent: SecurityEvent(kind="card_refused"),
    LogEvent: LogEvent(level="info", text="line"),
}


def test_each_telemetry_topic_carries_one_kind_of_event() -> None:
    assert set(EVENT_TYPES) == {topic for topic in Topic if topic.group.value == "telemetry"}
    assert {TOPIC_OF[kind] for kind in EVENT_TYPES.values()} == set(EVENT_TYPES)
    assert set(SMALLEST) == set(TOPIC_OF)


@pytest.mark.parametrize("event", SMALLEST.values(), ids=lambda event: type(event).__name__)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    assert decode_event(TOPIC_OF[type(event)], encode_event(event)) == event


@pytest.mark.parametrize("event", SMALLEST.values(), ids=lambda event: type(event).__name__)
def test_fields_of_a_newer_node_are_ignored(event: Event) -> None:
    newer = {**msgspec.to_builtins(event), "a_field_of_tomorrow": [1, {"x": 2}]}
    assert decode_event(TOPIC_OF[type(event)], msgspec.msgpack.encode(newer)) == event


def test_fields_at_their_default_do_not_travel() -> None:
    assert len(encode_event(SMALLEST[JobEvent])) < 40


@pytest.mark.parametrize(
    ("topic", "payload"),
    [
        (Topic.JOB, {"job_id": "j"}),
        (Topic.JOB, {"job_id": "j", "state": "queued", "tokens_total": -1}),
        (Topic.JOB, {"job_id": "j" * 129, "state": "queued"}),
        (Topic.LOG, {"level": "info", "text": "x" * 513}),
        (Topic.NODE, {"roles": ["a"] * 9}),
        (Topic.NODE, {"roles": ["a"], "peers": [{"node_id": "n"}] * (events.PEERS_MAX + 1)}),
        (Topic.NODE, {"roles": ["a"], "sections": {"node": {"x": [1]}}}),
        (Topic.REQUEST, {"request_id": "r", "operation": "append", "outcome": "ready", "reasons": ["x"] * 33}),
        (Topic.EVICTION, {"parts": 1}),
        (Topic.LOG, "text"),
    ],
)
def test_what_breaks_a_bound_is_refused(topic: Topic, payload: object) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_event(topic, msgspec.msgpack.encode(payload))


def test_what_is_too_large_is_neither_sent_nor_read() -> None:
    peers = tuple(events.PeerView(node_id=f"{number}" + "n" * 120, bus_address="a" * 262) for number in range(256))
    with pytest.raises(LocalProtocolError):
        encode_event(NodeSnapshot(roles=("cache",), peers=peers))
    with pytest.raises(RemoteProtocolError):
        decode_event(Topic.LOG, b"\x00" * (PAYLOAD_BYTES_MAX + 1))


def test_fleet_topics_carry_no_event() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_event(Topic.CARD, encode_event(SMALLEST[LogEvent]))


@given(st.sampled_from(sorted(EVENT_TYPES)), st.binary(max_size=300))
def test_any_bytes_are_an_event_or_a_remote_error(topic: Topic, payload: bytes) -> None:
    try:
        event = decode_event(topic, payload)
    except RemoteProtocolError:
        return
    assert isinstance(event, EVENT_TYPES[topic])
