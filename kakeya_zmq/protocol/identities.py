"""Which identity key belongs to which node id, and who is not admitted: bound on first sight or by the roster, for good.

Rules
- The first key seen for a node id is the only one accepted for it, here and in every later run (the host keeps the book in
  a file and hands it in again).
- The book is bounded. Of nodes and of clients (short-lived, with random ids) so many each are remembered; the one seen
  longest ago makes room, never one that is in use.
- Clients are not worth keeping over a restart.
- A revoked key is refused under every name; its name stays bound to it until it is forgotten.
- A roster (kakeya_zmq.roster), where there is one, has the first word: who is not on it gets no further.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

NODES_MAX: Final = 4096
CLIENTS_MAX: Final = 4096
CLIENT_ROLES: Final = ("client",)
OTHER_KEY: Final = "the node says hello with another identity key than before"
REVOKED: Final = "the identity key of the node is revoked"

Judge: TypeAlias = Callable[[str, bytes, Collection[str]], str]
"""(node id, key, roles) → why it is not admitted, or an empty text."""


class IdentityBook:
    """node id → identity key.

    Args:
        own: our own node id and key; never anybody else's.
        known: nodes of earlier runs, the one seen longest ago first.
        judge: the roster's word; everybody is admitted when None.
    """

    def __init__(
        self, own: tuple[str, bytes], known: Mapping[str, bytes] | None = None, *, judge: Judge | None = None
    ) -> None:
        self.judge = judge
        self._revoked: set[bytes] = set()
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
        """Whether :meth:`admit` lets the node in."""
        return not self.admit(node_id, public_key, roles, in_use)

    def admit(
        self,
        node_id: str,
        public_key: bytes,
        roles: Collection[str],
        in_use: Callable[[], Collection[str]] = tuple,
    ) -> str:
        """Why a node with this key is not let in (fixed text), or an empty text; a new one that is let in is remembered.

        Args:
            in_use: node ids that must not make room now.
        """
        refusal = self._refusal(node_id, public_key, roles)
        if refusal or node_id == self._own[0]:
            return refusal
        self._remember(node_id, public_key, roles, in_use)
        return ""

    def _refusal(self, node_id: str, public_key: bytes, roles: Collection[str]) -> str:
        if public_key in self._revoked:
            return REVOKED
        known = self.key_of(node_id)
        if node_id == self._own[0]:
            return "" if known == public_key else OTHER_KEY
        judged = self.judge(node_id, public_key, roles) if self.judge is not None else None
        if judged:
            return judged
        # What the roster says of a key stands above what was seen first.
        listed = judged is not None and tuple(roles) != CLIENT_ROLES
        return "" if listed or known is None or known == public_key else OTHER_KEY

    def _remember(
        self, node_id: str, public_key: bytes, roles: Collection[str], in_use: Callable[[], Collection[str]]
    ) -> None:
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

    def revoke(self, public_key: bytes) -> None:
        """Refuse this key from now on."""
        self._revoked.add(public_key)

    def is_revoked(self, public_key: bytes) -> bool:
        return public_key in self._revoked

    def holds(self, public_key: bytes) -> bool:
        """Whether a node, no mere client, is bound to this key and not revoked."""
        known = public_key == self._own[1] or public_key in self._nodes.values()
        return known and public_key not in self._revoked

    def forget(self, node_id: str) -> bool:
        """Let the next key that is seen for a node id be its key; whether there was one."""
        return (self._nodes.pop(node_id, None) or self._clients.pop(node_id, None)) is not None

    def take_new(self) -> tuple[str, ...]:
        """Nodes bound since the last call: to be written down and told."""
        new, self._new = self._new, []
        return tuple(new)

    def nodes(self) -> dict[str, bytes]:
        """All nodes but ourselves, the one seen longest ago first: what is kept over a restart."""
        return dict(self._nodes)
