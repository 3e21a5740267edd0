"""Telemetry events: their form on the wire, for readers that are older or newer than the node."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import events, messages
from wire.bus import PAYLOAD_BYTES_MAX, Topic
from wire.cards import CARD_TTL_MS_MAX
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.events import (
    EVENT_TYPES,
    FIGURE_MAX,
    TOPIC_OF,
    DecisionView,
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
        (Topic.NODE, {"roles": ["a"], "ttl_ms": CARD_TTL_MS_MAX + 1}),
        (Topic.NODE, {"roles": ["a"], "peers": [{"node_id": "n", "ttl_ms": CARD_TTL_MS_MAX + 1}]}),
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


NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.sampled_from(
        [0, FIGURE_MAX, FIGURE_MAX + 1, -FIGURE_MAX, -FIGURE_MAX - 1, 1e15, 1e308, math.inf, -math.inf, math.nan]
    ),
)
TAKING_ANY: dict[str, tuple[Topic, dict[str, Any]]] = {
    "a section": (Topic.NODE, {"roles": ["a"], "sections": {"cache": {"bytes_used": 0}}}),
    "the skew of a clock": (Topic.NODE, {"roles": ["a"], "peers": [{"node_id": "n", "clock_skew_ms": 0}]}),
    "a time": (Topic.JOB, {"job_id": "j", "state": "running", "eta_ms": 0}),
    "a count": (Topic.EVICTION, {"parts": 1, "size_bytes": 0}),
    "a time to live": (Topic.NODE, {"roles": ["a"], "ttl_ms": 0}),
    "a count deep down": (
        Topic.REQUEST,
        {"request_id": "r", "operation": "append", "outcome": "ready", "sources": [{"kind": "hot", "start": 0, "end": 0}]},
    ),
    "a cost": (
        Topic.REQUEST,
        {
            "request_id": "r",
            "operation": "append",
            "outcome": "ready",
            "decisions": [{"what": "w", "chosen": "c", "costs_ms": {"x": 0}}],
        },
    ),
}
"""Places of numbers: events in which the last number is to be replaced."""


def with_number(payload: object, number: float) -> object:
    """The payload with the number instead of its last one."""
    match payload:
        case dict():
            last = list(payload)[-1]
            return {**payload, last: with_number(payload[last], number)}
        case list():
            return [*payload[:-1], with_number(payload[-1], number)]
        case _:
            return number


def numbers_in(value: object) -> list[float]:
    match value:
        case bool():
            return []
        case int() | float():
            return [value]
        case dict():
            return [number for each in value.values() for number in numbers_in(each)]
        case list() | tuple():
            return [number for each in value for number in numbers_in(each)]
        case _:
            return []


@pytest.mark.parametrize("place", TAKING_ANY)
@given(number=NUMBERS)
def test_every_number_of_an_event_is_finite_and_bounded_or_the_event_is_refused(place: str, number: float) -> None:
    topic, payload = TAKING_ANY[place]
    try:
        event = decode_event(topic, msgspec.msgpack.encode(with_number(payload, number)))
    except RemoteProtocolError:
        assert place != "a section" or not -FIGURE_MAX <= number <= FIGURE_MAX
        return
    assert all(math.isfinite(each) and abs(each) <= FIGURE_MAX for each in numbers_in(msgspec.to_builtins(event)))


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e308, -1e308, 2**64 - 1, -(2**63), FIGURE_MAX + 2])
def test_a_figure_that_nobody_can_add_up_is_refused_wherever_it_stands(number: float) -> None:
    for place, (topic, payload) in TAKING_ANY.items():
        if place == "a cost" and FIGURE_MAX < number < math.inf:
            continue
        with pytest.raises(RemoteProtocolError):
            decode_event(topic, msgspec.msgpack.encode(with_number(payload, number)))


def test_figures_up_to_the_bound_pass_as_they_are() -> None:
    figures = {"a": FIGURE_MAX, "b": -FIGURE_MAX, "c": float(FIGURE_MAX), "d": True, "e": None, "f": "1e999", "g": 1.8e12}
    sent = NodeSnapshot(roles=("cache",), sections={"cache": figures}, memory_bytes=FIGURE_MAX, ttl_ms=CARD_TTL_MS_MAX)
    assert decode_event(Topic.NODE, encode_event(sent)) == sent


def test_the_bound_is_that_of_counts() -> None:
    found = msgspec.inspect.type_info(messages.Count)
    assert isinstance(found, msgspec.inspect.IntType)
    assert found.le == FIGURE_MAX


def test_a_cost_that_another_nodes_card_made_huge_does_not_get_the_event_refused() -> None:
    decision = DecisionView(what="rest", chosen="compute", costs_ms={"worker liar": 1e300, "compute": 12.5})
    sent = RequestEvent(request_id="r", operation="append", outcome="ready", decisions=(decision,))
    told = decode_event(Topic.REQUEST, encode_event(sent))
    assert isinstance(told, RequestEvent)
    assert told.decisions[0].costs_ms == {"worker liar": float(FIGURE_MAX), "compute": 12.5}


@given(st.sampled_from(sorted(EVENT_TYPES)), st.binary(max_size=300))
def test_any_bytes_are_an_event_or_a_remote_error(topic: Topic, payload: bytes) -> None:
    try:
        event = decode_event(topic, payload)
    except RemoteProtocolError:
        return
    assert isinstance(event, EVENT_TYPES[topic])
