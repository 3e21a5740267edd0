"""Capability cards: what a node is, holds and can do, signed by the node, so that anybody may relay them.

A signed card is ``[card as msgpack, Ed25519 signature]``. The newest (incarnation, sequence) wins per node. TTL runs on the
receiver's clock from the age its sender told; ``announced_at_unix`` is for people only, and no decision uses it.
Whoever opens a card must still hold ``identity_public_key`` against the key it knows for ``node_id``.

Nodes of different versions belong to one fleet: fields that a newer software adds at the end are ignored, and the card is
relayed as it was signed.

A *digest* says which cards its sender holds, so that only what is new needs to travel: for each card 24 bytes, the node's
mark (BLAKE2b-64 of its id), incarnation and sequence, both u64 big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from wire import limits
from wire.codec import decode_bounded, encode_bounded
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.keys import KEY_ID_BYTES, NodeIdentity
from wire.messages import (
    Ascii,
    Count,
    Hash,
    Key32,
    Name,
    NodeName,
    Number,
    OptionalName,
    OptionalNodeName,
    OptionalWord,
    TextLine,
    Word,
)

CARD_TTL_MS_DEFAULT: Final = 120_000
CARD_TTL_MS_MAX: Final = 3_600_000
ENDPOINTS_MAX: Final = 16
MODELS_MAX: Final = 16
ACCEPTED_FINGERPRINTS_MAX: Final = 64
HELD_NAMESPACES_MAX: Final = 16
"""Namespaces a store tells of: a node with more serves so many models that the largest tell enough."""
COMPATIBILITY_FIELDS_MAX: Final = 32

_CONTEXT: Final = b"kakeya-zmq card\0"
MARK_BYTES: Final = 8
_VERSION: Final = struct.Struct(f">{MARK_BYTES}sQQ")
DIGEST_ENTRY_BYTES: Final = _VERSION.size

Address = Annotated[str, Meta(max_length=262, pattern=r"\A(\[[0-9A-Za-z:.%_-]{2,64}\]|[0-9A-Za-z._-]{1,255}):[0-9]{1,5}\Z")]
"""``host:port``; an IPv6 address stands in brackets."""
Rate = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Measured tokens per second; 0 means not measured yet."""
Load = Annotated[float, Meta(ge=0.0, le=1e6)]
"""0 idle, 1 fully busy."""


class _CardPart(Struct, frozen=True, array_like=True, kw_only=True):
    pass


class Endpoint(_CardPart, frozen=True, kw_only=True):
    """One way to reach the node's control plane."""

    address: Address
    network: OptionalWord
    """"thunderbolt", "lan", "tailscale", "loopback", …"""
    priority: Annotated[int, Meta(ge=0, le=1000)]
    """Higher is tried first."""
    key_id: Annotated[bytes, Meta(max_length=KEY_ID_BYTES)] = b""
    """Which PSK this endpoint admits during a rotation; empty: the one the card was sealed with."""


class ModelOffering(_CardPart, frozen=True, kw_only=True):
    model_id: Name
    role: OptionalWord
    quantization: OptionalName
    tokens_per_second: Rate
    fingerprint: Annotated[bytes, Meta(max_length=limits.HASH_BYTES)] = b""
    """Of the namespace it computes KV for: 32 bytes, or nothing when it is not told."""
    tenant: OptionalNodeName = ""
    compatibility: Annotated[dict[Name, TextLine | Number], Meta(max_length=COMPATIBILITY_FIELDS_MAX)] = {}
    """The tuple behind the fingerprint: proves whose namespace it is. Empty when it is not told."""


class HeldNamespace(_CardPart, frozen=True, kw_only=True):
    """What a store holds of one namespace."""

    fingerprint: Hash
    bytes_used: Count


class CacheOffering(_CardPart, frozen=True, kw_only=True):
    """A store that others may look into and publish to. Counters run since the node's start."""

    bytes_used: Count
    bytes_free: Count
    entry_count: Count
    epoch: Count
    load: Load
    evictions: Count
    bytes_evicted: Count
    put_failures: Count
    tokens_served: Count
    fingerprints: Annotated[tuple[Hash, ...], Meta(max_length=ACCEPTED_FINGERPRINTS_MAX)] = ()
    """Accepted for publishing; empty: any."""
    held: Annotated[tuple[HeldNamespace, ...], Meta(max_length=HELD_NAMESPACES_MAX)] = ()
    """The namespaces that take most of the store, largest first."""


