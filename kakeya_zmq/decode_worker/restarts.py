"""When a lost child may be started again: at once, then later and later, then not for a while. Pure: times are passed in.

Two bounds: a child that never gets ready (a model that does not fit, say) is tried ``failed_starts_max`` times in a row; one
that serves and dies may be replaced ``losses_max`` times within ``window_s``. Beyond them the parent answers with a clear
error at once, and tries again only when ``cool_down_s`` have passed since the last loss.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Times in seconds."""

    failed_starts_max: int = 3
    losses_max: int = 6
    window_s: float = 600.0
    cool_down_s: float = 120.0
    backoff_first_s: float = 0.5
    backoff_max_s: float = 10.0


class RestartPolicy:
    """Counts losses; answers how long to wait."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._losses: deque[float] = deque()
        self._failed_starts = 0
        self.losses = 0
        """All there ever were."""

    def lost(self, now: float, *, was_ready: bool) -> None:
        """A child died or was killed; ``was_ready``: it had loaded its model."""
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        self._losses.append(now)
        self.losses += 1

    def ready(self) -> None:
        """A child has loaded its model."""
        self._failed_starts = 0

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next start; None when there must not be one now."""
        limits = self._limits
        while self._losses and self._losses[0] <= now - limits.window_s:
            self._losses.popleft()
        if not self._losses:
            return 0.0
        worn_out = self._failed_starts >= limits.failed_starts_max or len(self._losses) > limits.losses_max
        if worn_out:
            return 0.0 if now >= self._losses[-1] + limits.cool_down_s else None
        if len(self._losses) == 1 and not self._failed_starts:
            return 0.0
        backoff_s = min(limits.backoff_max_s, limits.backoff_first_s * 2.0 ** (len(self._losses) - 1))
        return min(backoff_s, max(0.0, self._losses[-1] + backoff_s - now))
