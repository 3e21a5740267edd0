"""Nodes that are left alone for a while, after a failure that would only repeat itself; pure, the clock is the caller's.

A closed port or a model whose KV no codec can store does not mend itself within a prompt. So the node is passed over for a
pause that doubles with every further failure, up to a bound; a success, or the node's leaving the fleet, forgets all of it.

Whoever has never proven that it is a worker of the tenant's is a newcomer. Names cost nothing, so a pause for each does not
bound what many of them cost together: after one that has cost time no newcomer is tried for NEWCOMERS_PAUSE_S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from wire.ids import NodeId

PAUSE_FIRST_S = 10.0
PAUSE_MAX_S = 300.0
NEWCOMERS_PAUSE_S = 10.0
NODES_MAX = 1024
"""Nodes remembered; the oldest failure is forgotten first. As many proofs."""


class Trouble(Enum):
    """What a node is left alone for."""

    BULK_PORT = "bulk port"
    """Its bulk port could not be reached: neither fetches nor jobs bring anything."""
    FETCH = "fetch"
    """Nothing came of a fetch in time, or what came could not be used."""
    JOB = "job"
    """It cannot do this model's jobs."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    length_s: float
    why: str


@dataclass(slots=True)
class Backoff:
    """The pauses of one primary. ``why`` is a clause without addresses: it is shown to users."""

    _pauses: dict[tuple[NodeId, Trouble], _Pause] = field(default_factory=dict)
    _proven: dict[bytes, None] = field(default_factory=dict)
    """Identity keys, the one that proved itself longest ago first."""
    _newcomers_until: float = -math.inf

    def failed(self, node_id: NodeId, trouble: Trouble, why: str, now: float) -> None:
        """Begin a pause, twice as long as the one before it."""
        before = self._pauses.pop((node_id, trouble), None)
        if before is not None and now < before.until:
            self._pauses[node_id, trouble] = before  # prompts that ran side by side tell of one failure
            return
        length_s = PAUSE_FIRST_S if before is None else min(PAUSE_MAX_S, 2 * before.length_s)
        self._pauses[node_id, trouble] = _Pause(now + length_s, length_s, why)
        while len(self._pauses) > NODES_MAX:
            del self._pauses[next(iter(self._pauses))]

    def succeeded(self, node_id: NodeId, trouble: Trouble) -> None:
        """It works again."""
        self._pauses.pop((node_id, trouble), None)

    def forget(self, node_id: NodeId) -> None:
        """It left the fleet."""
        for trouble in Trouble:
            self.succeeded(node_id, trouble)

    def left_alone(self, node_id: NodeId, now: float, *troubles: Trouble) -> str:
        """Why a node is not asked now, and for how long; empty when it may be."""
        for trouble in troubles:
            pause = self._pauses.get((node_id, trouble))
            if pause is not None and now < pause.until:
                return f"left alone for {pause.until - now:.0f} s more: {pause.why}"
        return ""

    def proved(self, identity_public_key: bytes) -> None:
        """A worker has shown that it has the tenant's key: it is no newcomer any more, and others may be tried, too."""
        self._proven.pop(identity_public_key, None)
        self._proven[identity_public_key] = None
        if len(self._proven) > NODES_MAX:
            del self._proven[next(iter(self._proven))]
        self._newcomers_until = -math.inf

    def is_newcomer(self, identity_public_key: bytes) -> bool:
        """Whether the node with this key has never shown that it has the tenant's key."""
        return identity_public_key not in self._proven

    def newcomer_cost_time(self, now: float) -> None:
        """A newcomer was waited for in vain."""
        self._newcomers_until = now + NEWCOMERS_PAUSE_S

    def newcomers_left_alone_s(self, now: float) -> float:
        """For how long no newcomer is to be tried; 0 when one may be."""
        return max(0.0, self._newcomers_until - now)
