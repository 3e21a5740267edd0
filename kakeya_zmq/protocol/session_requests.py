"""The requests that members have open at a server; rules in kakeya_zmq.protocol.session.

Each one ends exactly once: by an answer of the host, or by a RequestEnded that tells the host why no answer is wanted any
more. An answer that comes after that is dropped, because the two can cross.
"""

from __future__ import annotations

from collections import Counter

from kakeya_zmq.protocol.limits import OverLimit
from kakeya_zmq.protocol.session_table import ServerSession, SessionTable
from kakeya_zmq.protocol.session_values import (
    Refused,
    RequestEnded,
    RequestOpened,
    RequestUpdated,
    ServerEffect,
    one_line,
)
from wire.errors import FailureCode, LocalProtocolError, RemoteProtocolError
from wire.messages import Failure, Progress, Reply, Request, Update


class SessionRequests:
    """See the module's text.

    Args:
        sessions: where requests are open.
        refusals: counts, by reason, what was refused.
    """

    def __init__(self, sessions: SessionTable, refusals: Counter[str]) -> None:
        self._sessions = sessions
        self._refusals = refusals

    def open(
        self, request: Request, size_bytes: int, session: ServerSession, now: float, effects: list[ServerEffect]
    ) -> None:
        """A peer asks.

        Raises:
            RemoteProtocolError: not under a new id.
        """
        request_id = request.request_id
        if request_id <= session.last_request_id:
            raise RemoteProtocolError("a request id that is not new")
        session.last_request_id = request_id
        deadline = now + request.deadline_ms / 1000
        over = self._sessions.open_request(session, request, size_bytes, now=now, deadline=deadline)
        if over is not None:
            self._decline(session, request_id, over, effects)
            return
        effects.append(RequestOpened(session.peer, request_id, request.body, deadline))

    def _decline(self, session: ServerSession, request_id: int, over: OverLimit, effects: list[ServerEffect]) -> None:
        """A request over a limit: the peer hears what it may do, we count it."""
        self._refusals[over.reason] += 1
        effects.append(Refused(over.reason, session.peer.node_id))
        failure = Failure(request_id=request_id, code=FailureCode.RESOURCE_EXHAUSTED, message=over.message)
        effects.append(session.seal(failure))

    def update(self, update: Update, session: ServerSession, effects: list[ServerEffect]) -> None:
        """A peer sends something to a request of its own."""
        if update.request_id in session.requests:
            effects.append(RequestUpdated(session.peer.session_id, update.request_id, update.body))

    def cancel(self, request_id: int, session: ServerSession, effects: list[ServerEffect]) -> None:
        """A peer wants no answer any more."""
        if request_id in session.requests:
            self._sessions.close_request(session, request_id)
            effects.append(RequestEnded(session.peer.session_id, request_id, "cancelled by the client"))

    def answer(
        self, session_id: bytes, request_id: int, envelope: Reply | Progress | Failure, effects: list[ServerEffect]
    ) -> None:
        """The host answers; after a Progress the request stays open."""
        session = self._sessions.find(session_id)
        if session is None or request_id not in session.requests:
            return
        try:
            effects.append(session.seal(envelope))
        except LocalProtocolError as error:
            # Our own answer is too large: the peer must hear something, and the host that it is over.
            self._refusals["an answer of ours does not fit a message"] += 1
            self._sessions.close_request(session, request_id)
            if isinstance(envelope, Progress):
                effects.append(RequestEnded(session_id, request_id, "an answer does not fit a message"))
            failure = Failure(request_id=request_id, code=FailureCode.INTERNAL, message=one_line(error.message))
            effects.append(session.seal(failure))
            return
        if not isinstance(envelope, Progress):
            self._sessions.close_request(session, request_id)

    def expire(self, session: ServerSession, request_id: int, now: float, effects: list[ServerEffect]) -> None:
        """The timer of a request is due, which may have ended before."""
        due, _ = session.requests.get(request_id, (now + 1, 0))
        if due > now:
            return
        self._sessions.close_request(session, request_id)
        effects.append(RequestEnded(session.peer.session_id, request_id, "deadline passed"))
        message = "the request was not finished within its deadline"
        failure = Failure(request_id=request_id, code=FailureCode.DEADLINE_EXCEEDED, message=message)
        effects.append(session.seal(failure))
