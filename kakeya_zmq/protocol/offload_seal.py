"""A prefill job as it is sent: sealed for one worker, and what that one has to answer before anything of it is used."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kakeya_zmq.protocol.prepare_values import PreparationTask, WorkerView
from wire.job_seal import PREFIX_BYTES, JobBinding
from wire.messages import JobAccepted

JOB_ID_BYTES: Final = 16
PROVE_WITHIN_S: Final = 10.0
"""For the first word of a worker, which waits for nothing: a node that is paused or gone is noticed before."""
NEWCOMER_PROVES_WITHIN_S: Final = 1.0
"""The same of one that has never proven itself here."""
NEWCOMER_PROVES_WITHIN_MAX_S: Final = 3.0
"""However long its round trip is, which it can make look longer than it is."""
QUICK_S: Final = 0.25
"""A worker's word takes no computing: what it may cost besides round trips."""
ROUND_TRIPS: Final = 4
"""A word may have to be sent again by the network."""
COST_TIME: Final = "took long and did not take the job"
UNANSWERED: Final = "did not answer whether it takes the job"
WITHOUT_PROOF: Final = "a worker did not prove that it has the tenant's key"
COULD_NOT_OPEN: Final = "a worker could not open a prompt that was sealed with the tenant's key"


def quick_s(worker: WorkerView) -> float:
    """Within what time a worker says a word, wherever it is."""
    return min(NEWCOMER_PROVES_WITHIN_MAX_S, QUICK_S + ROUND_TRIPS * worker.round_trip_ms / 1000.0)


def newcomer_proves_within_s(worker: WorkerView) -> float:
    """How long one that has never proven itself here is waited for."""
    return max(NEWCOMER_PROVES_WITHIN_S, quick_s(worker))


@dataclass(slots=True)
class SealedJob:
    """One job for one worker."""

    job_id: bytes
    prompt: bytes = field(repr=False)
    """Sealed."""
    proof: bytes = field(repr=False)
    """What a holder of the tenant's key answers."""
    proven: bool = False
    """It has answered so."""

    def vouched(self, body: object) -> bool:
        """Whether what the worker says counts: it has shown that it has the tenant's key, by this or before."""
        if isinstance(body, JobAccepted):
            self.proven = hmac.compare_digest(body.proof, self.proof)
        return self.proven


def seal_job(task: PreparationTask, worker: WorkerView, random_bytes: Callable[[int], bytes]) -> SealedJob:
    """The task's prompt under the seal of a new job."""
    keys = task.job_keys
    assert keys is not None, "a task with workers has them"
    job_id, prefix = random_bytes(JOB_ID_BYTES), random_bytes(PREFIX_BYTES)
    binding = JobBinding(task.fingerprint, job_id, task.identity_public_key, worker.identity_public_key)
    prompt = keys.seal(binding, prefix, task.tokens.astype("<i4", copy=False).tobytes())
    return SealedJob(job_id, prompt, keys.proof(binding, prompt))
