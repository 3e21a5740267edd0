"""When is something that is under way too slow: a projection of its end from what was observed, against the alternative.

Rules
 1. Before anything has come, the planner's estimate holds; once that is over, a thing that has been awaited for t seconds is
    expected to take t more. So a peer that stays silent is left when the alternative would already have won.
 2. Afterwards the mean rate since the first sign of life counts, and the time since the last progress, whichever is worse.
 3. It is left only after ``OBSERVE_MIN_S``, and only when what remains would take clearly longer than the alternative, by
    ``MARGIN`` and ``MARGIN_S``: the alternative is an estimate too, and leaving costs what is on the wire.

Pure values; the clock is the caller's, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wire.limits import NAME_CHARACTERS_MAX, TEXT_CHARACTERS_MAX
from wire.messages import Decision

OBSERVE_MIN_S = 1.0
"""Nobody misses what could be saved in less, and a busy processor is no slow peer."""
MARGIN = 0.25
MARGIN_S = 0.25
CHECK_EVERY_S = 0.5
"""The alternative gets cheaper while things arrive, so it is estimated anew this often."""
CHECK_AGAIN_S = 0.05


@dataclass(slots=True)
class Watch:
    """One transfer or job.

    ``total`` and ``done`` are in any unit that goes on evenly: bytes, tokens. A total of 0 is always done. ``expected_s`` is
    the planner's estimate from the start, ``work_s`` that part of it which is left once the other side has begun.
    """

    started: float
    expected_s: float
    total: float
    work_s: float = math.inf
    done: float = 0.0
    begun: float | None = None
    """When it began to be worked on, behind a queue or a handshake."""
    progressed: float = -math.inf

    def begin(self, now: float) -> None:
        """The other side has begun."""
        self.begun = now if self.begun is None else self.begun

    def advance_to(self, done: float, now: float) -> None:
        """So much is done in all; what goes back is ignored."""
        self.begin(now)
        if done > self.done:
            self.done = done
            self.progressed = now

    def remaining_s(self, now: float) -> float:
        """Projected time until it is finished."""
        if self.done >= self.total:
            return 0.0
        if self.done <= 0:
            expected_s, elapsed_s = self.expected_s, now - self.started
            if self.begun is not None:
                expected_s, elapsed_s = min(self.expected_s, self.work_s), now - self.begun
            return expected_s - elapsed_s if elapsed_s < expected_s else elapsed_s
        busy_s = max(1e-6, self.progressed - (self.started if self.begun is None else self.begun))
        return max((self.total - self.done) / self.done * busy_s, now - self.progressed)

    def observed(self, now: float) -> bool:
        """Whether it was watched for long enough to judge it."""
        return now - self.started >= OBSERVE_MIN_S


def is_too_slow(remaining_s: float, alternative_s: float) -> bool:
    """Whether the alternative would be finished clearly earlier."""
    return remaining_s > alternative_s * (1 + MARGIN) + MARGIN_S


def switch_decision(subject: str, remaining_s: float, alternative_name: str, alternative_s: float) -> Decision:
    """What an explanation says about leaving ``subject``."""
    stay_ms, leave_ms = remaining_s * 1000.0, alternative_s * 1000.0
    text = f"left {subject}: {stay_ms:.0f} ms more expected, against {leave_ms:.0f} ms to {alternative_name}"
    costs = {f"stay with {subject}"[:TEXT_CHARACTERS_MAX]: round(stay_ms, 3), alternative_name: round(leave_ms, 3)}
    chosen = alternative_name[:NAME_CHARACTERS_MAX]
    return Decision(what="switch", chosen=chosen, costs_ms=costs, text=text[:TEXT_CHARACTERS_MAX])
