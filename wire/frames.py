"""The two frames of a control message: ``[header, body]``.

The header is clear and fixed; its hash is part of the nonce of the body's seal, so it is authenticated with it.

    offset  bytes  field
         0      2  magic "KZ"
         2      1  protocol version
         3      1  kind
         4      8  key id: which PSK
        12     16  session id (zero in HELLO)
        28      8  counter, unsigned little-endian (zero in all kinds but SEALED, which starts at 1)

Body of SEALED: ``secretbox(msgpack)`` with nonce = hash(header); the counter never repeats under a session key. Body of
the other kinds: ``prefix (24 random bytes) ‖ secretbox(…)`` with nonce = hash(header ‖ prefix), because their keys live as
long as the PSK does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from wire import limits
from wire.errors import LocalProtocolError, RemoteProtocolError

MAGIC: Final = b"KZ"
KEY_ID_BYTES: Final = 8
SESSION_ID_BYTES: Final = 16
NO_SESSION: Final = bytes(SESSION_ID_BYTES)
COUNTER_MAX: Final = 2**64 - 1
PREFIX_BYTES: Final = 24
HANDSHAKE_BODY_BYTES_MAX: Final = 8 * limits.KIB
"""A HELLO with every name at its longest, four bytes a character, is under 6 KiB."""

_LAYOUT: Final = struct.Struct(f"<2sBB{KEY_ID_BYTES}s{SESSION_ID_BYTES}sQ")
HEADER_BYTES: Final = _LAYOUT.size


class FrameKind(IntEnum):
    """What a control message is, before it is opened."""

    HELLO = 1
    WELCOME = 2
    SEALED = 3
    UNKNOWN_SESSION = 4


@dataclass(frozen=True, slots=True)
class Header:
    """The clear header.

    Raises:
        LocalProtocolError: a field has a wrong length or is out of range.
    """

    kind: FrameKind
    key_id: bytes
    session_id: bytes = NO_SESSION
    counter: int = 0

    def __post_init__(self) -> None:
        if len(self.key_id) != KEY_ID_BYTES or len(self.session_id) != SESSION_ID_BYTES:
            raise LocalProtocolError("key id and session id have 8 and 16 bytes")
        if not 0 <= self.counter <= COUNTER_MAX or (self.counter > 0) != (self.kind is FrameKind.SEALED):
            raise LocalProtocolError("only sealed messages are counted, from 1")
        if (self.session_id == NO_SESSION) != (self.kind is FrameKind.HELLO):
            raise LocalProtocolError("every kind but hello names a session")

    def pack(self) -> bytes:
        """36 bytes."""
        return _LAYOUT.pack(MAGIC, limits.PROTOCOL_VERSION, self.kind, self.key_id, self.session_id, self.counter)

    @classmethod
    def unpack(cls, frame: bytes) -> Header:
        """Read a header.

        Raises:
            RemoteProtocolError: wrong length, magic, version or kind, or fields that don't fit the kind.
        """
        if len(frame) != HEADER_BYTES:
            raise RemoteProtocolError("wrong header length")
        magic, version, kind, key_id, session_id, counter = _LAYOUT.unpack(frame)
        if magic != MAGIC:
            raise RemoteProtocolError("not a control message")
        if version != limits.PROTOCOL_VERSION:
            raise RemoteProtocolError("another protocol version")
        try:
            return cls(kind=FrameKind(kind), key_id=key_id, session_id=session_id, counter=counter)
        except (ValueError, LocalProtocolError):
            # An unknown kind, or a combination that we would never send.
            raise RemoteProtocolError("malformed header") from None


def split_frames(frames: Sequence[bytes]) -> tuple[Header, bytes]:
    """Check the outer form of a control message.

    Args:
        frames: the frames of one message, without a route.

    Returns:
        The header and the still sealed body, whose size is within the cap of its kind.

    Raises:
        RemoteProtocolError: not exactly two frames, a malformed header, or an oversize body.
    """
    if len(frames) != 2:
        raise RemoteProtocolError("a control message has two frames")
    header = Header.unpack(frames[0])
    cap = limits.CONTROL_MESSAGE_BYTES_MAX if header.kind is FrameKind.SEALED else HANDSHAKE_BODY_BYTES_MAX
    if len(frames[1]) > cap:
        raise RemoteProtocolError("oversize body")
    return header, frames[1]
