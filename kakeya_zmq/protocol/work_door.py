"""A worker's door: jobs come in sealed for holders of the tenant's key, and are answered with a proof of having it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from kakeya_zmq.protocol.effects import RequestArrived
from wire.errors import AuthenticationError, FailureCode, LocalProtocolError, RequestFailed
from wire.job_seal import JobBinding, JobKeys
from wire.messages import SubmitJob

NOT_SEALED_FOR_US: Final = "a job is refused: its prompt was not sealed with the tenant's key for this worker"


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as its asker meant it: what was under the seal, and what this worker answers to show that it could open it."""

    packed_tokens: bytes
    content_digest: bytes
    """What must be equal for a used job id to mean the same job; how the parts travel may differ."""
    proof: bytes


@dataclass(frozen=True, slots=True)
class JobDoor:
    """Opens what is submitted to one worker in one namespace.

    Args:
        keys: of the tenant the worker serves.
        fingerprint: the namespace, 32 bytes.
        own_key: identity key of this node, 32 bytes.
    """

    keys: JobKeys
    fingerprint: bytes
    own_key: bytes

    def open(self, request: RequestArrived, body: SubmitJob) -> Submission:
        """Open a submission.

        Raises:
            RequestFailed: FAILED_PRECONDITION for another fingerprint, UNAUTHENTICATED when the prompt does not open.
        """
        if body.fingerprint != self.fingerprint:
            raise RequestFailed(FailureCode.FAILED_PRECONDITION, "this worker serves another model or tenant")
        try:
            binding = JobBinding(body.fingerprint, body.job_id, request.identity_public_key, self.own_key)
            tokens = self.keys.open(binding, body.prompt)
        except (AuthenticationError, LocalProtocolError):
            raise RequestFailed(FailureCode.UNAUTHENTICATED, NOT_SEALED_FOR_US) from None
        content = hashlib.sha256(body.fingerprint + body.have_tokens.to_bytes(8, "little") + tokens).digest()
        return Submission(tokens, content, self.keys.proof(binding, body.prompt))
