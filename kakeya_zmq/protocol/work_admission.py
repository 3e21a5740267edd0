"""Whether a worker takes what was submitted to it: opened, checked, and given room in the queue."""

from __future__ import annotations

from kakeya_zmq.engine import ModelFacts
from kakeya_zmq.protocol.effects import RequestArrived
from kakeya_zmq.protocol.work_door import JobDoor, Submission
from kakeya_zmq.protocol.work_job import Job, WorkSettings, check_submission, make_job
from kakeya_zmq.protocol.work_store import JobStore
from kakeya_zmq.protocol.work_table import JobTable
from wire.errors import FailureCode, RequestFailed
from wire.job_seal import JobKeys
from wire.messages import SubmitJob


class JobAdmission:
    """Admits to one worker.

    Args:
        facts: the loaded model's.
        tenant_key: key of the tenant this worker serves, 32 bytes: for the hash chain, and to open prompts.
        identity_public_key: this node's own, 32 bytes.
    """

    def __init__(
        self,
        *,
        facts: ModelFacts,
        tenant_key: bytes,
        identity_public_key: bytes,
        settings: WorkSettings,
        table: JobTable,
        store: JobStore,
    ) -> None:
        self._facts = facts
        self._tenant_key = tenant_key
        self._door = JobDoor(JobKeys(tenant_key), facts.compatibility.fingerprint(), identity_public_key)
        self._settings = settings
        self._table = table
        self._store = store
        self._job_number = 0
        self._stopping: str | None = None

    def stop(self, reason: str) -> None:
        """Take nothing from now on."""
        self._stopping = reason

    def admit(self, request: RequestArrived, body: SubmitJob, now: float) -> tuple[Job, Submission]:
        """A new job, or the one that exists under this id; and what was submitted.

        Raises:
            RequestFailed: it is refused.
        """
        if self._stopping is not None:
            raise RequestFailed(FailureCode.UNAVAILABLE, self._stopping)
        submission = self._door.open(request, body)
        tokens = check_submission(body, submission.packed_tokens, self._facts, self._settings)
        known = self._table.find_same(request, body, submission.content_digest, now)
        if known is not None:
            return known, submission
        self._job_number += 1
        job = make_job(
            request,
            body,
            submission,
            tokens,
            facts=self._facts,
            tenant_key=self._tenant_key,
            number=self._job_number,
            now=now,
        )
        self._store.check_size(job)
        return job, submission
