"""The connection of a client to its primary: it lives on a thread of its own, and whoever asks waits for the answer.

Every method may be called from any thread. An interrupt reaches the waiting caller at once, and the request it waited for is
cancelled on the primary.
"""

from __future__ import annotations

import contextlib
import queue
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.control_client import WRONG_PSK, ControlClient, Keys, OutgoingRequest
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from wire.errors import FailureCode, InvalidInput, KakeyaError, RemoteProtocolError, RequestFailed
from wire.keys import FleetKey
from wire.messages import ProgressBody, ReplyBody, RequestBody

ANSWER_GRACE_S: Final = 5.0
"""The connection itself ends a request at its deadline; only a stalled process needs this."""

_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True)
class Replied:
    body: ReplyBody


@dataclass(frozen=True, slots=True)
class Failed:
    error: RequestFailed


@dataclass(frozen=True, slots=True)
class Progressed:
    body: ProgressBody


Answer: TypeAlias = Replied | Failed | Progressed


class Call:
    """One request as seen by the waiting thread: answers come through a queue, in order."""

    def __init__(self, connection: Connection, body: RequestBody, timeout_s: float) -> None:
        self._connection = connection
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._request: OutgoingRequest | None = None
        self._cancelled = False
        self.deadline = time.monotonic() + timeout_s
        connection._calls.add(self)
        connection._reactor.post(lambda: self._start(body, timeout_s))
        if connection.closed:
            self.abandon()  # closed meanwhile: what was posted may never run

    def next(self, wait_s: float | None = None) -> Answer:
        """The next answer. An interrupt, or a wait that is too long, cancels the request.

        Raises:
            RequestFailed: DEADLINE_EXCEEDED after ``wait_s``, or some time after the request's own deadline.
        """
        remaining_s = max(self.deadline + ANSWER_GRACE_S - time.monotonic(), 0.0)
        try:
            return self._answers.get(timeout=remaining_s if wait_s is None else min(wait_s, remaining_s))
        except queue.Empty:
            self.cancel()
            raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, "the primary did not answer in time") from None
        except BaseException:
            self.cancel()
            raise

    def wait(self, reply_type: type[_Reply], on_progress: Callable[[ProgressBody], None] | None = None) -> _Reply:
        """The reply; ``on_progress`` is called on this thread.

        Raises:
            RequestFailed: the primary or the network answered something else than a result.
            RemoteProtocolError: the reply is of another kind.
        """
        while True:
            match self.next():
                case Replied(body=reply):
                    return expect(reply, reply_type)
                case Failed(error=error):
                    raise error
                case Progressed(body=progress):
                    if on_progress is not None:
                        try:
                            on_progress(progress)
                        except BaseException:
                            self.cancel()
                            raise

    def abandon(self) -> None:
        """Let the waiting thread go: the connection is closed for good."""
        self._answers.put(Failed(RequestFailed(FailureCode.UNAVAILABLE, "the client is closed")))

    def cancel(self) -> None:
        """Tell the primary to stop. Harmless when the request is over."""
        self._cancelled = True
        self._connection._reactor.post(self._cancel_request)

    def _cancel_request(self) -> None:
        if self._request is not None:
            self._request.cancel()

    def _start(self, body: RequestBody, timeout_s: float) -> None:
        if self._cancelled:
            return
        try:
            self._request = self._connection._control.request(
                body,
                timeout_s=timeout_s,
                on_reply=lambda reply: self._answers.put(Replied(reply)),
                on_failure=lambda code, message: self._answers.put(Failed(RequestFailed(code, message))),
                on_progress=lambda progress: self._answers.put(Progressed(progress)),
            )
        except KakeyaError as error:  # it could not even be sent; the waiting thread is who must know
            self._answers.put(Failed(RequestFailed(error.code, error.message, remedy=error.remedy)))


class Connection:
    """A connection to one primary.

    Args:
        address: of the primary.
        keys: the fleet's key, or its keys while they are rotated.
        local: who connects.
        timeout_s: how long the primary may take to answer the first time.

    Raises:
        RequestFailed: UNAVAILABLE, nothing answers in time; UNAUTHENTICATED, the PSK is not the primary's.
    """

    def __init__(self, address: Address, keys: FleetKey | Keys, local: LocalNode, timeout_s: float) -> None:
        self.closed = False
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        # None: connected; a line: why not.
        self._link: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reactor = Reactor()
        try:
            self._control = ControlClient(
                self._reactor,
                address=address,
                local=local,
                fleet_key=keys,
                on_up=lambda peer: self._link.put(None),
                on_down=self._link.put,
            )
            self._reactor.start_thread("kakeya-client")
            self._wait_until_connected(timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def peer(self) -> PeerInfo | None:
        """The primary, None while the connection is down."""
        return self._control.peer

    def open(self, body: RequestBody, timeout_s: float) -> Call:
        """Send a request; its answers are the call's.

        Raises:
            InvalidInput: the timeout is not above 0.
            RequestFailed: the client is closed.
        """
        if self.closed:
            raise RequestFailed(FailureCode.UNAVAILABLE, "the client is closed")
        if not timeout_s > 0:
            raise InvalidInput("a timeout must be above 0 s")
        return Call(self, body, timeout_s)

    def call(
        self,
        body: RequestBody,
        reply_type: type[_Reply],
        timeout_s: float,
        on_progress: Callable[[ProgressBody], None] | None = None,
    ) -> _Reply:
        """Ask, and wait for the reply; ``on_progress`` is called on this thread.

        Raises:
            InvalidInput: the timeout is not above 0.
            RequestFailed: the primary or the network answered something else than a result.
            RemoteProtocolError: the reply is of another kind.
        """
        return self.open(body, timeout_s).wait(reply_type, on_progress)

    def close(self) -> None:
        """Leave; open calls fail with UNAVAILABLE. Idempotent."""
        if self.closed:
            return
        self.closed = True
        control = getattr(self, "_control", None)
        if control is not None:
            with contextlib.suppress(RequestFailed):  # the loop is stalled; closing the reactor below reports it
                self._reactor.call(control.close, timeout_s=ANSWER_GRACE_S)
        self._reactor.close()
        for call in list(self._calls):
            call.abandon()  # one that is over already never looks at it

    def _wait_until_connected(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        line = "nothing answers at this address"
        while True:
            try:
                news = self._link.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise RequestFailed(FailureCode.UNAVAILABLE, line, remedy="is a node running there?") from None
            if news is None:
                return
            if news == WRONG_PSK:
                raise RequestFailed(FailureCode.UNAUTHENTICATED, news, remedy="use the PSK file of that fleet")
            line = news


def expect(reply: object, reply_type: type[_Reply]) -> _Reply:
    """``reply``, which must be of that type.

    Raises:
        RemoteProtocolError: it is not.
    """
    if not isinstance(reply, reply_type):
        raise RemoteProtocolError(f"the primary answered with {type(reply).__name__} instead of {reply_type.__name__}")
    return reply
