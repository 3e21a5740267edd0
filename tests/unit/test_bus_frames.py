"""Layout and sealing of bus messages."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nacl import bindings

from wire import limits
from wire.bus import NODE_ID_BYTES_MAX, PAYLOAD_BYTES_MAX, BusMessage, Group, Topic, open_message, seal_message
from wire.errors import AuthenticationError, ForgedMessageError, LocalProtocolError, RemoteProtocolError
from wire.ids import NodeId
from wire.keys import NodeIdentity
from wire.text import NODE_ID, NODE_ID_CHARACTERS_MAX, is_node_id

FLEET_KEY = bytes(range(32))
TELEMETRY_KEY = bytes(range(32, 64))
IDENTITY, OTHER = NodeIdentity(bytes(32)), NodeIdentity(bytes(range(32)))
KEYS = {Group.FLEET: FLEET_KEY, Group.TELEMETRY: TELEMETRY_KEY}

messages = st.builds(
    BusMessage,
    node_id=st.from_regex(NODE_ID, fullmatch=True).map(NodeId),
    topic=st.sampled_from(Topic),
    incarnation=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
    identity_public_key=st.just(IDENTITY.public_key),
)


def sealed(message: BusMessage) -> list[bytes]:
    return seal_message(message, IDENTITY, KEYS[message.topic.group], secrets.token_bytes)


EXAMPLE = BusMessage(NodeId("worker-1"), Topic.CARD, 7, 42, b"payload", IDENTITY.public_key)


def content_of(frames: list[bytes], topic: Topic) -> bytes:
    """Key, signature and payload, as a holder of the group key sees them."""
    key = hashlib.blake2b(frames[1], key=KEYS[topic.group], digest_size=32, person=b"kakeya-bus-v2").digest()
    return bindings.crypto_secretbox_open(frames[2][24:], frames[2][:24], key)


def sealed_as(message: BusMessage, content: bytes, keys: Mapping[Group, bytes] = KEYS) -> list[bytes]:
    """What such a holder can make of them: any content under any header."""
    topic, header, _ = seal_message(message, IDENTITY, keys[message.topic.group], secrets.token_bytes)
    key = hashlib.blake2b(header, key=keys[message.topic.group], digest_size=32, person=b"kakeya-bus-v2").digest()
    nonce = secrets.token_bytes(24)
    return [topic, header, nonce + bindings.crypto_secretbox(content, nonce, key)]


@given(messages)
def test_what_is_sealed_opens_to_the_same_message(message: BusMessage) -> None:
    assert open_message(sealed(message), KEYS) == message


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=110).filter(lambda text: not is_node_id(text)))
@example("two\nlines")
@example("\x1b[2J")
@example("w\u043erker")
@example("..")
def test_a_sender_with_another_name_than_nodes_have_is_refused(name: str) -> None:
    message = BusMessage(NodeId(name), Topic.NODE, 1, 1, b"payload", IDENTITY.public_key)
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
    other = sealed(BusMessage(EXAMPLE.node_id, EXAMPLE.topic, 7, 43, b"payload", IDENTITY.public_key))
    with pytest.raises(AuthenticationError):
        open_message([topic, header, other[2]], KEYS)


def test_a_signature_holds_for_its_own_message_and_fleet_only() -> None:
    """Whoever has the group key can seal what he likes, but not what others have signed under another header or payload."""
    signed = content_of(sealed(EXAMPLE), EXAMPLE.topic)
    changes: list[dict[str, object]] = [
        {"node_id": NodeId("worker-2")},
        {"topic": Topic.NODE},
        {"incarnation": 8},
        {"sequence": 43},
    ]
    for change in changes:
        other = replace(EXAMPLE, **change)  # type: ignore[arg-type]
        with pytest.raises(ForgedMessageError) as caught:
            open_message(sealed_as(other, signed), KEYS)
        assert caught.value.node_id == other.node_id
    with pytest.raises(ForgedMessageError):
        open_message(sealed_as(EXAMPLE, signed[:-1] + b"D"), KEYS)
    with pytest.raises(ForgedMessageError):
        open_message(sealed_as(EXAMPLE, OTHER.public_key + signed[32:]), KEYS)
    elsewhere = {Group.FLEET: bytes(32), Group.TELEMETRY: TELEMETRY_KEY}
    with pytest.raises(ForgedMessageError):
        open_message(sealed_as(EXAMPLE, signed, elsewhere), elsewhere)
    assert open_message(sealed_as(EXAMPLE, signed), KEYS) == EXAMPLE


def test_a_node_signs_for_itself_only() -> None:
    with pytest.raises(LocalProtocolError):
        seal_message(EXAMPLE, OTHER, FLEET_KEY, secrets.token_bytes)


def test_equal_messages_never_look_alike() -> None:
    assert sealed(EXAMPLE)[2] != sealed(EXAMPLE)[2]


def test_the_telemetry_key_opens_telemetry_only() -> None:
    reader = {Group.TELEMETRY: TELEMETRY_KEY}
    telemetry = BusMessage(NodeId("n"), Topic.NODE, 1, 1, b"x", IDENTITY.public_key)
    assert open_message(sealed(telemetry), reader) == telemetry
    with pytest.raises(RemoteProtocolError, match="not ours"):
        open_message(sealed(EXAMPLE), reader)


def test_another_key_opens_nothing() -> None:
    with pytest.raises(AuthenticationError):
        open_message(sealed(EXAMPLE), {Group.FLEET: TELEMETRY_KEY})


def test_the_largest_message_fits_the_bus_and_a_larger_one_is_our_own_error() -> None:
    longest_name = NodeId("n" * NODE_ID_CHARACTERS_MAX)
    assert len(longest_name.encode()) <= NODE_ID_BYTES_MAX
    largest = BusMessage(longest_name, Topic.CARD, 2**64 - 1, 2**64 - 1, bytes(PAYLOAD_BYTES_MAX), IDENTITY.public_key)
    frames = sealed(largest)
    assert sum(map(len, frames[1:])) <= limits.BUS_MESSAGE_BYTES_MAX
    assert open_message(frames, KEYS) == largest
    with pytest.raises(LocalProtocolError):
        sealed(BusMessage(EXAMPLE.node_id, Topic.CARD, 1, 1, bytes(PAYLOAD_BYTES_MAX + 1), IDENTITY.public_key))
    with pytest.raises(LocalProtocolError):
        sealed(BusMessage(NodeId(""), Topic.CARD, 1, 1, b"", IDENTITY.public_key))
    with pytest.raises(LocalProtocolError):
        seal_message(EXAMPLE, IDENTITY, b"short", secrets.token_bytes)


def test_cards_fit_the_bus() -> None:
    assert limits.CARD_BYTES_MAX <= PAYLOAD_BYTES_MAX
