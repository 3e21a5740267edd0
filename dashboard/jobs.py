"""Prefill jobs as the bus tells them: those that go on, and the last ones that ended.

The bus may lose a job's last message. A job is therefore also ended, with a reason, when its node restarts or is gone, when
its node says that it has no jobs while this one has been silent, or when it has been silent for very long.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import msgspec

from wire.events import JobEvent, WorkerView

FINAL_STATES: Final = frozenset(("completed", "failed", "cancelled"))
LOST: Final = "lost"
"""State given to a job whose end was not heard."""
ACTIVE_MAX: Final = 1024
ENDED_MAX: Final = 256
IDLE_SILENCE_S: Final = 10.0
"""A job silent for this long is over when its node says that it has none."""
SILENCE_S: Final = 900.0
"""A job silent for this long is over in any case."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job. Times are seconds on the owner's clock; ``number`` grows with every change of any job.

    ``event`` is the last one heard, with the highest progress so far; its state may also be :data:`LOST`.
    """

    number: int
    node_id: str
    incarnation: int
    event: JobEvent
    first_heard_at: float
    changed_at: float
    ended: bool

    @property
    def key(self) -> tuple[str, int, str]:
        return (self.node_id, self.incarnation, self.event.job_id)


class JobBoard:
    """Jobs of all nodes, bounded."""

    def __init__(self, *, active_max: int = ACTIVE_MAX, ended_max: int = ENDED_MAX) -> None:
        self.changes = 0
        """Grows with every change of any job."""
        self._active_max = active_max
        self._ended_max = ended_max
        self._active: OrderedDict[tuple[str, int, str], JobEntry] = OrderedDict()
        self._ended: OrderedDict[tuple[str, int, str], JobEntry] = OrderedDict()

    def on(self, node_id: str, incarnation: int, event: JobEvent, now: float) -> bool:
        """Take note of one event; whether it said anything new."""
        key = (node_id, incarnation, event.job_id)
        ended = self._ended.get(key)
        if ended is not None and ended.event.state != LOST:
            return False  # a late joiner made the node tell its jobs again
        known = self._active.get(key) or ended
        if known is not None:
            if known.event == event:
                return False
            if event.tokens_done < known.event.tokens_done:
                event = msgspec.structs.replace(event, tokens_done=known.event.tokens_done)
        self._ended.pop(key, None)
        self.changes += 1
        first = known.first_heard_at if known is not None else now
        final = event.state in FINAL_STATES
        self._put(JobEntry(self.changes, node_id, incarnation, event, first, now, final))
        return True

    def node_restarted(self, node_id: str, incarnation: int, now: float) -> None:
        """Jobs of the node's earlier incarnations are over."""
        for entry in [e for e in self._active.values() if e.node_id == node_id and e.incarnation < incarnation]:
            self._lose(entry, "its node restarted", now)

    def node_gone(self, node_id: str, now: float) -> None:
        for entry in [e for e in self._active.values() if e.node_id == node_id]:
            self._lose(entry, "its node is gone", now)

    def worker_told(self, node_id: str, worker: WorkerView | None, now: float) -> None:
        """A snapshot says how many jobs its worker has."""
        if worker is None or worker.inflight_jobs or worker.queued_jobs:
            return
        for entry in list(self._active.values()):
            silent = now - entry.changed_at > IDLE_SILENCE_S
            if silent and entry.node_id == node_id and entry.event.place == "worker":
                self._lose(entry, "its end was not heard", now)

    def on_tick(self, now: float) -> None:
        for entry in [e for e in self._active.values() if now - e.changed_at > SILENCE_S]:
            self._lose(entry, "its end was not heard", now)

    @property
    def active_count(self) -> int:
        return len(self._active)

    def active(self) -> list[JobEntry]:
        """Those that go on: the ones that compute before those that wait, of each the oldest first."""
        return sorted(self._active.values(), key=lambda e: (e.event.state == "queued", e.first_heard_at, e.key))

    def ended(self) -> list[JobEntry]:
        """The last ones that ended, the newest first."""
        return list(reversed(self._ended.values()))

    def _put(self, entry: JobEntry) -> None:
        if not entry.ended:
            self._active[entry.key] = entry
            if len(self._active) > self._active_max:
                self._lose(next(iter(self._active.values())), "too many jobs to follow", entry.changed_at)
            return
        self._active.pop(entry.key, None)
        self._ended[entry.key] = entry
        if len(self._ended) > self._ended_max:
            self._ended.popitem(last=False)

    def _lose(self, entry: JobEntry, reason: str, now: float) -> None:
        self.changes += 1
        event = msgspec.structs.replace(entry.event, state=LOST, reason=reason)
        self._put(JobEntry(self.changes, entry.node_id, entry.incarnation, event, entry.first_heard_at, now, True))
