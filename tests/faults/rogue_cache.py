"""A cache peer that is a member of the fleet and breaks its word: ``python -m tests.faults.rogue_cache MODE FLAGS…``.

It is the real daemon with one thing changed:

- ``wrong-bytes``: what it sends is not what the digests of its manifest say
- ``short-parts``: parts are half as long as they must be, with digests that fit
- ``few-parts``: it ends the transfer after half of the parts
- ``strange-parts``: it sends a part that nobody asked for
- ``silent``: it grants a transfer and sends nothing
- ``dies``: it sends half of the parts and is gone
- ``boasts``: it claims to hold everything it is asked for
- ``forgets``: a lease is over as soon as the lookup is answered
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from daemons.bulk import BulkShell
from daemons.command import main
from kakeya_zmq.blocks import Part
from kakeya_zmq.protocol import effects as fx
from kakeya_zmq.protocol.serve import CacheService
from wire.codec import pack_bitmap
from wire.ids import LeaseId
from wire.limits import HASH_BYTES
from wire.messages import Lookup, LookupReply

MODES = ("wrong-bytes", "short-parts", "few-parts", "strange-parts", "silent", "dies", "boasts")
FORGETS = "forgets"


def flipped(part: Part) -> Part:
    wrong = bytearray(part.payload)
    for at in range(0, len(wrong), 64):
        wrong[at + 3] ^= 0x40  # the exponent of a little-endian float
    return replace(part, payload=memoryview(bytes(wrong)))


def _halved(part: Part) -> Part:
    payload = bytes(part.payload[: part.payload.nbytes // 2])
    meta = msgspec.structs.replace(part.meta, length_bytes=len(payload), digest=hashlib.sha256(payload).digest())
    return replace(part, meta=meta, payload=memoryview(payload))


def _strange(part: Part) -> Part:
    return replace(part, meta=msgspec.structs.replace(part.meta, block_hash=bytes(32)))


def _rogue_feed(mode: str, honest: Any) -> Any:
    def feed(shell: BulkShell, effect: fx.FeedSender) -> None:
        parts = effect.parts
        half = parts[: len(parts) // 2]
        match mode:
            case "wrong-bytes":
                parts = tuple(map(flipped, parts))
            case "short-parts":
                parts = tuple(map(_halved, parts))
            case "strange-parts":
                parts = tuple(map(_strange, parts))
            case "few-parts":
                parts = half
            case "silent":
                return
            case _:
                honest(shell, replace(effect, parts=half, final=False))
                os._exit(1)
        honest(shell, replace(effect, parts=parts))

    return feed


def _boasting(honest: Any) -> Any:
    def on(service: CacheService, event: Any, now: float) -> Sequence[Any]:
        effects = honest(service, event, now)
        asked = event.body if isinstance(event, fx.RequestArrived) else None
        if not isinstance(asked, Lookup):
            return list(effects)
        lease_ms = asked.lease_ms
        all_of_them = pack_bitmap([True] * (len(asked.block_hashes) // HASH_BYTES))

        def boast(effect: Any) -> Any:
            if isinstance(effect, fx.SendReply) and isinstance(effect.body, LookupReply):
                present = (all_of_them, all_of_them, effect.body.present[2])
                lease = {"lease_id": os.urandom(16), "lease_ms": lease_ms}
                return replace(effect, body=msgspec.structs.replace(effect.body, present=present, **lease))
            return effect

        return [boast(effect) for effect in effects]

    return on


def _forgetting(honest: Any) -> Any:
    def on(service: CacheService, event: Any, now: float) -> Sequence[Any]:
        effects = honest(service, event, now)
        for effect in effects:
            if isinstance(effect, fx.SendReply) and isinstance(effect.body, LookupReply):
                service._store.release(LeaseId(effect.body.lease_id))
        return list(effects)

    return on


if __name__ == "__main__":
    chosen = sys.argv[1]
    assert chosen in (*MODES, FORGETS)
    if chosen == FORGETS:
        CacheService.on = _forgetting(CacheService.on)  # type: ignore[method-assign]
    elif chosen == "boasts":
        CacheService.on = _boasting(CacheService.on)  # type: ignore[method-assign]
    else:
        BulkShell.feed = _rogue_feed(chosen, BulkShell.feed)  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))
