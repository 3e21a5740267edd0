"""The transfers a cache service has open, and the plain rules of what it takes and answers; no state of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kakeya_zmq.blocks import Part
from kakeya_zmq.protocol.effects import Count, Effect, RequestKey, SendFailure
from kakeya_zmq.store import BlockStore
from wire import limits
from wire.errors import FailureCode
from wire.ids import LeaseId
from wire.messages import Cut, PartMeta, PartRef, PublishOffer, PublishResult


class TransferPhase(Enum):
    OPENING = "opening"
    RUNNING = "running"
    CLOSING = "closing"


@dataclass(slots=True)
class Outgoing:
    """A fetch being served."""

    key: RequestKey
    account: str
    """Whose it is: RequestArrived.account."""
    phase: TransferPhase
    idle_at: float
    """When it is given up. Once the lane is open, that one sees to it that something happens; this is the end at last."""
    parts: tuple[Part, ...]
    lease_id: LeaseId | None
    """The asker's, while it still exists."""
    lease_generation: int
    renew_at: float
    lease_given_back: bool = False
    """The asker has released the lease. It ends with the transfer, so that what lanes send is always held in the store."""

    @property
    def total_bytes(self) -> int:
        return sum(part.meta.length_bytes for part in self.parts)


@dataclass(slots=True)
class Incoming:
    """A publish being received."""

    key: RequestKey
    account: str
    """Whose it is: RequestArrived.account."""
    phase: TransferPhase
    idle_at: float
    fingerprint: bytes
    wanted: bytes
    """Bitmap over the offer."""
    outstanding: dict[PartRef, PartMeta]
    held_lease_id: LeaseId | None
    """Ours, on the offered parts that were already held."""
    cuts: tuple[Cut, ...]
    """The offer's: applied when it ends, as far as their blocks are held then."""
    stored: int
    already_held: int
    refused: int
    reason: str
    received_bytes: int = 0
    """Of offered parts that have come, whether they were stored or not."""
    largest_part_bytes: int = 0
    """A lane puts one part together at a time, beside the store: this much memory at the most."""


Transfer: TypeAlias = Outgoing | Incoming


def offer_problem(body: PublishOffer, store: BlockStore, part_bytes_max: int) -> str:
    """What is wrong with an offer, or an empty string; nothing has been allocated for it yet."""
    by_hash: dict[bytes, PartMeta] = {}
    refs: set[PartRef] = set()
    for meta in body.parts:
        if meta.length_bytes > part_bytes_max:
            return f"a part of {meta.length_bytes} bytes; at most {part_bytes_max} are accepted"
        known = by_hash.setdefault(meta.block_hash, meta)
        if (known.parent_hash, known.start, known.token_count) != (meta.parent_hash, meta.start, meta.token_count):
            return "two parts of one block differ in their place"
        refs.add(meta.ref)
    if len(refs) < len(body.parts):
        return "a part is offered twice"
    for meta in by_hash.values():
        parent = by_hash.get(meta.parent_hash)
        if (parent is not None and parent.end != meta.start) or store.contradicts(meta, fingerprint=body.fingerprint):
            return "a part does not follow its parent block"
    for cut in body.cuts:
        block = by_hash.get(cut.within)
        if (
            block is None
            or block.parent_hash != cut.parent_hash
            or not cut.token_count < block.token_count == cut.within_tokens
        ):
            return "a cut is not the beginning of an offered block"
    if sum(meta.length_bytes for meta in body.parts) > limits.TRANSFER_BYTES_MAX:
        return f"the offer is larger than {limits.TRANSFER_BYTES_MAX} bytes"
    return ""


def fitting_prefix(lacking: Sequence[PartMeta], room_bytes: int) -> tuple[PartMeta, ...]:
    """The longest prefix of what is lacking that fits into the room, in prefix order."""
    fitting: list[PartMeta] = []
    for meta in sorted(lacking, key=lambda meta: (meta.start, meta.kind)):
        if meta.length_bytes > room_bytes:
            break
        room_bytes -= meta.length_bytes
        fitting.append(meta)
    return tuple(fitting)


def refuse(key: RequestKey, code: FailureCode, message: str) -> list[Effect]:
    """End a request that is not served."""
    return [Count("cache_refusals"), SendFailure(key, code, clip(message))]


def publish_result(stored: int, already_held: int, refused: int, reason: str) -> PublishResult:
    return PublishResult(stored_parts=stored, already_held_parts=already_held, refused_parts=refused, reason=clip(reason))


def renew_at(now: float) -> float:
    """When to renew a lease that was given or renewed ``now``, in seconds."""
    return now + limits.LEASE_MS_DEFAULT / 2000


def clip(text: str) -> str:
    return text[: limits.TEXT_CHARACTERS_MAX]
