"""What a node answers to GetStatus stays small, whatever is known of how many nodes."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from daemons.bounded_status import bounded
from kakeya_zmq.protocol.directory_values import NODES_MAX
from wire.cards import ENDPOINTS_MAX
from wire.codec import encode_bounded
from wire.limits import NOTES_BYTES_MAX, STATUS_BYTES_MAX, TEXT_CHARACTERS_MAX
from wire.messages import Status


def status(peers: int = 0, notes: int = 0, *, up: int = 0, endpoints: str = "", note: str = "n" * 60) -> Status:
    rows = [
        {"node_id": f"node-{number}", "state": "up" if number >= peers - up else "known by its card", "endpoints": endpoints}
        for number in range(peers)
    ]
    sections = {"node": {"state": "serving"}, "refusals": {f"reason {number} " + "r" * 80: number for number in range(256)}}
    recent = tuple(f"{number} {note}"[:TEXT_CHARACTERS_MAX] for number in range(notes))
    return Status(node_id="n", roles=("cache",), sections=sections, peers=tuple(rows), recent=recent)


def size(value: Status) -> int:
    return len(msgspec.msgpack.encode(value))


def test_a_usual_status_is_told_whole() -> None:
    told = bounded(status(200, 100, up=100, endpoints="e" * 200))
    assert len(told.peers) == 200
    assert len(told.recent) == 100
    assert told.sections["node"] == {"state": "serving", "peers_left_out": 0}


def test_of_too_many_nodes_the_connected_ones_are_told_first_and_how_many_are_missing() -> None:
    """As many as a node remembers, each with the longest endpoints a card may name: more than any message could hold."""
    whole = status(NODES_MAX, up=5, endpoints="e" * 262 * ENDPOINTS_MAX)
    told = bounded(whole)
    assert size(whole) > 2**20
    assert size(told) <= STATUS_BYTES_MAX
    assert [row["node_id"] for row in told.peers if row["state"] == "up"] == [row["node_id"] for row in whole.peers[-5:]]
    assert told.sections["node"]["peers_left_out"] == NODES_MAX - len(told.peers)
    assert len(told.peers) > 5


def test_the_newest_notes_are_kept_in_their_order() -> None:
    whole = status(notes=100, note="\U0001f680" * TEXT_CHARACTERS_MAX)
    told = bounded(whole)
    assert told.recent == whole.recent[-len(told.recent) :]
    assert 0 < sum(len(line.encode()) for line in told.recent) <= NOTES_BYTES_MAX


@given(st.integers(0, 300), st.integers(0, 100), st.integers(0, 300), st.integers(0, 5000), st.text(max_size=600))
def test_it_always_fits(peers: int, notes: int, up: int, endpoint_bytes: int, note: str) -> None:
    told = bounded(status(peers, notes, up=min(up, peers), endpoints="e" * endpoint_bytes, note=note))
    assert len(encode_bounded(told, STATUS_BYTES_MAX)) <= STATUS_BYTES_MAX
