"""What the store of a worker is to its jobs: where a prefix comes from, where room is reserved, where new KV goes."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya_zmq.blocks import Part, needed_parts
from kakeya_zmq.coverage import best_boundary
from kakeya_zmq.engine import ModelFacts
from kakeya_zmq.protocol.effects import Count, Effect
from kakeya_zmq.protocol.work_job import Job, parts_bytes
from kakeya_zmq.store import BlockStore
from wire.errors import CapacityError, FailureCode, InvalidInput, RequestFailed
from wire.messages import PartRef


class JobStore:
    """The block store in the one namespace that a worker serves.

    Args:
        facts: the loaded model's.
        store: the node's.
    """

    def __init__(self, facts: ModelFacts, store: BlockStore) -> None:
        self._facts = facts
        self._fingerprint = facts.compatibility.fingerprint()
        self._store = store
        self._has = store.presence(self._fingerprint)

    def check_size(self, job: Job) -> None:
        """A prompt whose KV can never fit is refused at once.

        Raises:
            RequestFailed: RESOURCE_EXHAUSTED.
        """
        needed_bytes = parts_bytes(self._facts, job.chain, job.needed)
        if needed_bytes > self._store.max_bytes:
            text = f"the prompt's KV needs {needed_bytes} bytes and this worker's cache holds {self._store.max_bytes}"
            raise RequestFailed(FailureCode.RESOURCE_EXHAUSTED, text)

    def prefix_of(self, job: Job) -> int:
        """Tokens of the job's longest prefix that can be built from what is held."""
        return best_boundary(job.chain, self._facts.requirement, self._has)

    def holds_all(self, job: Job) -> bool:
        """Whether a hit at the job's last position needs nothing that is not held."""
        return all(map(self._has, job.needed))

    def take_prefix(self, job: Job, position: int, now: float) -> list[Part]:
        """The parts that a hit at ``position`` needs, marked as used."""
        return self._take(needed_parts(job.chain, position, self._facts.requirement), now)

    def take_all(self, job: Job, now: float) -> list[Part]:
        """The parts that a hit at the job's last position needs, marked as used."""
        return self._take(job.needed, now)

    def reserve(self, job: Job, now: float) -> None:
        """Reserve room for what a hit at the job's last position needs and is not held.

        Raises:
            CapacityError: there is none.
        """
        lacking_bytes = parts_bytes(self._facts, job.chain, (ref for ref in job.needed if not self._has(ref)))
        if lacking_bytes > 0:
            self._store.reserve(job.reservation_id, lacking_bytes, now, node=job.account)

    def release(self, job: Job) -> None:
        """Give back what is left of the room that was reserved."""
        self._store.release_reservation(job.reservation_id)

    def keep(self, job: Job, parts: Sequence[Part], now: float) -> list[Effect]:
        """Store what was computed. Room was reserved for what a hit needs; the rest takes what it can get."""
        failures = 0
        needed = frozenset(job.needed)
        for part in parts:
            reservation_id = job.reservation_id if part.meta.ref in needed else None
            try:
                self._store.put(part, fingerprint=self._fingerprint, now=now, reservation_id=reservation_id)
            except (CapacityError, InvalidInput):
                # No room, or somebody published nonsense under this hash. The asker still gets the part over the lane;
                # only later reuse from this worker is lost.
                failures += 1
        return [Count("put_failures", failures)] if failures else []

    def drop_prefix(self, job: Job, position: int) -> None:
        """Drop what a hit at ``position`` needs: it turned out bad."""
        for ref in needed_parts(job.chain, position, self._facts.requirement):
            self._store.invalidate(ref, fingerprint=self._fingerprint)

    def _take(self, refs: Sequence[PartRef], now: float) -> list[Part]:
        held = [part for ref in refs if (part := self._store.get(ref, fingerprint=self._fingerprint)) is not None]
        self._store.touch(refs, now, fingerprint=self._fingerprint)
        return held
