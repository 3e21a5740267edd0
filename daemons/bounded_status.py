"""A status that fits into an answer, however many nodes are known and whatever their cards say."""

from __future__ import annotations

import msgspec

from wire.limits import NOTES_BYTES_MAX, STATUS_BYTES_MAX
from wire.messages import Status

_ITEM_BYTES = 5
"""What an item of a list may cost besides its content."""


def bounded(status: Status) -> Status:
    """The same with as many notes (the newest) and rows of nodes (connected ones first) as fit into STATUS_BYTES_MAX.

    The section ``node`` says in ``peers_left_out`` how many rows did not fit.
    """
    encoder = msgspec.msgpack.Encoder()

    def size(value: object) -> int:
        return len(encoder.encode(value)) + _ITEM_BYTES

    notes: list[str] = []
    room = NOTES_BYTES_MAX
    for line in reversed(status.recent):
        room -= size(line)
        if room < 0:
            break
        notes.append(line)
    # The figure is at its largest here.
    sections = {**status.sections, "node": {**status.sections.get("node", {}), "peers_left_out": len(status.peers)}}
    told = msgspec.structs.replace(status, sections=sections, peers=(), recent=tuple(reversed(notes)))
    room = STATUS_BYTES_MAX - size(told)
    kept: set[int] = set()
    for at, row in sorted(enumerate(status.peers), key=lambda each: each[1].get("state") != "up"):
        room -= size(row)
        if room < 0:
            break
        kept.add(at)
    sections["node"]["peers_left_out"] = len(status.peers) - len(kept)
    return msgspec.structs.replace(told, peers=tuple(row for at, row in enumerate(status.peers) if at in kept))
