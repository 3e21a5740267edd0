"""Frames on a stream socket between a parent and its child.

A frame is ``u32 body bytes (1..4 MiB), u64 payload bytes``, big-endian, the body, then the payloads without anything between
them; the body tells their sizes. Payloads are sent from where they are and received into buffers of their own, one a part,
so that a store that drops one part gets its memory back.

The socket never blocks: whoever owns the channel is asked to ``wait``, and may stop waiting by raising.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from wire import limits
from wire.errors import RemoteProtocolError

HEADER: Final = struct.Struct(">IQ")
BODY_BYTES_MAX: Final = 4 * limits.MIB
"""The longest prompt's tokens are 512 KiB, descriptions of its parts in the smallest blocks below 1 MiB."""
VIEWS_MAX: Final = 256
"""Buffers in one system call; every system takes at least 1,024."""
SOCKET_BUFFER_BYTES: Final = 1 * limits.MIB
"""macOS starts with 8 KiB, and every turn of the two processes moves no more than that."""

Wait: TypeAlias = Callable[[socket.socket, bool], None]
"""``wait(socket, for_writing)`` returns when the socket is ready, closed or broken."""


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end; not thread-safe.

    Args:
        end: a connected stream socket; belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket, wait: Wait) -> None:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._socket = end
        self._wait = wait

    def close(self) -> None:
        self._socket.close()

    def send(self, body: bytes, payloads: Sequence[memoryview] = ()) -> None:
        """Send a frame.

        Raises:
            ChannelClosed: the other side is gone.
        """
        assert 0 < len(body) <= BODY_BYTES_MAX
        header = HEADER.pack(len(body), sum(payload.nbytes for payload in payloads))
        views = [memoryview(header + body), *(payload for payload in payloads if payload.nbytes)]
        while views:
            try:
                sent = self._socket.sendmsg(views[:VIEWS_MAX])
            except BlockingIOError:
                self._wait(self._socket, True)
                continue
            except OSError as error:
                raise ChannelClosed from error
            views = _after(views, sent)

    def receive(self) -> tuple[bytes, int]:
        """The next frame's body, and how many payload bytes follow it.

        Raises:
            ChannelClosed: the other side is gone.
            RemoteProtocolError: the header is out of bounds.
        """
        header = memoryview(bytearray(HEADER.size))
        self._fill(header)
        body_bytes, payload_bytes = HEADER.unpack(header)
        if not 0 < body_bytes <= BODY_BYTES_MAX or payload_bytes > limits.TRANSFER_BYTES_MAX:
            raise RemoteProtocolError("a frame of the decode worker boundary is out of bounds")
        body = bytearray(body_bytes)
        self._fill(memoryview(body))
        return bytes(body), payload_bytes

    def receive_payloads(self, sizes: Sequence[int], payload_bytes: int) -> tuple[memoryview, ...]:
        """The payloads of the frame whose body was just received, each in a buffer of its own.

        Raises:
            ChannelClosed: the other side is gone.
            RemoteProtocolError: the sizes are not what the header said.
        """
        if sum(sizes) != payload_bytes:
            raise RemoteProtocolError("a frame of the decode worker boundary has another size than it says")
        payloads = tuple(np.empty(size, dtype=np.uint8).data for size in sizes)
        for payload in payloads:
            self._fill(payload)
        return payloads

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                self._wait(self._socket, False)
                continue
            except OSError as error:
                raise ChannelClosed from error
            if count == 0:
                raise ChannelClosed
            view = view[count:]


def _after(views: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of ``views`` when ``sent`` bytes of them are gone."""
    for index, view in enumerate(views):
        if sent < view.nbytes:
            return [view[sent:], *views[index + 1 :]]
        sent -= view.nbytes
    return []
