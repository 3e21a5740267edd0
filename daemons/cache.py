"""The cache peer: no model; an idle machine's memory holding KV for the fleet."""

from __future__ import annotations

from collections.abc import Callable

from daemons.node import Node
from daemons.node_keys import load_keys
from kakeya_zmq.config import Settings
from kakeya_zmq.io.reactor import Reactor


class Cache:
    """A :class:`daemons.run.Daemon`.

    Raises:
        KakeyaError: keys or addresses are not usable.
    """

    def __init__(self, reactor: Reactor, settings: Settings) -> None:
        self.node = Node(reactor, settings, load_keys(settings), roles=("cache",))

    def begin(self, ready: Callable[[dict[str, object]], None], fail: Callable[[BaseException], None]) -> None:
        self.node.open()
        ready({"address": str(self.node.address), "bus_port": self.node.endpoints.bus_port})

    def drain(self, reason: str) -> None:
        self.node.drain(reason)

    def drained(self) -> bool:
        return self.node.quiet

    def end(self, reason: str) -> None:
        self.node.close(reason)
