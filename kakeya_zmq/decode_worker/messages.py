"""What parent and child say to each other, as msgpack bodies; the bytes of parts follow a body (channel.py).

Strictly in turn: the parent asks, the child answers; only while it loads the model a child may say Told any number of times
before Loaded or Refused. Start and Next are answered by Stepped (one event), Ended or Raised; Cancel by Ended.

A command or event travels as its class's name and its fields; the parts it holds as their descriptions, in the same order as
their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, TypeAlias, TypeVar, cast, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.engine import (
    AddParts,
    Command,
    EngineMemory,
    Event,
    ImportPrefix,
    ModelFacts,
    PartsCaptured,
    SegmentComputed,
)
from wire import limits
from wire.errors import RemoteProtocolError
from wire.messages import Count, Name, PartKind

PARTS_MAX: Final = 3 * limits.BLOCKS_MAX
"""Parts of the longest prompt, in the smallest blocks."""
LINE_CHARACTERS_MAX: Final = 4096


class PartShape(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part without its bytes."""

    kind: PartKind
    start: Count
    token_count: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)]
    length_bytes: Annotated[int, Meta(ge=0, le=limits.PART_BYTES_MAX)]


Shapes = Annotated[tuple[PartShape, ...], Meta(max_length=PARTS_MAX)]
Line = Annotated[str, Meta(max_length=LINE_CHARACTERS_MAX)]


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Load(_Message, frozen=True, tag=1):
    """The first message: what to load. ``settings`` belong to the child's program; ``measure``: how fast it prefills."""

    settings: msgspec.Raw
    measure: bool


class Start(_Message, frozen=True, tag=2):
    """Begin a command and do its first step."""

    task: Count
    kind: Name
    command: msgspec.Raw
    parts: Shapes = ()


class Next(_Message, frozen=True, tag=3):
    """Do the next step of a command."""

    task: Count


class Cancel(_Message, frozen=True, tag=4):
    """Leave a command between two steps."""

    task: Count


class Told(_Message, frozen=True, tag=11):
    """One line for the log while the model is being loaded."""

    text: Line


class Loaded(_Message, frozen=True, tag=12):
    """Commands can be run from now on. ``tokens_per_second`` of prefill as measured, 0 when it could not be."""

    facts: ModelFacts
    tokens_per_second: float
    memory: EngineMemory


class Refused(_Message, frozen=True, tag=13):
    """The model cannot be loaded, and another try will not help. ``error``: the name of a class in wire.errors."""

    error: Name
    message: Line
    remedy: Line


class Stepped(_Message, frozen=True, tag=14):
    """A step is done and gave an event."""

    task: Count
    kind: Name
    event: msgspec.Raw
    memory: EngineMemory
    parts: Shapes = ()


class Ended(_Message, frozen=True, tag=15):
    """A command is over; ``position`` and ``kv_bytes`` of its session, None for one that is not open."""

    task: Count
    position: Count | None
    kv_bytes: Count
    memory: EngineMemory


class Raised(_Message, frozen=True, tag=16):
    """A step ended with an exception: a bug, and the end of its command."""

    task: Count
    error: Name
    position: Count | None
    kv_bytes: Count
    memory: EngineMemory


Request: TypeAlias = Load | Start | Next | Cancel
Answer: TypeAlias = Stepped | Ended | Raised
"""To everything but Load."""
Reply: TypeAlias = Told | Loaded | Refused | Answer


def _encode_value(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype="<i4").tobytes()
    raise NotImplementedError(type(value).__name__)


def _decode_value(kind: type, value: Any) -> Any:
    # The only type of a field that msgspec does not know is the array of tokens.
    if not isinstance(value, bytes) or len(value) % 4:
        raise ValueError("tokens are packed int32")
    return np.frombuffer(value, dtype="<i4").astype(np.int32, copy=False)


_T = TypeVar("_T")
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_value)
_REQUESTS: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_REPLIES: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
_VALUES: Final[dict[str, msgspec.msgpack.Decoder[Command | Event]]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_decode_value) for kind in (*get_args(Command), *get_args(Event))
}
_WITH_PARTS: Final = (ImportPrefix, AddParts, SegmentComputed, PartsCaptured)


def encode(message: Request | Reply) -> bytes:
    return _ENCODER.encode(message)


def decode_request(body: bytes) -> Request:
    """Raises RemoteProtocolError for anything else."""
    return _decoded(_REQUESTS, body)


def decode_reply(body: bytes) -> Reply:
    """Raises RemoteProtocolError for anything else."""
    return _decoded(_REPLIES, body)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: bytes | msgspec.Raw) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a message of the decode worker boundary is damaged: {type(error).__name__}") from None


def pack(value: Command | Event) -> tuple[str, msgspec.Raw, tuple[PartShape, ...], tuple[memoryview, ...]]:
    """A command or event as its kind, its fields, and the shapes and bytes of its parts (views, not copies)."""
    kind = type(value).__name__
    if not isinstance(value, _WITH_PARTS) or not value.parts:
        return kind, msgspec.Raw(_ENCODER.encode(value)), (), ()
    shapes = tuple(PartShape(part.kind, part.start, part.token_count, part.payload.nbytes) for part in value.parts)
    body = msgspec.Raw(_ENCODER.encode(replace(value, parts=())))
    return kind, body, shapes, tuple(part.payload for part in value.parts)


def _unpack(kind: str, body: msgspec.Raw, shapes: Sequence[PartShape], payloads: Sequence[memoryview]) -> Command | Event:
    decoder = _VALUES.get(kind)
    if decoder is None:
        raise RemoteProtocolError("a message of the decode worker boundary has an unknown kind")
    value = _decoded(decoder, body)
    if not shapes:
        return value
    if not isinstance(value, _WITH_PARTS):
        raise RemoteProtocolError(f"{kind} has no parts")
    parts = tuple(
        RawPart(shape.kind, shape.start, shape.token_count, payload.toreadonly())
        for shape, payload in zip(shapes, payloads, strict=True)
    )
    return replace(value, parts=parts)


def unpack_command(kind: str, body: msgspec.Raw, shapes: Sequence[PartShape], payloads: Sequence[memoryview]) -> Command:
    """The command that :func:`pack` took apart.

    Raises:
        RemoteProtocolError: there is no such command, the fields are not its own, or it has no parts.
    """
    value = _unpack(kind, body, shapes, payloads)
    if not isinstance(value, get_args(Command)):
        raise RemoteProtocolError(f"{kind} is no command")
    return cast(Command, value)


def unpack_event(kind: str, body: msgspec.Raw, shapes: Sequence[PartShape], payloads: Sequence[memoryview]) -> Event:
    """The event that :func:`pack` took apart; raises as :func:`unpack_command`."""
    value = _unpack(kind, body, shapes, payloads)
    if not isinstance(value, get_args(Event)):
        raise RemoteProtocolError(f"{kind} is no event")
    return cast(Event, value)


def payload_sizes(message: Request | Reply) -> tuple[int, ...]:
    """Bytes of each part that follows a message."""
    return tuple(shape.length_bytes for shape in message.parts) if isinstance(message, Start | Stepped) else ()
