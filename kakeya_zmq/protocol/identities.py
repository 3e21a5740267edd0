"""Which identity key belongs to which node id: bound on first sight, kept for good.

Rules
- The first key seen for a node id is the only one accepted for it, here and in every later run (the host keeps the book in
  a file and hands it in again).
- The book is bounded. Of nodes and of clients (short-lived, with random ids) so many each are remembered; the one seen
  longest ago makes room, never one that is in use.
- Clients are not worth keeping over a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Final

NODES_MAX: Final = 4096
CLIENTS_MAX: Final = 4096
CLIENT_ROLES: Final = ("client",)


class IdentityBook:
    """node id → identity key.

    Args:
        own: our own node id and key; never anybody else's.
        known: nodes of earlier runs, the one seen longest ago first.
    """

    def __init__(self, own: tuple[str, bytes], known: Mapping[str, bytes] | None = None) -> None:
        self._own = own
        self._nodes: OrderedDict[str, bytes] = OrderedDict(list((known or {}).items())[-NODES_MAX:])
        self._nodes.pop(own[0], None)
        self._clients: OrderedDict[str, bytes] = OrderedDict()
        self._new: list[str] = []

    def key_of(self, node_id: str) -> bytes | None:
        """The key that is bound to a node id, or None."""
        if node_id == self._own[0]:
            return self._own[1]
        return self._nodes.get(node_id) or self._clients.get(node_id)

    def bind(
        self,
        node_id: str,
        public_key: bytes,
        roles: Collection[str],
        in_use: Callable[[], Collection[str]] = tuple,
    ) -> bool:
        """Whether the node has this key, as far as we know; a new node is remembered.

        Args:
            in_use: node ids that must not make room now.
        """
        known = self.key_of(node_id)
        if known is not None and known != public_key:
            return False
        if node_id == self._own[0]:
            return True
        is_client = tuple(roles) == CLIENT_ROLES and node_id not in self._nodes
        table, most = (self._clients, CLIENTS_MAX) if is_client else (self._nodes, NODES_MAX)
        if not is_client:
            self._clients.pop(node_id, None)
        if node_id not in table:
            if len(table) >= most:
                kept = in_use()
                victim = next((each for each in table if each not in kept), None)
                if victim is not None:
                    del table[victim]
            if not is_client:
                self._new = [*self._new[-NODES_MAX:], node_id]
        table[node_id] = public_key
        table.move_to_end(node_id)
        return True

    def take_new(self) -> tuple[str, ...]:
        """Nodes bound since the last call: to be written down and told."""
        new, self._new = self._new, []
        return tuple(new)

    def nodes(self) -> dict[str, bytes]:
        """All nodes but ourselves, the one seen longest ago first: what is kept over a restart."""
        return dict(self._nodes)
