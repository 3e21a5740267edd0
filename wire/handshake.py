"""HELLO, WELCOME and UNKNOWN_SESSION as frames, and the sealed channel that a handshake leads to.

Pure bytes: no clock, no state but the channel's two counters. Both handshake messages are sealed under keys of the fleet
(membership), signed by the node (identity), and carry fresh X25519 keys (forward secrecy). WELCOME names the hash of the
HELLO it answers, and the session keys depend on both, so nothing of one handshake is of use in another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from wire import seal
from wire.codec import decode_hello, decode_welcome, encode_hello, encode_welcome
from wire.errors import AuthenticationError
from wire.frames import NO_SESSION, PREFIX_BYTES, SESSION_ID_BYTES, FrameKind, Header
from wire.keys import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    CurvePair,
    FleetKey,
    NodeIdentity,
    Purpose,
    SessionKeys,
    derive_session_keys,
)
from wire.messages import Hello, Welcome
from wire.replay import CounterWindow

RandomBytes = Callable[[int], bytes]

_NO_SIGNATURE: Final = bytes(SIGNATURE_BYTES)
_HELLO_CONTEXT: Final = b"kakeya-zmq hello\0"
_WELCOME_CONTEXT: Final = b"kakeya-zmq welcome\0"
_UNKNOWN_CONTEXT: Final = b"kakeya-zmq unknown session\0"


class HandshakeKeys:
    """What of a fleet key the handshake needs, derived once."""

    __slots__ = ("hello", "key_id", "session", "welcome")

    def __init__(self, fleet_key: FleetKey) -> None:
        self.key_id = fleet_key.key_id
        self.hello = fleet_key.derive(Purpose.HELLO)
        self.welcome = fleet_key.derive(Purpose.WELCOME)
        self.session = fleet_key.derive(Purpose.SESSION)


def new_ephemeral(random_bytes: RandomBytes) -> CurvePair:
    """A fresh X25519 key pair."""
    return CurvePair.from_secret(random_bytes(KEY_BYTES))


def hash_hello(frames: Sequence[bytes]) -> bytes:
    """32 bytes that stand for one HELLO exactly as it travelled."""
    return hashlib.blake2b(b"".join(frames), digest_size=32, person=b"kz hello hash").digest()


def seal_hello(hello: Hello, identity: NodeIdentity, keys: HandshakeKeys, random_bytes: RandomBytes) -> tuple[bytes, bytes]:
    """The frames of a HELLO; the signature in ``hello`` is replaced by a proper one."""
    unsigned = encode_hello(replace(hello, signature=_NO_SIGNATURE))
    signed = replace(hello, signature=identity.sign(_HELLO_CONTEXT + unsigned))
    header = Header(kind=FrameKind.HELLO, key_id=keys.key_id).pack()
    return header, _seal_prefixed(keys.hello, header, encode_hello(signed), random_bytes)


def open_hello(header: Header, body: bytes, keys: HandshakeKeys) -> Hello:
    """A HELLO from a member of the fleet who holds the identity key it names.

    Raises:
        RemoteProtocolError: malformed.
        AuthenticationError: seal or signature do not hold.
    """
    hello = decode_hello(_open_prefixed(keys.hello, header.pack(), body))
    unsigned = encode_hello(replace(hello, signature=_NO_SIGNATURE))
    NodeIdentity.verify(hello.identity_public_key, _HELLO_CONTEXT + unsigned, hello.signature)
    return hello


def seal_welcome(
    welcome: Welcome, identity: NodeIdentity, keys: HandshakeKeys, random_bytes: RandomBytes
) -> tuple[bytes, bytes]:
    """The frames of a WELCOME; the signature in ``welcome`` is replaced by a proper one."""
    unsigned = encode_welcome(replace(welcome, signature=_NO_SIGNATURE))
    signed = replace(welcome, signature=identity.sign(_WELCOME_CONTEXT + unsigned))
    header = Header(kind=FrameKind.WELCOME, key_id=keys.key_id, session_id=welcome.session_id).pack()
    return header, _seal_prefixed(keys.welcome, header, encode_welcome(signed), random_bytes)


def open_welcome(header: Header, body: bytes, keys: HandshakeKeys, hello_hash: bytes) -> Welcome:
    """The WELCOME that answers the HELLO with this hash.

    Raises:
        RemoteProtocolError: malformed.
        AuthenticationError: seal or signature do not hold, or it answers another HELLO.
    """
    welcome = decode_welcome(_open_prefixed(keys.welcome, header.pack(), body))
    if welcome.session_id != header.session_id:
        raise AuthenticationError("the welcome names two sessions")
    if welcome.hello_hash != hello_hash:
        raise AuthenticationError("the welcome answers another hello")
    unsigned = encode_welcome(replace(welcome, signature=_NO_SIGNATURE))
    NodeIdentity.verify(welcome.identity_public_key, _WELCOME_CONTEXT + unsigned, welcome.signature)
    return welcome


def agree_on_keys(keys: HandshakeKeys, own: CurvePair, peer_public_key: bytes, welcome: Welcome) -> SessionKeys:
    """The session's keys; both sides compute the same ones.

    Raises:
        AuthenticationError: the peer's ephemeral key is a weak point.
    """
    unsigned = encode_welcome(replace(welcome, signature=_NO_SIGNATURE))
    welcome_hash = hashlib.blake2b(unsigned, digest_size=32, person=b"kz welcome hash").digest()
    return derive_session_keys(keys.session, own, peer_public_key, welcome.hello_hash, welcome_hash)


def seal_unknown_session(
    session_id: bytes, identity: NodeIdentity, keys: HandshakeKeys, random_bytes: RandomBytes
) -> tuple[bytes, bytes]:
    """Tells a client that this node does not know (any more) the session it uses.

    It is signed: the key it is sealed with is shared by the fleet, and session ids are not secret.
    """
    header = Header(kind=FrameKind.UNKNOWN_SESSION, key_id=keys.key_id, session_id=session_id).pack()
    signature = identity.sign(_UNKNOWN_CONTEXT + session_id)
    return header, _seal_prefixed(keys.welcome, header, signature, random_bytes)


def open_unknown_session(header: Header, body: bytes, keys: HandshakeKeys, identity_public_key: bytes) -> None:
    """Check that the server with this identity says so about ``header.session_id``.

    Raises:
        AuthenticationError: seal or signature do not hold.
    """
    signature = _open_prefixed(keys.welcome, header.pack(), body)
    NodeIdentity.verify(identity_public_key, _UNKNOWN_CONTEXT + header.session_id, signature)


class Channel:
    """One side of an established session: seals and opens messages, counts both directions.

    Args:
        session_id: 16 bytes, not all zero.
        key_id: 8 bytes, for the header.
        send_key: 32 bytes, of our direction.
        receive_key: 32 bytes, of the other direction.
    """

    __slots__ = ("_key_id", "_receive_key", "_received", "_send_key", "_sent", "session_id")

    def __init__(self, *, session_id: bytes, key_id: bytes, send_key: bytes, receive_key: bytes) -> None:
        self.session_id = session_id
        self._key_id = key_id
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = CounterWindow()

    def seal(self, plaintext: bytes) -> tuple[bytes, bytes]:
        """The frames of the next message."""
        self._sent += 1
        header = Header(kind=FrameKind.SEALED, key_id=self._key_id, session_id=self.session_id, counter=self._sent).pack()
        return header, seal.seal(self._send_key, seal.header_nonce(header), plaintext)

    def open(self, header: Header, body: bytes) -> bytes:
        """The plaintext of a message from the other side; the same message never opens twice.

        Raises:
            AuthenticationError: another session, a counter that is not new, or a broken seal.
        """
        if header.session_id != self.session_id:
            raise AuthenticationError("another session")
        self._received.check(header.counter)
        plaintext = seal.open_sealed(self._receive_key, seal.header_nonce(header.pack()), body)
        self._received.advance(header.counter)
        return plaintext


def new_session_id(random_bytes: RandomBytes) -> bytes:
    """16 random bytes, never all zero."""
    while True:
        session_id = random_bytes(SESSION_ID_BYTES)
        if session_id != NO_SESSION:
            return session_id


def _seal_prefixed(key: bytes, header: bytes, plaintext: bytes, random_bytes: RandomBytes) -> bytes:
    prefix = random_bytes(PREFIX_BYTES)
    return prefix + seal.seal(key, seal.header_nonce(header + prefix), plaintext)


def _open_prefixed(key: bytes, header: bytes, body: bytes) -> bytes:
    prefix = body[:PREFIX_BYTES]
    return seal.open_sealed(key, seal.header_nonce(header + prefix), body[PREFIX_BYTES:])
