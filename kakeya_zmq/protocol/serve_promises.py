"""What offers of parts may count on before the parts have come, and how long they are waited for.

An offer is a promise: until its parts have come it counts on room that others are not given then. So that nobody can keep a
store from others by offers that he does not keep:

* Of the store (and of the quota of the namespace, where there is one) the offers of one node count on a quarter at most, and
  on as much beyond it as has really come for them. What is more than that is not refused: it takes the room that is there
  when it comes.
* What was offered and did not come, although it was waited for, is the node's *debt*. The larger it is, the sooner its next
  offers are given up when nothing comes: at a debt of a quarter of the store after half of the time, and so on, down to
  ``PATIENCE_S_MIN``. What comes pays it off, and so does time: a quarter of the store in ``FORGIVEN_S``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kakeya_zmq.protocol.serve_values import Incoming

SHARE: Final = 4
"""A quarter."""
PATIENCE_S_MIN: Final = 2.0
FORGIVEN_S: Final = 60.0
DEBTORS_MAX: Final = 1024
"""Whose debt is remembered; the one that broke a promise longest ago is forgotten first."""


class Promises:
    """Of one cache service.

    Args:
        bound: namespace → how many bytes it may have at most: the size of the store, or its quota. Of None: of the store.
        patience_s: how long somebody without debt is waited for.
    """

    def __init__(self, bound: Callable[[bytes | None], int], patience_s: float) -> None:
        self._bound = bound
        self._patience_s = patience_s
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Bytes, and as of when."""

    def counted(self, offers: Iterable[Incoming], asker: str) -> Mapping[bytes, int]:
        """Room, by namespace, that offers under way take from a new one of ``asker``: its own ones all of theirs."""
        offered: Counter[tuple[str, bytes]] = Counter()
        received: Counter[tuple[str, bytes]] = Counter()
        for offer in offers:
            which = (offer.account, offer.fingerprint)
            offered[which] += sum(meta.length_bytes for meta in offer.outstanding.values())
            received[which] += offer.received_bytes
        left: dict[str, int] = {}
        total: Counter[bytes] = Counter()
        for (account, fingerprint), size in offered.items():
            if account == asker:
                total[fingerprint] += size
                continue
            came = received[account, fingerprint]
            mine = left.get(account, self._bound(None) // SHARE)
            beyond = max(0, size - came)
            taken = min(beyond, mine, self._bound(fingerprint) // SHARE)
            left[account] = mine - taken
            total[fingerprint] += min(size, came) + taken
        return total

    def patience(self, account: str, now: float) -> float:
        """Seconds without a byte after which an offer of this node is given up."""
        debt, share = self._debt(account, now), max(1, self._bound(None) // SHARE)
        least = min(PATIENCE_S_MIN, self._patience_s)
        return max(least, self._patience_s * share / (share + debt))

    def broken(self, offer: Incoming, now: float) -> None:
        """An offer was waited for in vain."""
        missing = sum(meta.length_bytes for meta in offer.outstanding.values())
        self._debts[offer.account] = (self._debt(offer.account, now) + missing, now)
        self._debts.move_to_end(offer.account)
        if len(self._debts) > DEBTORS_MAX:
            self._debts.popitem(last=False)

    def came(self, account: str, length_bytes: int, now: float) -> None:
        """Offered parts have come."""
        debt = self._debt(account, now) - length_bytes
        if debt > 0:
            self._debts[account] = (debt, now)
        else:
            self._debts.pop(account, None)

    def _debt(self, account: str, now: float) -> float:
        debt, since = self._debts.get(account, (0.0, now))
        forgiven = max(0.0, now - since) / FORGIVEN_S * (self._bound(None) // SHARE)
        return max(0.0, debt - forgiven)
