"""Layout and sealing of bus messages."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wire import limits
from wire.bus import NODE_ID_BYTES_MAX, PAYLOAD_BYTES_MAX, BusMessage, Group, Topic, open_message, seal_message
from wire.errors import AuthenticationError, LocalProtocolError, RemoteProtocolError
from wire.ids import NodeId
from wire.text import NODE_ID, NODE_ID_CHARACTERS_MAX, is_node_id

FLEET_KEY = bytes(range(32))
TELEMETRY_KEY = bytes(range(32, 64))
KEYS = {Group.FLEET: FLEET_KEY, Group.TELEMETRY: TELEMETRY_KEY}

messages = st.builds(
    BusMessage,
    node_id=st.from_regex(NODE_ID, fullmatch=True).map(NodeId),
    topic=st.sampled_from(Topic),
    incarnation=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
)


def sealed(message: BusMessage) -> list[bytes]:
    return seal_message(message, KEYS[message.topic.group], secrets.token_bytes)


EXAMPLE = BusMessage(NodeId("worker-1"), Topic.CARD, 7, 42, b"payload")


@given(messages)
def test_what_is_sealed_opens_to_the_same_message(message: BusMessage) -> None:
    assert open_message(sealed(message), KEYS) == message


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=110).filter(lambda text: not is_node_id(text)))
@example("two\nlines")
@example("\x1b[2J")
@example("w\u043erker")
@example("..")
def test_a_sender_with_another_name_than_nodes_have_is_refused(name: str) -> None:
    message = BusMessage(NodeId(name), Topic.NODE, 1, 1, b"payload")
    with pytest.raises(RemoteProtocolError, match="a bad node id"):
        open_message(sealed(message), KEYS)


@given(messages, st.data())
@settings(max_examples=200)
def test_a_changed_byte_anywhere_is_refused(message: BusMessage, data: st.DataObject) -> None:
    frames = sealed(message)
    which = data.draw(st.integers(0, 2))
    place = data.draw(st.integers(0, len(frames[which]) - 1))
    flip = data.draw(st.integers(1, 255))
    frame = bytearray(frames[which])
    frame[place] ^= flip
    frames[which] = bytes(frame)
    with pytest.raises(RemoteProtocolError):
        open_message(frames, KEYS)


@given(st.lists(st.binary(max_size=120), max_size=5))
def test_any_frames_are_refused_by_one_error_family(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        open_message(frames, KEYS)


def test_a_payload_cannot_be_moved_under_another_header() -> None:
    topic, header, _ = sealed(EXAMPLE)
    other = sealed(BusMessage(EXAMPLE.node_id, EXAMPLE.topic, 7, 43, b"payload"))
    with pytest.raises(AuthenticationError):
        open_message([topic, header, other[2]], KEYS)


def test_equal_messages_never_look_alike() -> None:
    assert sealed(EXAMPLE)[2] != sealed(EXAMPLE)[2]


def test_the_telemetry_key_opens_telemetry_only() -> None:
    reader = {Group.TELEMETRY: TELEMETRY_KEY}
    telemetry = BusMessage(NodeId("n"), Topic.NODE, 1, 1, b"x")
    assert open_message(sealed(telemetry), reader) == telemetry
    with pytest.raises(RemoteProtocolError, match="not ours"):
        open_message(sealed(EXAMPLE), reader)


def test_another_key_opens_nothing() -> None:
    with pytest.raises(AuthenticationError):
        open_message(sealed(EXAMPLE), {Group.FLEET: TELEMETRY_KEY})


def test_the_largest_message_fits_the_bus_and_a_larger_one_is_our_own_error() -> None:
    longest_name = NodeId("n" * NODE_ID_CHARACTERS_MAX)
    assert len(longest_name.encode()) <= NODE_ID_BYTES_MAX
    largest = BusMessage(longest_name, Topic.CARD, 2**64 - 1, 2**64 - 1, bytes(PAYLOAD_BYTES_MAX))
    frames = sealed(largest)
    assert sum(map(len, frames[1:])) <= limits.BUS_MESSAGE_BYTES_MAX
    assert open_message(frames, KEYS) == largest
    with pytest.raises(LocalProtocolError):
        sealed(BusMessage(EXAMPLE.node_id, Topic.CARD, 1, 1, bytes(PAYLOAD_BYTES_MAX + 1)))
    with pytest.raises(LocalProtocolError):
        sealed(BusMessage(NodeId(""), Topic.CARD, 1, 1, b""))
    with pytest.raises(LocalProtocolError):
        seal_message(EXAMPLE, b"short", secrets.token_bytes)


def test_cards_fit_the_bus() -> None:
    assert limits.CARD_BYTES_MAX <= PAYLOAD_BYTES_MAX
