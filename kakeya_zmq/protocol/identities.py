"""Which identity key belongs to which node id, and who is not admitted: bound on first sight or by the roster, for good.

Rules
- The first key seen for a node id is the only one accepted for it, here and in every later run (the host keeps the book in
  a file and hands it in again), until the administrator forgets it.
- The book is bounded, and nobody can make it forget a node: when it is full, newcomers are refused. So that nobody can fill
  it either, newcomers of a run are charged to an *account*: of the node whose exchange told their cards; of all strangers
  together when they said hello by themselves. What a newcomer tells is charged to the account the newcomer is charged to,
  so that names made up to tell further names are worth nothing. Accounts of their own have the nodes of earlier runs, and
  those this node was configured to dial.
- Of clients (short-lived, with random ids) so many are remembered; the one seen longest ago makes room, never one that is
  in use. They are not worth keeping over a restart.
- A revoked key is refused under every name; its name stays bound to it until it is forgotten.
- A roster (kakeya_zmq.roster), where there is one, has the first word: who is not on it gets no further, and who is on it
  is always remembered.
- A key that was forgotten does not come back by cards, which others may relay for a while: its node has to say hello.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

NODES_MAX: Final = 4096
ACCOUNT_MAX: Final = 384
"""Newcomers of one account in one run: one node may introduce a large fleet to another, and two accounts (a member's own and
the strangers', which it can use, too) do not fill the table of live cards (directory_values.NODES_MAX)."""
CLIENTS_MAX: Final = 4096
CLIENT_ROLES: Final = ("client",)
OTHER_KEY: Final = "the node says hello with another identity key than before"
REVOKED: Final = "the identity key of the node is revoked"
FULL: Final = "too many nodes are known for a new one"
TOO_MANY_NEW: Final = "too many new nodes came by the same way"
FORGOTTEN: Final = "the key of the node was forgotten by the administrator"
_STRANGERS: Final = ""
"""The account of newcomers that came by themselves, and of what these told."""

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
        self._names = Counter(self._nodes.values())
        """Under how many names each key is known."""
        self._clients: OrderedDict[str, bytes] = OrderedDict()
        self._accounts: dict[str, str] = {}
        """Newcomers of this run: node id → the account it is charged to."""
        self._charged: Counter[str] = Counter()
        self._forgotten: OrderedDict[str, bytes] = OrderedDict()
        self._new: list[str] = []

    def key_of(self, node_id: str) -> bytes | None:
        """The key that is bound to a node id, or None."""
        if node_id == self._own[0]:
            return self._own[1]
        return self._nodes.get(node_id) or self._clients.get(node_id)

    def names_of(self, public_key: bytes) -> tuple[str, ...]:
        """The names of nodes, no mere clients, that are bound to a key."""
        own = (self._own[0],) if public_key == self._own[1] else ()
        if public_key not in self._names:
            return own
        return (*own, *(node_id for node_id, key in self._nodes.items() if key == public_key))

    def is_own(self, public_key: bytes) -> bool:
        """Whether it is the key of the node itself."""
        return public_key == self._own[1]

    def knows(self, public_key: bytes) -> bool:
        """Whether a node, no mere client, is bound to this key, revoked or not."""
        return public_key == self._own[1] or public_key in self._names

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
        *,
        told_by: str | None = None,
        dialled: bool = False,
    ) -> str:
        """Why a node with this key is not let in (fixed text), or an empty text; a new one that is let in is remembered.

        Args:
            in_use: node ids of clients that must not make room now.
            told_by: who told its card (empty: it is not known); None: the node itself proved that it has the key.
            dialled: this node called it, at an address that it has from its administrator or from a card.
        """
        refusal = self._refusal(node_id, public_key, roles, told_by)
        if refusal or node_id == self._own[0]:
            return refusal
        if tuple(roles) == CLIENT_ROLES and node_id not in self._nodes:
            self._remember_client(node_id, public_key, in_use)
            return ""
        if node_id not in self._nodes:
            account = node_id if dialled else self._account(told_by)
            if refusal := self._make_room(account, node_id, public_key, roles):
                return refusal
            self._clients.pop(node_id, None)
            self._new = [*self._new[-NODES_MAX:], node_id]
        self._set(node_id, public_key)
        return ""

    def _refusal(self, node_id: str, public_key: bytes, roles: Collection[str], told_by: str | None) -> str:
        if public_key in self._revoked:
            return REVOKED
        known = self.key_of(node_id)
        if node_id == self._own[0]:
            return "" if known == public_key else OTHER_KEY
        if judged := self.judge(node_id, public_key, roles) if self.judge is not None else "":
            return judged
        if told_by is not None and self._forgotten.get(node_id) == public_key:
            return FORGOTTEN
        # What the roster says of a key stands above what was seen first.
        return "" if self._is_listed(roles) or known is None or known == public_key else OTHER_KEY

    def _is_listed(self, roles: Collection[str]) -> bool:
        """Of a node that was not refused: whether a roster has let it in."""
        return self.judge is not None and tuple(roles) != CLIENT_ROLES

    def _account(self, told_by: str | None) -> str:
        if told_by is None or told_by not in self._nodes:
            return _STRANGERS
        return self._accounts.get(told_by, told_by)

    def _make_room(self, account: str, node_id: str, public_key: bytes, roles: Collection[str]) -> str:
        """Why there is none for a new node, or an empty text; it is charged to the account then."""
        if self._is_listed(roles):
            if len(self._nodes) >= NODES_MAX:
                judge = self.judge
                assert judge is not None
                unlisted = next((each for each, key in self._nodes.items() if judge(each, key, ())), None)
                if unlisted is not None:
                    self._drop(unlisted)
            return ""
        if len(self._nodes) >= NODES_MAX:
            return FULL
        if self._charged[account] >= ACCOUNT_MAX:
            return TOO_MANY_NEW
        self._accounts[node_id] = account
        self._charged[account] += 1
        return ""

    def _set(self, node_id: str, public_key: bytes) -> None:
        before = self._nodes.get(node_id)
        if before != public_key:
            if before is not None:
                self._unname(before)
            self._names[public_key] += 1
            self._nodes[node_id] = public_key
            self._forgotten.pop(node_id, None)
        self._nodes.move_to_end(node_id)

    def _remember_client(self, node_id: str, public_key: bytes, in_use: Callable[[], Collection[str]]) -> None:
        if node_id not in self._clients and len(self._clients) >= CLIENTS_MAX:
            kept = in_use()
            victim = next((each for each in self._clients if each not in kept), None)
            if victim is not None:
                del self._clients[victim]
        self._clients[node_id] = public_key
        self._clients.move_to_end(node_id)

    def revoke(self, public_key: bytes) -> None:
        """Refuse this key from now on."""
        self._revoked.add(public_key)

    def reinstate(self, public_key: bytes) -> None:
        """Refuse this key no more: its revocation does not count any longer."""
        self._revoked.discard(public_key)

    def is_revoked(self, public_key: bytes) -> bool:
        return public_key in self._revoked

    def forget(self, node_id: str) -> bool:
        """Let the next key that is seen for a node id be its key; whether there was one."""
        if self._clients.pop(node_id, None) is not None:
            return True
        key = self._nodes.get(node_id)
        if key is None:
            return False
        self._drop(node_id)
        self._forgotten[node_id] = key
        if len(self._forgotten) > NODES_MAX:
            self._forgotten.popitem(last=False)
        return True

    def _drop(self, node_id: str) -> None:
        self._unname(self._nodes.pop(node_id))
        account = self._accounts.pop(node_id, None)
        if account is not None:
            self._charged[account] -= 1

    def _unname(self, public_key: bytes) -> None:
        self._names[public_key] -= 1
        if not self._names[public_key]:
            del self._names[public_key]

    def take_new(self) -> tuple[str, ...]:
        """Nodes bound since the last call: to be written down and told."""
        new, self._new = self._new, []
        return tuple(new)

    def nodes(self) -> dict[str, bytes]:
        """All nodes but ourselves, the one seen longest ago first: what is kept over a restart."""
        return dict(self._nodes)
