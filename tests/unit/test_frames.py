"""The clear header, and order without clocks."""

from __future__ import annotations

import pytest

from wire import limits
from wire.errors import AuthenticationError, LocalProtocolError, RemoteProtocolError
from wire.frames import COUNTER_MAX, HANDSHAKE_BODY_BYTES_MAX, HEADER_BYTES, FrameKind, Header, split_frames
from wire.replay import CounterWindow, Observation, Order, SequenceTracker

KEY_ID, SESSION = b"k" * 8, b"s" * 16
KEY = bytes(range(32))
HEADERS = [
    Header(kind=FrameKind.HELLO, key_id=KEY_ID),
    Header(kind=FrameKind.WELCOME, key_id=KEY_ID, session_id=SESSION),
    Header(kind=FrameKind.UNKNOWN_SESSION, key_id=KEY_ID, session_id=SESSION),
    Header(kind=FrameKind.SEALED, key_id=KEY_ID, session_id=SESSION, counter=1),
    Header(kind=FrameKind.SEALED, key_id=KEY_ID, session_id=SESSION, counter=COUNTER_MAX),
]


@pytest.mark.parametrize("header", HEADERS)
def test_round_trip(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 36
    assert Header.unpack(packed) == header


def test_layout_is_fixed() -> None:
    assert HEADERS[3].pack() == b"KZ\x01\x03" + KEY_ID + SESSION + b"\x01\0\0\0\0\0\0\0"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "length"),
        (HEADERS[3].pack()[:-1], "length"),
        (HEADERS[3].pack() + b"x", "length"),
        (b"XX" + HEADERS[3].pack()[2:], "not a control message"),
        (b"KZ\x02" + HEADERS[3].pack()[3:], "another protocol version"),
        (b"KZ\x01\x00" + HEADERS[3].pack()[4:], "malformed"),
        (b"KZ\x01\x05" + HEADERS[3].pack()[4:], "malformed"),
        (b"KZ\x01\x01" + HEADERS[3].pack()[4:], "malformed"),
        (b"KZ\x01\x03" + HEADERS[1].pack()[4:], "malformed"),
        (b"KZ\x01\x02" + HEADERS[0].pack()[4:], "malformed"),
    ],
)
def test_odd_headers_are_refused(frame: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        Header.unpack(frame)


def test_we_cannot_make_odd_headers() -> None:
    with pytest.raises(LocalProtocolError):
        Header(kind=FrameKind.SEALED, key_id=KEY_ID, session_id=SESSION)
    with pytest.raises(LocalProtocolError):
        Header(kind=FrameKind.SEALED, key_id=KEY_ID, session_id=SESSION, counter=COUNTER_MAX + 1)
    with pytest.raises(LocalProtocolError):
        Header(kind=FrameKind.HELLO, key_id=b"short")


def test_split_checks_count_and_size() -> None:
    sealed, hello = HEADERS[3].pack(), HEADERS[0].pack()
    assert split_frames((sealed, b"body")) == (HEADERS[3], b"body")
    for frames in ((), (sealed,), (sealed, b"", b"")):
        with pytest.raises(RemoteProtocolError, match="two frames"):
            split_frames(frames)
    split_frames((sealed, bytes(limits.CONTROL_MESSAGE_BYTES_MAX)))
    with pytest.raises(RemoteProtocolError, match="oversize"):
        split_frames((sealed, bytes(limits.CONTROL_MESSAGE_BYTES_MAX + 1)))
    split_frames((hello, bytes(HANDSHAKE_BODY_BYTES_MAX)))
    with pytest.raises(RemoteProtocolError, match="oversize"):
        split_frames((hello, bytes(HANDSHAKE_BODY_BYTES_MAX + 1)))


def test_counters_only_rise() -> None:
    window = CounterWindow()
    window.advance(1)
    window.check(7)
    assert window.highest == 1
    window.advance(7)
    for counter in (0, 1, 6, 7):
        with pytest.raises(AuthenticationError):
            window.check(counter)
        with pytest.raises(AuthenticationError):
            window.advance(counter)
    window.advance(8)


def test_sequence_tracker() -> None:
    tracker = SequenceTracker(nodes_max=2)
    assert tracker.observe("a", KEY, 1, 5) == Observation(Order.NEW)
    assert tracker.observe("a", KEY, 1, 6) == Observation(Order.NEW)
    assert tracker.observe("a", KEY, 1, 6) == Observation(Order.OLD)
    assert tracker.observe("a", KEY, 1, 10) == Observation(Order.GAP, missed=3)
    assert tracker.observe("a", KEY, 1, 9) == Observation(Order.OLD)
    assert tracker.observe("a", KEY, 2, 1) == Observation(Order.NEW)
    assert tracker.observe("a", KEY, 1, 99) == Observation(Order.OLD)
    tracker.observe("b", KEY, 1, 1)
    tracker.observe("a", KEY, 2, 2)
    tracker.observe("c", KEY, 1, 1)
    assert len(tracker) == 2
    assert tracker.observe("a", KEY, 2, 2) == Observation(Order.OLD)
    assert tracker.observe("b", KEY, 1, 1) == Observation(Order.NEW)
    tracker.forget("b", KEY)
    assert tracker.observe("b", KEY, 1, 1) == Observation(Order.NEW)


def test_another_key_under_a_name_moves_nothing_of_it() -> None:
    tracker = SequenceTracker()
    tracker.observe("a", KEY, 1, 1)
    assert tracker.observe("a", bytes(32), 2**64 - 1, 2**64 - 1) == Observation(Order.NEW)
    assert tracker.observe("a", KEY, 1, 2) == Observation(Order.NEW)