class WorkerOffering(_CardPart, frozen=True, kw_only=True):
    """A prefill worker for exactly one fingerprint."""

    fingerprint: Hash
    compatibility: Annotated[dict[Name, TextLine | Number], Meta(max_length=COMPATIBILITY_FIELDS_MAX)]
    """The tuple behind the fingerprint, to explain a mismatch to people."""
    max_concurrent_jobs: Annotated[int, Meta(ge=1, le=1024)]
    inflight_jobs: Count
    queued_jobs: Count
    queued_tokens: Count
    load: Load
    prefill_tokens_per_second: Rate
    ram_bytes_free: Count
    accepts_jobs: bool


class Card(_CardPart, frozen=True, kw_only=True):
    """Everything a node says about itself."""

    node_id: NodeName
    identity_public_key: Key32
    incarnation: Number
    sequence: Number
    roles: Annotated[tuple[Word, ...], Meta(max_length=8)]
    software: Ascii
    platform: Ascii
    memory_bytes: Count
    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=ENDPOINTS_MAX)]
    bus_port: Annotated[int, Meta(ge=0, le=65_535)]
    """0: the node has no bus."""
    models: Annotated[tuple[ModelOffering, ...], Meta(max_length=MODELS_MAX)] = ()
    cache: CacheOffering | None = None
    worker: WorkerOffering | None = None
    announced_at_unix: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    ttl_ms: Annotated[int, Meta(ge=1, le=CARD_TTL_MS_MAX)] = CARD_TTL_MS_DEFAULT


class _SignedCard(_CardPart, frozen=True, kw_only=True):
    card: Annotated[bytes, Meta(max_length=limits.CARD_BYTES_MAX)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


_CARD: Final = msgspec.msgpack.Decoder(Card)
_SIGNED: Final = msgspec.msgpack.Decoder(_SignedCard)


def sign_card(card: Card, identity: NodeIdentity) -> bytes:
    """The card as it travels, at most CARD_BYTES_MAX bytes.

    Raises:
        LocalProtocolError: too large, a field that the receiver would refuse, or another node's identity.
    """
    if card.identity_public_key != identity.public_key:
        raise LocalProtocolError("a card is signed by the node it describes")
    body = encode_bounded(card, limits.CARD_BYTES_MAX)
    # Constructors don't validate: better to fail here than to be ignored by the whole fleet.
    try:
        _CARD.decode(body)
    except msgspec.ValidationError as error:
        raise LocalProtocolError(f"the card is not valid: {error}") from error
    signed = _SignedCard(card=body, signature=identity.sign(_CONTEXT + body))
    return encode_bounded(signed, limits.CARD_BYTES_MAX)


def open_card(data: bytes) -> Card:
    """A card whose signature holds for the key it names.

    Raises:
        RemoteProtocolError: oversize or malformed.
        AuthenticationError: the signature does not hold.
    """
    signed = decode_bounded(_SIGNED, data, limits.CARD_BYTES_MAX, "card")
    card = decode_bounded(_CARD, signed.card, limits.CARD_BYTES_MAX, "card")
    NodeIdentity.verify(card.identity_public_key, _CONTEXT + signed.card, signed.signature)
    return card


# --- digests -----------------------------------------------------------------------------------------------------


def mark_of(node_id: str) -> bytes:
    """The 8 bytes that stand for a node in a digest."""
    return blake2b(node_id.encode("utf-8"), digest_size=MARK_BYTES, person=b"kz card mark").digest()


def pack_digest(versions: Iterable[tuple[bytes, int, int]]) -> bytes:
    """(mark, incarnation, sequence) of each card, 24 bytes each."""
    return b"".join(_VERSION.pack(*version) for version in versions)


def unpack_digest(data: bytes) -> Mapping[bytes, tuple[int, int]]:
    """Mark → (incarnation, sequence).

    Raises:
        RemoteProtocolError: not a whole number of entries.
    """
    if len(data) % DIGEST_ENTRY_BYTES:
        raise RemoteProtocolError("a digest of cards has a broken length")
    return {mark: (incarnation, sequence) for mark, incarnation, sequence in _VERSION.iter_unpack(data)}


def unpack_marks(data: bytes) -> tuple[bytes, ...]:
    """Marks, 8 bytes each.

    Raises:
        RemoteProtocolError: not a whole number of marks.
    """
    if len(data) % MARK_BYTES:
        raise RemoteProtocolError("a list of marks has a broken length")
    return tuple(data[start : start + MARK_BYTES] for start in range(0, len(data), MARK_BYTES))
