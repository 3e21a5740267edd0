"""Order without clocks: strictly increasing counters of a session, sequence numbers of the bus."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Final

from wire.errors import AuthenticationError

TRACKED_NODES_MAX: Final = 4096
"""Nodes whose bus sequence is remembered; the one heard of longest ago is forgotten first."""


class CounterWindow:
    """Accepts each counter of one direction at most once, and only in increasing order; gaps are fine (lost messages).

    Checking and advancing are two steps: the counter of a message whose seal does not hold must not move the window.
    """

    __slots__ = ("highest",)

    def __init__(self) -> None:
        self.highest = 0

    def check(self, counter: int) -> None:
        """Whether a message with this counter may be opened.

        Raises:
            AuthenticationError: seen before, or older than one seen before.
        """
        if counter <= self.highest:
            raise AuthenticationError("the counter is not new")

    def advance(self, counter: int) -> None:
        """The message's seal held: nothing up to ``counter`` is accepted any more.

        Raises:
            AuthenticationError: as :meth:`check`.
        """
        self.check(counter)
        self.highest = counter


class Order(Enum):
    """How a bus message relates to those seen before from its node."""

    NEW = "new"
    """The next one, the first from this node, or the first of a new incarnation."""
    OLD = "old"
    """Seen before, or overtaken: ignore it."""
    GAP = "gap"
    """New, but messages in between are missing: ask for the whole state again."""


@dataclass(frozen=True, slots=True)
class Observation:
    """``missed``: how many messages are missing, > 0 only for a gap."""

    order: Order
    missed: int = 0


class SequenceTracker:
    """Highest (incarnation, sequence) of each node on the bus.

    A node is a name and the key that signs for it: what comes under the same name with another key moves nothing of it.

    Args:
        nodes_max: nodes remembered, the ones heard of longest ago are forgotten first.
    """

    def __init__(self, nodes_max: int = TRACKED_NODES_MAX) -> None:
        self._nodes_max = nodes_max
        self._latest: OrderedDict[tuple[str, bytes], tuple[int, int]] = OrderedDict()

    def observe(self, node_id: str, identity_public_key: bytes, incarnation: int, sequence: int) -> Observation:
        """Take note of one message whose signature holds."""
        speaker = (node_id, identity_public_key)
        latest = self._latest.get(speaker)
        if latest is not None and (incarnation, sequence) <= latest:
            return Observation(Order.OLD)
        self._latest[speaker] = (incarnation, sequence)
        self._latest.move_to_end(speaker)
        if len(self._latest) > self._nodes_max:
            self._latest.popitem(last=False)
        if latest is None or latest[0] != incarnation or latest[1] + 1 == sequence:
            return Observation(Order.NEW)
        return Observation(Order.GAP, missed=sequence - latest[1] - 1)

    def forget(self, node_id: str, identity_public_key: bytes) -> None:
        """The node is gone; its next message counts as its first."""
        self._latest.pop((node_id, identity_public_key), None)

    def __len__(self) -> int:
        return len(self._latest)
