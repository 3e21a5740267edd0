"""Messages that have more frames than any of ours, at each kind of socket that reads what others send."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kakeya_zmq.io.incoming import FRAMES_DROPPED_PER_TURN, FRAMES_MAX, Incoming, MessageReader
from tests.loopback.reactor_kit import WAIT_S

FRAMES = 10 * FRAMES_DROPPED_PER_TURN


@pytest.fixture(params=[(zmq.ROUTER, zmq.DEALER), (zmq.SUB, zmq.XPUB), (zmq.PAIR, zmq.PAIR)], ids=["router", "sub", "pair"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Ours, where messages are read, and theirs."""
    ours_type, theirs_type = request.param
    with zmq.Context() as context, context.socket(ours_type) as ours, context.socket(theirs_type) as theirs:
        ours.linger = theirs.linger = 0
        if ours_type == zmq.SUB:
            ours.setsockopt(zmq.SUBSCRIBE, b"")
        theirs.bind("inproc://ends")
        ours.connect("inproc://ends")
        if ours_type == zmq.SUB:
            assert theirs.poll(int(WAIT_S * 1000)), "no subscription arrives"
        yield ours, theirs


def read_until(reader: MessageReader, socket: zmq.Socket[bytes], last: bytes) -> tuple[list[Incoming], int]:
    """Everything up to a message that ends with ``last``, and how many times there was no more in a turn."""
    found: list[Incoming] = []
    turns = 0
    while not found or found[-1].frames[-1] != last:
        assert socket.poll(int(WAIT_S * 1000)), "it stays readable until everything is read"
        try:
            found.append(reader.receive())
        except zmq.Again:
            turns += 1
    return found, turns


def test_what_is_too_long_is_dropped_in_slices_and_what_comes_next_is_taken(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    ours, theirs = ends
    theirs.send_multipart([b"x"] * FRAMES)
    theirs.send_multipart([b"y"] * FRAMES)
    theirs.send_multipart([b"a", b"last"])
    (first, second, last), turns = read_until(MessageReader(ours), ours, b"last")
    assert first.overlong
    assert second.overlong
    assert len(first.frames) == FRAMES_MAX
    assert not last.overlong
    assert last.frames[-2:] == (b"a", b"last")
    assert turns >= 2 * (FRAMES // FRAMES_DROPPED_PER_TURN - 1)


def test_a_message_of_as_many_frames_as_there_may_be(ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    ours, theirs = ends
    route = 1 if ours.type == zmq.ROUTER else 0  # in front of what was sent
    theirs.send_multipart([b"x"] * (FRAMES_MAX - route))
    (message,), turns = read_until(MessageReader(ours), ours, b"x")
    assert not message.overlong
    assert len(message.frames) == FRAMES_MAX
    assert turns == 0
