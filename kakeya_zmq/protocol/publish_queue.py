"""What waits to be published, and for which peers nothing is begun at present.

Rules
 1. The queue is bounded in deliveries and bytes; the oldest delivery is dropped to make room.
 2. It is worked off in the order of arrival; a delivery whose peer is busy holds up none for other peers.
 3. A peer that had no room, or does not take this namespace, is passed over for a while: what would have gone to it goes to
    the next in rank, also what waits already. Fullness is learned from answers, not from cards: a store that evicts is
    always full, and takes new parts all the same.
    So is a peer whose bulk port could not be reached (.backoff, shared with fetches and jobs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kakeya_zmq.backoff import Backoff, Trouble
from kakeya_zmq.blocks import Part
from wire.ids import NodeId
from wire.messages import Cut


@dataclass(frozen=True, slots=True)
class Delivery:
    """Parts for one peer; ``spares`` are tried after it fails."""

    fingerprint: bytes
    parts: tuple[Part, ...]
    node_id: NodeId
    spares: tuple[NodeId, ...]
    attempt: int = 1
    cuts: tuple[Cut, ...] = ()
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", sum(part.meta.length_bytes for part in self.parts))


def batches(parts: Sequence[Part], *, parts_max: int, bytes_max: int) -> list[tuple[Part, ...]]:
    """The parts in runs that one delivery may have; a part that is larger than ``bytes_max`` is one of its own."""
    found: list[tuple[Part, ...]] = []
    batch: list[Part] = []
    size_bytes = 0
    for part in parts:
        too_large = size_bytes + part.meta.length_bytes > bytes_max
        if batch and (too_large or len(batch) == parts_max):
            found.append(tuple(batch))
            batch, size_bytes = [], 0
        batch.append(part)
        size_bytes += part.meta.length_bytes
    return [*found, tuple(batch)]


class Recipients:
    """Which peers may get something now.

    Args:
        backoff: tells whose bulk port could not be reached.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._paused: dict[tuple[NodeId, bytes], float] = {}
        """Peers that are passed over for a fingerprint, and until when."""

    def pause(self, delivery: Delivery, until: float) -> None:
        """Its peer wants nothing of its fingerprint now."""
        self._paused[delivery.node_id, delivery.fingerprint] = until

    def willing(self, peers: Iterable[NodeId], fingerprint: bytes, now: float) -> tuple[NodeId, ...]:
        """Those of the peers that are not passed over."""
        self._paused = {key: until for key, until in self._paused.items() if now < until}
        return tuple(
            peer
            for peer in peers
            if (peer, fingerprint) not in self._paused and not self._backoff.left_alone(peer, now, Trouble.BULK_PORT)
        )

    def redirected(self, delivery: Delivery, now: float) -> Delivery:
        """The delivery for its next spare, when its peer turned out to be no use since it was queued."""
        if self.willing((delivery.node_id,), delivery.fingerprint, now):
            return delivery
        spares = self.willing(delivery.spares, delivery.fingerprint, now)
        return replace(delivery, node_id=spares[0], spares=spares[1:]) if spares else delivery

    def retried(self, delivery: Delivery, now: float) -> Delivery:
        """The delivery once more after it has failed: for a spare, if there is one, better for a willing one."""
        willing = self.willing(delivery.spares, delivery.fingerprint, now)
        node_id, *spares = willing or delivery.spares or (delivery.node_id,)
        return replace(delivery, node_id=node_id, spares=tuple(spares), attempt=delivery.attempt + 1)


class DeliveryQueue:
    """The deliveries that have not begun.

    Args:
        recipients: tells who may get something now.
        deliveries_max: bound of what waits.
        bytes_max: bound of the payloads that waiting deliveries keep alive.
    """

    def __init__(self, recipients: Recipients, *, deliveries_max: int, bytes_max: int) -> None:
        self._recipients = recipients
        self._deliveries_max = deliveries_max
        self._bytes_max = bytes_max
        self._queue: deque[Delivery] = deque()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, delivery: Delivery) -> int:
        """Let it wait; the number of those that were dropped for it."""
        self._queue.append(delivery)
        self._size_bytes += delivery.size_bytes
        dropped = 0
        # The newest delivery stays even when it alone is over the byte bound: a batch is bounded by itself.
        while len(self._queue) > 1 and (len(self._queue) > self._deliveries_max or self._size_bytes > self._bytes_max):
            self._size_bytes -= self._queue.popleft().size_bytes
            dropped += 1
        return dropped

    def take(self, count_max: int, busy: Iterable[NodeId], now: float) -> list[Delivery]:
        """Take out what may begin now, in order, each for another peer.

        Args:
            count_max: so many at most.
            busy: peers that nothing is begun for.
        """
        waiting, self._queue = self._queue, deque()
        taken: list[Delivery] = []
        passed = set(busy)
        for delivery in waiting:
            directed = self._recipients.redirected(delivery, now)
            if len(taken) >= count_max or directed.node_id in passed:
                self._queue.append(delivery)
                continue
            passed.add(directed.node_id)
            self._size_bytes -= delivery.size_bytes
            taken.append(directed)
        return taken

    def clear(self) -> None:
        self._queue.clear()
        self._size_bytes = 0
