"""The requests that a control client has open, and how each of them ends; use all of it on the reactor's thread.

A request ends once: by a reply, by a failure, or by the host's own cancel, of which no callback tells. What comes for it
afterwards is late: it is counted, or ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol import session as machine
from wire.errors import FailureCode
from wire.messages import ProgressBody, ReplyBody, RequestBody, UpdateBody


class OutgoingRequest:
    """A request we sent. Exactly one of ``on_reply`` and ``on_failure`` is called, or none after :meth:`cancel`."""

    __slots__ = ("_on_failure", "_on_progress", "_on_reply", "_requests", "finished", "request_id")

    def __init__(
        self,
        requests: ClientRequests,
        request_id: int,
        on_reply: Callable[[ReplyBody], None],
        on_failure: Callable[[FailureCode, str], None],
        on_progress: Callable[[ProgressBody], None] | None,
    ) -> None:
        self.request_id = request_id
        self.finished = False
        self._on_reply = on_reply
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._requests = requests

    def update(self, body: UpdateBody) -> None:
        """Send the server something while the request is open; ignored afterwards (the answer may have crossed it)."""
        self._requests.update(self, body)

    def cancel(self) -> None:
        """Tell the server to stop; no callback follows. Idempotent."""
        self._requests.cancel(self)


class ClientRequests:
    """See the module's text.

    Args:
        counters: counts ``requests``, ``updates``, ``cancels``, ``answers`` and ``late_replies``.
        feed: hands an event to the client's machine.
        guarded: runs a callback of the host; it must not take the machine's remaining effects with it.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        counters: Counter[str],
        feed: Callable[[machine.ClientEvent], None],
        guarded: Callable[[Callable[[], None]], None],
    ) -> None:
        self._reactor = reactor
        self._counters = counters
        self._feed = feed
        self._guarded = guarded
        self._open: dict[int, OutgoingRequest] = {}
        self._starting: int | None = None
        """The request whose start() is on the stack, so that its failure is told later."""
        self._when_idle: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    # --- what the host does -----------------------------------------------------------------------------------------

    def add(
        self,
        request_id: int,
        on_reply: Callable[[ReplyBody], None],
        on_failure: Callable[[FailureCode, str], None],
        on_progress: Callable[[ProgressBody], None] | None,
    ) -> OutgoingRequest:
        """One more, of which the machine does not know yet."""
        request = self._open[request_id] = OutgoingRequest(self, request_id, on_reply, on_failure, on_progress)
        self._counters["requests"] += 1
        return request

    def start(self, request: OutgoingRequest, body: RequestBody, timeout_s: float) -> None:
        """Hand it to the machine; what that raises leaves nothing of it."""
        self._starting = request.request_id
        try:
            self._feed(machine.StartRequest(request.request_id, body, timeout_s))
        except Exception:
            self._open.pop(request.request_id, None)
            raise
        finally:
            self._starting = None

    def update(self, request: OutgoingRequest, body: UpdateBody) -> None:
        self._reactor.check_thread()
        if not request.finished:
            self._counters["updates"] += 1
            self._feed(machine.StartUpdate(request.request_id, body))

    def cancel(self, request: OutgoingRequest) -> None:
        self._reactor.check_thread()
        if not request.finished:
            request.finished = True
            self._open.pop(request.request_id, None)
            self._counters["cancels"] += 1
            self._feed(machine.StartCancel(request.request_id))
            self._check_idle()

    def call_when_idle(self, when_idle: Callable[[], None]) -> None:
        """Once, when the last of those that are open now and later has ended."""
        self._when_idle = when_idle

    # --- how they end -----------------------------------------------------------------------------------------------

    def replied(self, effect: machine.Replied) -> None:
        self._counters["answers"] += 1
        request = self._open.get(effect.request_id)
        if request is None:
            self._counters["late_replies"] += 1
        else:
            self._finish(request, lambda: request._on_reply(effect.body))

    def progressed(self, effect: machine.Progressed) -> None:
        self._counters["answers"] += 1
        request = self._open.get(effect.request_id)
        if request is not None and request._on_progress is not None:
            on_progress = request._on_progress
            self._guarded(lambda: on_progress(effect.body))

    def failed(self, effect: machine.Failed) -> None:
        request = self._open.get(effect.request_id)
        if request is None:
            self._counters["late_replies"] += 1
        elif effect.request_id == self._starting:
            self.fail_later(request, effect.code, effect.message)
        else:
            self._fail(request, effect.code, effect.message)

    def fail_later(self, request: OutgoingRequest, code: FailureCode, message: str) -> None:
        """Not from inside the call that made it."""
        self._reactor.post(lambda: self._fail(request, code, message))

    def fail_all(self, code: FailureCode, message: str) -> None:
        for request in list(self._open.values()):
            self._fail(request, code, message)

    def _fail(self, request: OutgoingRequest, code: FailureCode, message: str) -> None:
        self._finish(request, lambda: request._on_failure(code, message))

    def _finish(self, request: OutgoingRequest, tell: Callable[[], None]) -> None:
        if request.finished:
            return
        request.finished = True
        self._open.pop(request.request_id, None)
        self._guarded(tell)
        self._check_idle()

    def _check_idle(self) -> None:
        if self._when_idle is not None and not self._open:
            when_idle, self._when_idle = self._when_idle, None
            when_idle()
