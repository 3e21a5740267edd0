"""What machines ask of other nodes: sent, updated, cancelled, and its answer brought home.

Rules
- Every ask ends once: by a reply or a failure, which its machine is told, or because the machine cancels it.
- An ask that cannot be sent fails like any other, but later: its machine may cancel it before.
- A lookup that is cancelled is still awaited: its answer may hold a lease, which is given back then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from daemons.dispatch_sides import Machine
from kakeya_zmq.io.control_client import ControlClient, OutgoingRequest
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol import effects as fx
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.messages import Lookup, LookupReply, ProgressBody, ReleaseLease, ReplyBody

RELEASE_TIMEOUT_S: Final = 5.0
"""Nobody waits for it; a lease that is not given back ends by itself."""


class Asks:
    """The open asks of all machines.

    Args:
        find_client: the control connection to a node, or None when there is none that is up.
        feed: gives a machine an event.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        find_client: Callable[[NodeId], ControlClient | None],
        feed: Callable[[Machine, object], None],
    ) -> None:
        self._reactor = reactor
        self._find_client = find_client
        self._feed = feed
        self._asks: dict[fx.AskId, tuple[Machine, OutgoingRequest | None]] = {}
        """None in place of a request: it could not be sent, and its failure is on the way."""
        self._lookups: set[fx.AskId] = set()
        """Open lookups: an answer may come with a lease."""
        self._unwanted: set[fx.AskId] = set()
        """Lookups that were cancelled: their answers may be on the way."""

    def __len__(self) -> int:
        return len(self._asks)

    def carry_out(self, machine: Machine, effect: fx.Ask | fx.SendUpdate | fx.CancelAsk) -> None:
        """Send an ask, what is added to it, or that it is not wanted any more."""
        match effect:
            case fx.Ask(ask=ask, node_id=node_id, body=body, timeout_s=timeout_s):
                client = self._find_client(node_id)
                self._asks[ask] = (machine, None)
                if client is None:
                    self._fail(ask, FailureCode.UNAVAILABLE, f"{node_id} is not connected")
                    return
                try:
                    request = self._send(machine, client, ask, body, timeout_s)
                except Exception:
                    self._fail(ask, FailureCode.INTERNAL, "the request could not be sent")
                    raise
                self._asks[ask] = (machine, request)
                if isinstance(body, Lookup):
                    self._lookups.add(ask)
            case fx.SendUpdate(ask=ask, body=update):
                entry = self._asks.get(ask)
                if entry is not None and entry[1] is not None:
                    entry[1].update(update)
            case fx.CancelAsk(ask=ask) if ask in self._lookups:
                # The answer may be under way, and with it a lease that somebody has to give back: it is awaited.
                self._asks.pop(ask, None)
                self._unwanted.add(ask)
            case fx.CancelAsk(ask=ask):
                entry = self._asks.pop(ask, None)
                if entry is not None and entry[1] is not None:
                    entry[1].cancel()

    def _fail(self, ask: fx.AskId, code: FailureCode, message: str) -> None:
        """Tell the machine later that an ask has failed, unless it cancels it before."""

        def tell() -> None:
            entry = self._asks.pop(ask, None)
            if entry is not None:
                self._feed(entry[0], fx.AskFailed(ask, code, message))

        self._reactor.post(tell)

    def _send(self, machine: Machine, client: ControlClient, ask: fx.AskId, body: Any, timeout_s: float) -> OutgoingRequest:
        def replied(reply: ReplyBody) -> None:
            if self._ended(ask):
                self._feed(machine, fx.AskReplied(ask, reply))
            elif isinstance(reply, LookupReply) and any(reply.lease_id):
                release = ReleaseLease(lease_id=reply.lease_id)
                client.request(
                    release, timeout_s=RELEASE_TIMEOUT_S, on_reply=lambda _: None, on_failure=lambda code, message: None
                )

        def failed(code: FailureCode, message: str) -> None:
            if self._ended(ask):
                self._feed(machine, fx.AskFailed(ask, code, message))

        def progressed(progress: ProgressBody) -> None:
            self._feed(machine, fx.AskProgressed(ask, progress))

        return client.request(body, timeout_s=timeout_s, on_reply=replied, on_failure=failed, on_progress=progressed)

    def _ended(self, ask: fx.AskId) -> bool:
        """Forget an ask that was answered; whether its machine still wants to know."""
        self._asks.pop(ask, None)
        self._lookups.discard(ask)
        wanted = ask not in self._unwanted
        self._unwanted.discard(ask)
        return wanted
