"""Answers to lookups: what of a prompt is held here, all of it leased for the asker.

An answer promises nothing that a fetch would be refused: what it names is in its lease, unless the asker wanted none.
"""

from __future__ import annotations

from dataclasses import dataclass

from kakeya_zmq.store import BlockStore
from wire.codec import pack_bitmap, unpack_hashes
from wire.errors import CapacityError
from wire.ids import LeaseId
from wire.messages import Lookup, LookupReply

NO_LEASE = LeaseId(bytes(16))


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    reply: LookupReply
    hit: bool
    """Whether anything of the prompt is held."""
    refused: bool
    """Whether the answer hides what is held, since no lease could be given on it."""


def answer_lookup(store: BlockStore, body: Lookup, now: float, *, lease_ms_max: int, owner: str) -> LookupAnswer:
    """Look a prompt up, refresh and (if asked to) lease what is held of it, and count the lookup in the store.

    Args:
        owner: the asker; the lease is given to it.

    Raises:
        RemoteProtocolError: the hashes are malformed.
    """
    hashes = unpack_hashes(body.block_hashes)
    found = store.find(hashes, fingerprint=body.fingerprint, requirement=body.requirement)
    store.note_lookup(hit=bool(found.parts))
    lease_id, lease_ms = NO_LEASE, 0
    if found.parts and body.lease_ms > 0:
        try:
            lease_ms = min(body.lease_ms, lease_ms_max)
            lease_id = store.lease_finding(found, now, lease_ms, owner=owner).lease_id
        except CapacityError:  # too many leases: it could not be fetched, so the asker had better go elsewhere at once
            nothing = pack_bitmap([False] * len(hashes))
            empty = LookupReply(
                present=(nothing, nothing, nothing),
                tails=(),
                cuts=(),
                part_bytes=(0, 0, 0),
                lease_id=NO_LEASE,
                lease_ms=0,
                epoch=store.epoch,
            )
            return LookupAnswer(empty, hit=True, refused=True)
    else:
        store.touch_finding(found)
    full, window, state = found.survey.present
    reply = LookupReply(
        present=(pack_bitmap(full), pack_bitmap(window), pack_bitmap(state)),
        tails=found.tails,
        cuts=found.cuts,
        part_bytes=found.survey.mean_bytes,
        lease_id=lease_id,
        lease_ms=lease_ms,
        epoch=store.epoch,
    )
    return LookupAnswer(reply, hit=bool(found.parts), refused=False)
