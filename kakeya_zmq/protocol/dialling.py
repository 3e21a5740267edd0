"""Which of the addresses that cards name are dialled, when, and for whom.

A card is what its node says of itself, and any member may make some up. So an address of a card is a claim, and dialling it
must not cost others anything:

- only addresses in their one canonical form are dialled: a name would have to be looked up, and libzmq's I/O thread waits
  for the answer;
- an address is dialled for one node at a time. Next is whoever answered there last, then a node that was met there before,
  then the one that has failed there least, then the one known longest;
- at most ``UNPROVEN_MAX`` dials that have not led to their node yet are under way at once;
- where one has failed, the next comes later each time, for whatever node.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

UNPROVEN_MAX: Final = 64
PAUSE_S: Final = 1.0
PAUSE_LAST_S: Final = 60.0
PAUSES_KEPT: Final = 4096
FORGIVEN_S: Final = 300.0
"""An address that nobody failed at for so long begins anew."""


def is_dialable(host: str, *, link_local: bool, interfaces: Set[str]) -> bool:
    """Whether the host of an address on another node's card may be dialled.

    Args:
        link_local: this machine has an address of 169.254.0.0/16 itself; else nobody there can be meant.
        interfaces: names of this machine's network interfaces, for IPv6 zones.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if str(address) != host or address.is_unspecified or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        if address.is_link_local:
            return link_local
        return not address.is_reserved and int(address) >> 24 != 0
    if address.is_link_local:
        return address.scope_id in interfaces
    return address.scope_id is None and (address.is_loopback or not address.is_reserved)


@dataclass(slots=True)
class _Pause:
    failures: int = 0
    until: float = 0.0
    answered_by: str | None = None
    """The name that answered there last, when it was another one than was asked for."""


class DialPlan:
    """What is wanted and what is due. The host opens connections and tells how they ended."""

    def __init__(self) -> None:
        self._wishes: dict[str, dict[str, int]] = {}
        """Address → node id → how often it has failed there."""
        self._known: dict[str, int] = {}
        """Node id → its place in the order of appearance."""
        self._appeared = 0
        self._proven: dict[str, set[str]] = {}
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def want(self, node_id: str, address: str) -> None:
        """Dial an address for a node until :meth:`drop`."""
        if node_id not in self._known:
            self._appeared += 1
            self._known[node_id] = self._appeared
        self._wishes.setdefault(address, {}).setdefault(node_id, 0)

    def drop(self, node_id: str, address: str) -> None:
        wishes = self._wishes.get(address)
        if wishes is not None:
            wishes.pop(node_id, None)
            if not wishes:
                del self._wishes[address]

    def forget(self, node_id: str) -> None:
        """The node is gone. What is known of its addresses stays: others may name them, too."""
        for address in [address for address, wishes in self._wishes.items() if node_id in wishes]:
            self.drop(node_id, address)
        self._known.pop(node_id, None)
        self._proven.pop(node_id, None)

    def connected(self, node_id: str, address: str) -> None:
        """The node has proven that it is there."""
        self._proven.setdefault(node_id, set()).add(address)
        self._pauses.pop(address, None)
        wishes = self._wishes.get(address, {})
        if node_id in wishes:
            wishes[node_id] = 0

    def failed(self, node_id: str, address: str, now: float, answered_by: str | None = None) -> None:
        """An attempt ended without the node; ``answered_by``: who was there in its place."""
        wishes = self._wishes.get(address, {})
        if node_id in wishes:
            wishes[node_id] += 1
        pause = self._pauses.setdefault(address, _Pause())
        self._pauses.move_to_end(address)
        if now > pause.until + FORGIVEN_S:
            pause.failures = 0
        pause.until = now + min(PAUSE_LAST_S, PAUSE_S * 2.0 ** min(pause.failures, 16))
        pause.failures += 1
        pause.answered_by = answered_by
        while len(self._pauses) > PAUSES_KEPT:
            self._pauses.popitem(last=False)

    def is_proven(self, node_id: str, address: str) -> bool:
        return address in self._proven.get(node_id, ())

    def wants(self, node_id: str, address: str) -> bool:
        return node_id in self._wishes.get(address, ())

    def due(self, now: float, taken: Set[str], unproven: int) -> list[tuple[str, str]]:
        """(node id, address) to dial now.

        Args:
            taken: addresses that a connection exists to.
            unproven: how many of those are to a node that was never met there.
        """
        found: list[tuple[int, int, str, str]] = []
        for address, wishes in self._wishes.items():
            pause = self._pauses.get(address)
            if address in taken or (pause is not None and pause.until > now):
                continue
            node_id = self._next(address, wishes, pause)
            found.append((pause.failures if pause is not None else 0, self._known[node_id], node_id, address))
        chosen: list[tuple[str, str]] = []
        for _, _, node_id, address in sorted(found):
            if not self.is_proven(node_id, address):
                if unproven >= UNPROVEN_MAX:
                    continue
                unproven += 1
            chosen.append((node_id, address))
        return chosen

    def deadline(self, now: float, taken: Set[str]) -> float | None:
        """When a pause ends that something waits for; what waits for a free place is due when one becomes free."""
        pauses = self._pauses
        waits = (pauses[address].until for address in self._wishes if address in pauses and address not in taken)
        return min((until for until in waits if until > now), default=None)

    def _next(self, address: str, wishes: dict[str, int], pause: _Pause | None) -> str:
        answered_by = pause.answered_by if pause is not None else None

        def rank(node_id: str) -> tuple[bool, bool, int, int]:
            return node_id != answered_by, not self.is_proven(node_id, address), wishes[node_id], self._known[node_id]

        return min(wishes, key=rank)
