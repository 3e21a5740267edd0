"""Messages as they come from a socket whose peers may send what they like.

libzmq hands over a message of any number of frames, once it is there as a whole, and reading 100,000 of them takes some
0.2 s. So a message is taken up to a bound, and what it has beyond is dropped in slices, one a turn of the reactor, between
which everybody else is served.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import zmq

FRAMES_MAX: Final = 16
"""Frames of one message; no layout of this project has more than five."""
FRAMES_DROPPED_PER_TURN: Final = 1_024
"""About 2 ms of reading."""
OVERLONG: Final = "a message of too many frames"


class Incoming(NamedTuple):
    """One message, or the beginning of one that breaks the bound."""

    first: zmq.Frame
    """With what libzmq knows of where it came from."""
    others: tuple[bytes, ...]
    overlong: bool
    """There were more than :data:`FRAMES_MAX` frames."""

    @property
    def frames(self) -> tuple[bytes, ...]:
        return (self.first.bytes, *self.others)


class MessageReader:
    """Takes the messages of one socket, on the thread that owns it. Nobody else may read from the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._dropping = False
        """Whether what comes next is the rest of an overlong message."""

    def receive(self) -> Incoming:
        """Take one message without waiting.

        Raises:
            zmq.Again: there is none, or no more in this turn; then the socket stays readable.
        """
        if self._dropping:
            self._drop_slice()
        first = self._socket.recv(zmq.DONTWAIT, copy=False)
        others: list[bytes] = []
        while self._socket.getsockopt(zmq.RCVMORE):
            if len(others) == FRAMES_MAX - 1:
                self._dropping = True
                return Incoming(first, tuple(others), overlong=True)
            others.append(self._socket.recv(zmq.DONTWAIT))
        return Incoming(first, tuple(others), overlong=False)

    def _drop_slice(self) -> None:
        for _ in range(FRAMES_DROPPED_PER_TURN):
            self._socket.recv(zmq.DONTWAIT)
            if not self._socket.getsockopt(zmq.RCVMORE):
                self._dropping = False
                return
        raise zmq.Again
