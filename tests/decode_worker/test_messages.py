"""Messages and frames of the boundary: what goes in comes out, and any other bytes are refused with a typed error."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.decode_worker import messages as m
from kakeya_zmq.decode_worker.channel import BODY_BYTES_MAX, HEADER, Channel, ChannelClosed
from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    Capture,
    CloseSession,
    CommandFailed,
    Decode,
    DecodeFinished,
    EngineMemory,
    FinishImport,
    ImportAdvanced,
    ImportPrefix,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    Sampling,
    SegmentComputed,
    SessionReady,
    TokenDecoded,
)
from tests.decode_worker.toy_engine import FACTS
from wire.errors import RemoteProtocolError
from wire.messages import PartKind, StopReason

PARTS = (
    RawPart(PartKind.FULL, 0, 64, memoryview(bytes(range(200)))),
    RawPart(PartKind.STATE, 64, 3, memoryview(b"\xff")),
)
COMMANDS = [
    OpenSession("s"),
    ImportPrefix("s", 64, PARTS),
    ImportPrefix("s", 0, ()),
    BeginImport("s", 64),
    AddParts("s", PARTS),
    FinishImport("s"),
    Decode("s", 5, 10, (1, 106), Sampling(0.7, 0.9, 40, 2**64 - 1)),
    Decode("s", 5, 10, ()),
    Capture("s", 3),
    CloseSession("s"),
]
EVENTS = [
    SessionReady("s"),
    ImportAdvanced("s", 1.5),
    PrefixImported("s", 64, 0.5),
    SegmentComputed("s", 64, PARTS, 2.5),
    TokenDecoded("s", 7),
    DecodeFinished("s", StopReason.EOS, 9),
    PartsCaptured("s", ()),
    CommandFailed("s", "why", 0),
]


def again(value: Any) -> Any:
    """Through bytes and back."""
    kind, body, shapes, payloads = m.pack(value)
    copies = tuple(memoryview(bytes(payload)) for payload in payloads)
    unpack: Any = m.unpack_command if value in COMMANDS or isinstance(value, Prefill) else m.unpack_event
    return unpack(kind, msgspec.Raw(bytes(body)), shapes, copies)


@pytest.mark.parametrize("value", [*COMMANDS, *EVENTS], ids=lambda value: type(value).__name__)
def test_every_command_and_event_survives(value: Any) -> None:
    assert again(value) == value


def test_tokens_survive() -> None:
    tokens = np.array([0, 1, 2**31 - 1, 262143], dtype=np.int32)
    found = again(Prefill("s", tokens, capture=False))
    assert found.tokens.dtype == np.int32
    assert found.tokens.tolist() == tokens.tolist()
    assert not found.capture


def test_an_event_is_no_command_and_a_command_no_event() -> None:
    with pytest.raises(RemoteProtocolError):
        m.unpack_command("TokenDecoded", m.pack(TokenDecoded("s", 1))[1], (), ())
    with pytest.raises(RemoteProtocolError):
        m.unpack_event("CloseSession", m.pack(CloseSession("s"))[1], (), ())
    with pytest.raises(RemoteProtocolError):
        m.unpack_event("RawPart", m.pack(CloseSession("s"))[1], (), ())
    with pytest.raises(RemoteProtocolError):
        m.unpack_event("TokenDecoded", *m.pack(SegmentComputed("s", 1, PARTS, 0.0))[1:])


@pytest.mark.parametrize(
    "message",
    [m.Load(msgspec.Raw(b"\x80"), True), m.Start(1, "Capture", msgspec.Raw(b"\x80")), m.Next(2), m.Cancel(3)],
    ids=lambda message: type(message).__name__,
)
def test_every_request_survives(message: Any) -> None:
    assert m.encode(m.decode_request(m.encode(message))) == m.encode(message)


@pytest.mark.parametrize(
    "message",
    [
        m.Told("text"),
        m.Loaded(FACTS, 12.5, EngineMemory(1, 2)),
        m.Refused("ModelError", "what", "do"),
        m.Ended(1, None, 0, EngineMemory()),
        m.Raised(1, "ZeroDivisionError", 0, 0, EngineMemory()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_reply_survives(message: Any) -> None:
    assert m.decode_reply(m.encode(message)) == message


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_a_remote_error(data: bytes) -> None:
    for decode in (m.decode_request, m.decode_reply):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)
    for kind in ("Prefill", "Decode", "SegmentComputed", "nothing"):
        with contextlib.suppress(RemoteProtocolError):
            m.unpack_command(kind, msgspec.Raw(data), (), ())


# --- frames ----------------------------------------------------------------------------------------------------------


def wait(end: socket.socket, for_writing: bool) -> None:
    poller = select.poll()
    poller.register(end, select.POLLOUT if for_writing else select.POLLIN)
    assert poller.poll(20_000)


@pytest.fixture
def ends() -> Any:
    one, other = socket.socketpair()
    channels = Channel(one, wait), Channel(other, wait)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def raw() -> Any:
    one, other = socket.socketpair()
    channel = Channel(one, wait)
    yield channel, other
    channel.close()
    other.close()


def test_large_payloads_arrive_in_buffers_of_their_own(ends: Any) -> None:
    ours, theirs = ends
    sizes = [3_000_000, 1, 0, 5_000_000, *([100] * 700)]
    payloads = [memoryview(np.random.default_rng(size).bytes(size)) for size in sizes]
    sender = threading.Thread(target=ours.send, args=(b"body", payloads))
    sender.start()
    body, payload_bytes = theirs.receive()
    found = theirs.receive_payloads(sizes, payload_bytes)
    sender.join(20)
    assert body == b"body"
    assert list(found) == payloads
    assert len({id(view.obj) for view in found}) == len(sizes)


def test_frames_follow_each_other(ends: Any) -> None:
    ours, theirs = ends
    for body in (b"a", b"bc", b"d" * 1000):
        ours.send(body)
    assert [theirs.receive()[0] for _ in range(3)] == [b"a", b"bc", b"d" * 1000]


@pytest.mark.parametrize(("body", "payload"), [(0, 0), (BODY_BYTES_MAX + 1, 0), (1, 2**63)])
def test_a_header_out_of_bounds_is_refused_before_room_is_made(raw: Any, body: int, payload: int) -> None:
    channel, other = raw
    other.sendall(HEADER.pack(body, payload))
    with pytest.raises(RemoteProtocolError):
        channel.receive()


def test_sizes_that_contradict_the_header_are_refused(ends: Any) -> None:
    ours, theirs = ends
    ours.send(b"x", [memoryview(b"12345")])
    _, payload_bytes = theirs.receive()
    with pytest.raises(RemoteProtocolError):
        theirs.receive_payloads([4], payload_bytes)


@pytest.mark.parametrize("data", [b"", b"\0\0", HEADER.pack(5, 0) + b"abc"])
def test_an_end_in_the_middle_of_a_frame_is_noticed(raw: Any, data: bytes) -> None:
    channel, other = raw
    other.sendall(data)
    other.close()
    with pytest.raises(ChannelClosed):
        channel.receive()


def test_sending_to_nobody_is_noticed(raw: Any) -> None:
    channel, other = raw
    other.close()
    with pytest.raises(ChannelClosed):
        channel.send(b"body")
