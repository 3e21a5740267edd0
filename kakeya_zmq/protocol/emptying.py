"""When a node gives up what it holds because a key was revoked: what that node gave may be among it, and wrong.

Rules (docs/decisions/0020)
- Soon after a revocation begins to count, everything goes; and once more when GRACE_S have passed since: a peer that heard
  of it later may have given some of it back meanwhile.
- Never twice within INTERVAL_S, whoever revokes whom: what cannot go at once goes when that has passed. One going serves
  every revocation before it, so each is served within INTERVAL_S, and again within GRACE_S + INTERVAL_S.
- Who starts holds nothing: revocations that it has kept empty nothing.
"""

from __future__ import annotations

from typing import Final

GRACE_S: Final = 60.0
"""Longer than news need to come everywhere (three intervals of gossip)."""
INTERVAL_S: Final = 60.0


class EmptyingPlan:
    """Pure; the clock is passed in, seconds, never going back."""

    def __init__(self) -> None:
        self._first_at: float | None = None
        """Of a revocation that was not served yet."""
        self._again_at: float | None = None
        """When the last one has been long enough ago."""
        self._last = float("-inf")

    def revoked(self, now: float) -> None:
        """A revocation counts from now on that did not before."""
        if self._first_at is None:
            self._first_at = now
        self._again_at = now + GRACE_S

    def deadline(self) -> float | None:
        """When to ask :meth:`due`; None without a revocation to serve."""
        times = [at for at in (self._first_at, self._again_at) if at is not None]
        return max(min(times), self._last + INTERVAL_S) if times else None

    def due(self, now: float) -> bool:
        """Whether everything has to go now; it counts as gone then."""
        at = self.deadline()
        if at is None or now < at:
            return False
        self._first_at = None
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
        self._last = now
        return True
