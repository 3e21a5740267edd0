"""Whether a node takes new work: not while it drains, and not while its memory is nearly full.

What is under way goes on, and what ends something (closing, releasing, asking for the status) is always let through.
"""

from __future__ import annotations

from typing import Final

from wire.errors import FailureCode, RequestFailed
from wire.messages import AppendTokens, CreateSession, Fetch, Lookup, PublishOffer, RequestBody, SubmitJob

NEW_WORK: Final = (CreateSession, AppendTokens, SubmitJob, Lookup, Fetch, PublishOffer)
NEW_COMPUTE: Final = (CreateSession, SubmitJob)
"""What needs memory of the model's process."""


class Admission:
    """The gate in front of a node's machines."""

    def __init__(self) -> None:
        self._draining = ""
        self._memory = ""

    @property
    def draining(self) -> bool:
        return bool(self._draining)

    @property
    def accepting(self) -> bool:
        """Whether sessions and jobs are taken."""
        return not self._draining and not self._memory

    def drain(self, reason: str) -> None:
        """From now on, and for good, take nothing new."""
        self._draining = self._draining or reason

    def limit_memory(self, why: str) -> None:
        """Take no sessions and jobs while ``why`` is not empty."""
        self._memory = why

    def refusal(self, body: RequestBody) -> RequestFailed | None:
        """Why a request is not taken now; None when it is."""
        if self._draining and isinstance(body, NEW_WORK):
            return RequestFailed(FailureCode.UNAVAILABLE, f"this node is draining: {self._draining}")
        if self._memory and isinstance(body, NEW_COMPUTE):
            remedy = "try again later, or another node"
            return RequestFailed(FailureCode.RESOURCE_EXHAUSTED, self._memory, remedy=remedy)
        return None
