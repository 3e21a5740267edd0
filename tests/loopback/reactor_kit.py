"""Helpers for tests that drive a real reactor from their own thread: run it until something holds, and be a node."""

from __future__ import annotations

import time
from collections.abc import Callable

from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.session import LocalNode
from wire.keys import NodeIdentity

WAIT_S = 20.0


def run_until(reactor: Reactor, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Run the reactor until ``condition()`` holds; it is asked after every turn."""
    given_up_at = time.monotonic() + timeout_s

    def check() -> None:
        if condition() or time.monotonic() > given_up_at:
            reactor.stop()
        else:
            reactor.call_later(0.002, check)

    check()
    reactor.run()
    assert condition()


def node(name: str, incarnation: int = 1) -> LocalNode:
    """A node with an identity of its own."""
    return LocalNode(
        node_id=name, identity=NodeIdentity.generate(), roles=("test",), incarnation=incarnation, software="test"
    )
