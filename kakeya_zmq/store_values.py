"""The values a block store gives out, and what it raises; re-exported by :mod:`kakeya_zmq.store`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

from kakeya_zmq.store_blocks import HeldPart
from wire.errors import FailureCode, KakeyaError
from wire.ids import LeaseId
from wire.messages import Cut, PartKind, PartRef, Tail

LEASES_MAX: Final = 4096
"""Leases at one time; a lookup beyond them is told that nothing is held."""
LEASES_PER_OWNER_MAX: Final = 512
"""Of these, leases of one other node: none can take them all."""
LEASED_SHARE: Final = 4
"""A quarter of the store (or of a namespace's quota) is held fast by the leases of one other node, also when somebody else
needs the room."""
LEASED_PARTS_PER_OWNER_MAX: Final = 1 << 18
"""Parts in all leases of one other node together: 32 of the longest prompts. Ending a lease takes time for each."""
BYTES_PER_PART: Final = 4096
"""A store has a place for one part to so many of its bytes, however small it is: each costs 1 KiB beside its payload."""
PARTS_MAX_LEAST: Final = 4096
"""The smallest store has room for so many."""
EVICTIONS_AT_ONCE: Final = 2048
"""Most parts evicted for one new part, of small size: about 30 ms of the thread that does everything else meanwhile."""
BYTES_PER_EVICTION: Final = 32 << 10
"""One more to so many bytes that room is made for. Real parts are larger."""
SCANNED_BLOCKS_MAX: Final = 32_768
"""Most blocks looked at to find something that may go where nothing in order may."""
NAMESPACES_MAX: Final = 256
"""Fingerprints at one time: eviction compares the oldest part of each."""
NAMESPACES_PER_PUBLISHER_MAX: Final = 32
"""Of these, those that one other node brought in: none can take them all."""
EVENTS_MAX: Final = 4096
"""Events remembered for readers; one that fell further behind must resynchronise."""
TAILS_PER_LOOKUP_MAX: Final = 64
"""Tails in one answer: the bound of LookupReply.tails."""

ReservationId: TypeAlias = bytes
Change: TypeAlias = Literal["stored", "evicted", "invalidated"]


class LeaseError(KakeyaError):
    """A lease is unknown, has expired, or does not cover what was asked."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class PutOutcome(Enum):
    STORED = "stored"
    ALREADY_HELD = "already held"


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """``generation`` tells two leases apart in logs and checks; ``parts`` are handles of the store, all of one namespace."""

    lease_id: LeaseId
    parts: tuple[HeldPart, ...]
    generation: int
    expires_at: float
    owner: str = ""
    """Node id of whom it was given to; empty for this node itself."""

    @property
    def fingerprint(self) -> bytes:
        """The namespace of its parts."""
        return self.parts[0].block.namespace.fingerprint

    @property
    def refs(self) -> tuple[PartRef, ...]:
        """What is held fast, without repetitions, in the order in which it was asked for."""
        return tuple([held.ref for held in self.parts])


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """One change of the contents. ``evicted``: to make room, or because the budget shrank; ``invalidated``: on demand."""

    sequence: int
    change: Change
    block_hash: bytes
    kind: PartKind
    size_bytes: int

    @property
    def ref(self) -> PartRef:
        return PartRef(block_hash=self.block_hash, kind=self.kind)


@dataclass(frozen=True, slots=True)
class Evictions:
    """Totals since the store was made: two of them tell what was evicted in between, however much it was."""

    parts: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Which of some blocks' parts are held. Index of the outer tuples: PartKind."""

    present: tuple[tuple[bool, ...], tuple[bool, ...], tuple[bool, ...]]
    mean_bytes: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """What of a prompt is held. ``parts`` are handles of all of it, in prefix order, tails at the end."""

    survey: Survey
    tails: tuple[Tail, ...]
    cuts: tuple[Cut, ...]
    parts: tuple[HeldPart, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    bytes_used: int
    max_bytes: int
    bytes_reserved: int
    bytes_locked: int
    """Held fast by leases and pins."""
    entry_count: int
    """Parts."""
    block_count: int
    cache_epoch: int
    lookup_hits: int
    lookup_misses: int
    tokens_served: int
    bytes_served: int
    evictions: int
    """Parts."""
    bytes_evicted: int
    put_failures: int
    collisions_same_hash: int
    leases: int
