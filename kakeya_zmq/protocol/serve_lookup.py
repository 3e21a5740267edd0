"""Answers to lookups: what of a prompt is held here, leased for the asker as far as a hit could use it."""

from __future__ import annotations

from kakeya_zmq.store import BlockStore
from wire.codec import pack_bitmap, unpack_hashes
from wire.errors import CapacityError
from wire.ids import LeaseId
from wire.messages import Lookup, LookupReply

NO_LEASE = LeaseId(bytes(16))


def answer_lookup(store: BlockStore, body: Lookup, now: float, *, lease_ms_max: int) -> tuple[LookupReply, bool]:
    """Look a prompt up, refresh and (if asked to) lease what is useful of it, and count the lookup in the store.

    Returns:
        the reply, and whether a hit could use anything of it.

    Raises:
        RemoteProtocolError: the hashes are malformed.
    """
    hashes = unpack_hashes(body.block_hashes)
    found = store.find(hashes, fingerprint=body.fingerprint, requirement=body.requirement)
    lease_id, lease_ms = NO_LEASE, 0
    if found.parts and body.lease_ms > 0:
        try:
            lease_ms = min(body.lease_ms, lease_ms_max)
            lease_id = store.lease_finding(found, now, lease_ms).lease_id
        except CapacityError:  # too many leases: the answer is still worth something
            lease_ms = 0
    if lease_id == NO_LEASE:
        store.touch_finding(found)
    store.note_lookup(hit=bool(found.parts))
    full, window, state = found.survey.present
    reply = LookupReply(
        present=(pack_bitmap(full), pack_bitmap(window), pack_bitmap(state)),
        tails=found.tails,
        part_bytes=found.survey.mean_bytes,
        lease_id=lease_id,
        lease_ms=lease_ms,
        epoch=store.epoch,
    )
    return reply, bool(found.parts)
