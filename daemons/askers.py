"""Requests of other nodes that are open here, by the process that asked: a restarted node wants none of its old ones."""

from __future__ import annotations

from collections import defaultdict

from kakeya_zmq.io.control_server import IncomingRequest


class Askers:
    """Use it on the reactor's thread."""

    def __init__(self) -> None:
        self._open: defaultdict[str, list[IncomingRequest]] = defaultdict(list)

    def add(self, incoming: IncomingRequest) -> None:
        """A request that stays open for a while (finished ones are dropped when their node asks again)."""
        node_id = incoming.peer.node_id
        self._open[node_id] = [request for request in self._open[node_id] if not request.finished]
        if not incoming.finished:
            self._open[node_id].append(incoming)

    def end_older(self, node_id: str, incarnation: int) -> int:
        """End what earlier incarnations of a node asked for; how many requests that were.

        The server notices by the silence of their sessions, seconds later; until then they hold memory and queue places.
        """
        requests = self._open.pop(node_id, [])
        old = [request for request in requests if request.peer.incarnation < incarnation and not request.finished]
        young = [request for request in requests if request.peer.incarnation >= incarnation and not request.finished]
        if young:
            self._open[node_id] = young
        for request in old:
            if request.on_end is not None:
                request.on_end("the node that asked was restarted")
        return len(old)
