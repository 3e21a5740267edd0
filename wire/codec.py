"""Control messages to bytes and back (msgpack through msgspec), and the packed forms inside them.

One invariant, fuzzed: any bytes either decode, or raise RemoteProtocolError, never any other error. Sizes are checked before
anything is decoded. Error lines are fixed text, because they are counted and shown; what msgspec said is the error's cause.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from wire import limits
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import HANDSHAKE_BODY_BYTES_MAX
from wire.messages import ClientEnvelope, Hello, ServerEnvelope, Welcome

TOKEN_MAX: Final = 2**31 - 1

_T = TypeVar("_T")
_ENCODER: Final = msgspec.msgpack.Encoder()
_CLIENT: Final[msgspec.msgpack.Decoder[ClientEnvelope]] = msgspec.msgpack.Decoder(ClientEnvelope)
_SERVER: Final[msgspec.msgpack.Decoder[ServerEnvelope]] = msgspec.msgpack.Decoder(ServerEnvelope)
_HELLO: Final = msgspec.msgpack.Decoder(Hello)
_WELCOME: Final = msgspec.msgpack.Decoder(Welcome)


def encode_client(envelope: ClientEnvelope) -> bytes:
    """What a client sends, before sealing.

    Raises:
        LocalProtocolError: larger than one control message may be.
    """
    return encode_bounded(envelope, limits.CONTROL_BODY_BYTES_MAX)


def encode_server(envelope: ServerEnvelope) -> bytes:
    """What a server sends, before sealing.

    Raises:
        LocalProtocolError: larger than one control message may be.
    """
    return encode_bounded(envelope, limits.CONTROL_BODY_BYTES_MAX)


def encode_hello(hello: Hello) -> bytes:
    """A Hello, before sealing.

    Raises:
        LocalProtocolError: its names are too long.
    """
    return encode_bounded(hello, HANDSHAKE_BODY_BYTES_MAX)


def encode_welcome(welcome: Welcome) -> bytes:
    """A Welcome, before sealing.

    Raises:
        LocalProtocolError: its names are too long.
    """
    return encode_bounded(welcome, HANDSHAKE_BODY_BYTES_MAX)


def decode_client(data: bytes) -> ClientEnvelope:
    """What a client sent.

    Raises:
        RemoteProtocolError: oversize, or not exactly one valid client envelope.
    """
    return decode_bounded(_CLIENT, data, limits.CONTROL_BODY_BYTES_MAX, "client message")


def decode_server(data: bytes) -> ServerEnvelope:
    """What a server sent.

    Raises:
        RemoteProtocolError: oversize, or not exactly one valid server envelope.
    """
    return decode_bounded(_SERVER, data, limits.CONTROL_BODY_BYTES_MAX, "server message")


def decode_hello(data: bytes) -> Hello:
    """A Hello; its signature is not checked here.

    Raises:
        RemoteProtocolError: oversize, or not exactly one valid Hello.
    """
    return decode_bounded(_HELLO, data, HANDSHAKE_BODY_BYTES_MAX, "hello")


def decode_welcome(data: bytes) -> Welcome:
    """A Welcome; its signature is not checked here.

    Raises:
        RemoteProtocolError: oversize, or not exactly one valid Welcome.
    """
    return decode_bounded(_WELCOME, data, HANDSHAKE_BODY_BYTES_MAX, "welcome")


def encode_bounded(message: Any, bytes_max: int) -> bytes:
    """Encode any message struct.

    Raises:
        LocalProtocolError: larger than ``bytes_max``, or a field has a type that msgpack has no form for.
    """
    try:
        data = _ENCODER.encode(message)
    except (msgspec.EncodeError, TypeError, OverflowError, UnicodeEncodeError) as error:
        # OverflowError: an integer beyond 64 bits; UnicodeEncodeError: a lone surrogate in a name.
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded") from error
    if len(data) > bytes_max:
        raise LocalProtocolError(f"{type(message).__name__} takes {len(data)} bytes, more than {bytes_max}")
    return data


def decode_bounded(decoder: msgspec.msgpack.Decoder[_T], data: bytes, bytes_max: int, what: str) -> _T:
    """Decode with a typed decoder.

    Args:
        what: names the message in the error line.

    Raises:
        RemoteProtocolError: larger than ``bytes_max``, or not exactly one valid message.
    """
    if len(data) > bytes_max:
        raise RemoteProtocolError(f"oversize {what}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        # RecursionError: nesting beyond what any message has.
        raise RemoteProtocolError(f"malformed {what}") from error


# --- packed forms --------------------------------------------------------------------------------------------------


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as packed little-endian int32.

    Raises:
        LocalProtocolError: a token is negative or above 2**31 - 1, or there are more than PROMPT_TOKENS_MAX.
    """
    if len(tokens) > limits.PROMPT_TOKENS_MAX:
        raise LocalProtocolError(f"{len(tokens)} tokens, more than {limits.PROMPT_TOKENS_MAX}")
    try:
        packed = array("i", tokens)
    except OverflowError:
        raise LocalProtocolError(f"a token is outside 0 to {TOKEN_MAX}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    if _any_negative(data):
        raise LocalProtocolError(f"a token is outside 0 to {TOKEN_MAX}")
    return data


def unpack_tokens(data: bytes) -> array[int]:
    """Tokens of :func:`pack_tokens`, as a compact array of int32 (which supports the buffer protocol).

    Raises:
        RemoteProtocolError: the length is not a multiple of 4 or above the cap, or a token is negative.
    """
    if len(data) % limits.TOKEN_BYTES:
        raise RemoteProtocolError("packed tokens of odd length")
    if len(data) > limits.PROMPT_TOKENS_MAX * limits.TOKEN_BYTES:
        raise RemoteProtocolError("too many tokens")
    if _any_negative(data):
        raise RemoteProtocolError("a token is negative")
    tokens = array("i")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def _any_negative(data: bytes) -> bool:
    # The sign bit is bit 7 of every fourth byte; bytes.isascii() tests that bit for all of them at memory speed.
    return not data[3::4].isascii()


def pack_bitmap(bits: Sequence[bool]) -> bytes:
    """One bit an item, least significant bit of byte 0 first; unused bits of the last byte are zero."""
    packed = bytearray((len(bits) + 7) // 8)
    for index, bit in enumerate(bits):
        if bit:
            packed[index >> 3] |= 1 << (index & 7)
    return bytes(packed)


def unpack_bitmap(data: bytes, count: int) -> tuple[bool, ...]:
    """The ``count`` bits of :func:`pack_bitmap`.

    Raises:
        RemoteProtocolError: not exactly as many bytes as ``count`` bits need, or an unused bit is set.
    """
    if len(data) != (count + 7) // 8:
        raise RemoteProtocolError("a bitmap of the wrong length")
    if count % 8 and data[-1] >> (count % 8):
        raise RemoteProtocolError("a bitmap with bits beyond its end")
    return tuple(bool(data[index >> 3] >> (index & 7) & 1) for index in range(count))


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    """Block hashes, 32 bytes each, joined.

    Raises:
        LocalProtocolError: a hash of another length, or more than BLOCKS_MAX.
    """
    if len(hashes) > limits.BLOCKS_MAX or any(len(each) != limits.HASH_BYTES for each in hashes):
        raise LocalProtocolError(f"at most {limits.BLOCKS_MAX} hashes of {limits.HASH_BYTES} bytes can be packed")
    return b"".join(hashes)


def unpack_hashes(data: bytes) -> tuple[bytes, ...]:
    """The hashes of :func:`pack_hashes`.

    Raises:
        RemoteProtocolError: the length is not a multiple of 32 or above the cap.
    """
    if len(data) % limits.HASH_BYTES or len(data) > limits.BLOCKS_MAX * limits.HASH_BYTES:
        raise RemoteProtocolError("packed hashes of odd length")
    return tuple(data[at : at + limits.HASH_BYTES] for at in range(0, len(data), limits.HASH_BYTES))
