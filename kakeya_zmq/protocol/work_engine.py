"""The engine as the jobs of a worker use it: one engine session at a time, and the commands of the job that has it.

The runner keeps the commands of one engine session in order, so a session is closed by a command that comes after the
cancelled one, and the next job begins when that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya_zmq.blocks import Part, raw_part
from kakeya_zmq.engine import CloseSession, ImportPrefix, OpenSession, Prefill
from kakeya_zmq.protocol.effects import Effect, RunCommand, Ticket
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.protocol.work_job import Job, JobPhase


class JobEngine:
    """See the module's text.

    Args:
        ids: numbers for tickets, shared by all machines of the process.
    """

    def __init__(self, ids: IdAllocator) -> None:
        self._ids = ids
        self._closing: Ticket | None = None
        """The CloseSession of the job that ran last, until it has ended."""

    @property
    def closing(self) -> bool:
        """Whether the engine session of the last job is still there."""
        return self._closing is not None

    def open(self, job: Job) -> list[Effect]:
        """Give the job an engine session."""
        job.session_open = True
        return [RunCommand(self._ids.ticket(), OpenSession(job.engine_session))]

    def import_prefix(self, job: Job, position: int, held: Sequence[Part]) -> list[Effect]:
        """Begin to import the parts of the job's prefix up to ``position``."""
        parts = sorted((raw_part(part) for part in held), key=lambda part: (part.start, part.kind))
        job.ticket = self._ids.ticket()
        return [RunCommand(job.ticket, ImportPrefix(job.engine_session, position, tuple(parts)))]

    def compute(self, job: Job, now: float) -> list[Effect]:
        """Begin to compute what lies behind the job's position."""
        job.phase = JobPhase.COMPUTING
        job.compute_started = now
        job.ticket = self._ids.ticket()
        remaining = job.tokens[job.position : job.target]
        return [RunCommand(job.ticket, Prefill(job.engine_session, remaining, capture=True))]

    def close(self, job: Job) -> list[Effect]:
        """Take the engine session from the job, if it has one."""
        if not job.session_open:
            return []
        job.session_open = False
        self._closing = self._ids.ticket()
        return [RunCommand(self._closing, CloseSession(job.engine_session))]

    def has_closed(self, ticket: Ticket) -> bool:
        """Whether it was the closing of an engine session that has ended: the engine is free then."""
        if ticket != self._closing:
            return False
        self._closing = None
        return True
