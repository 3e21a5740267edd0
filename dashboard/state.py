"""What the dashboard keeps: registrations, groups, reported tokens, and the sums of the nodes' counters.

Every method is one transaction. Wall-clock seconds since the epoch are passed in as ``now``. Errors that are the caller's
are :class:`StateError`; benchmarks are kept by :mod:`dashboard.benchmark_store` in the same database.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dashboard import pairing
from dashboard.database import Database
from dashboard.ledger import NODES_MAX as LEDGER_NODES_MAX
from dashboard.ledger import LedgerRow
from wire.errors import InvalidInput

REGISTRATIONS_MAX: Final = 2_000
GROUPS_MAX: Final = 500
TOKEN_NODES_MAX: Final = 10_000
TOKENS_MAX: Final = 2**62
"""Largest sum of tokens: SQLite's integers are signed 64-bit."""
ROLES: Final = ("head", "cache", "hybrid", "inference")
DEFAULT_REGION: Final = "Private"


class StateError(InvalidInput):
    """The request cannot be carried out in the present state: the caller's mistake."""


class NotThere(StateError):
    """What the request names does not exist (any more)."""


class Conflict(StateError):
    """What the request wants contradicts what is bound already."""


@dataclass(frozen=True, slots=True)
class Registration:
    """``status``: pending (its token can be redeemed until ``expires_at``) or paired (bound to a node and its key)."""

    id: str
    alias: str
    address: str
    region: str
    role: str
    created_at: float
    expires_at: float
    node_id: str | None
    public_key: bytes | None

    @property
    def status(self) -> str:
        return "pending" if self.public_key is None else "paired"


@dataclass(frozen=True, slots=True)
class Group:
    id: str
    name: str
    node_ids: tuple[str, ...]
    created_at: float


@dataclass(frozen=True, slots=True)
class ReportedTokens:
    """Tokens reported by POST. ``kv_assisted`` of the ``completed`` ones came from KV."""

    completed: int
    kv_assisted: int


class NetworkState:
    """The kept state, safe to use from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def changes(self) -> int:
        """Grows with every write to the database, whoever made it in this process."""
        return self._database.changes

    # --- registrations -----------------------------------------------------------------------------------------------

    def register(self, alias: str, address: str, region: str, role: str, now: float) -> tuple[Registration, str]:
        """A pending registration and its token, which is not kept and never shown again.

        Raises:
            StateError: there are too many registrations.
        """
        token = pairing.new_token(secrets.token_urlsafe)
        made = Registration(
            id=secrets.token_hex(8),
            alias=alias,
            address=address,
            region=region.strip() or DEFAULT_REGION,
            role=role,
            created_at=now,
            expires_at=now + pairing.LIFE_S,
            node_id=None,
            public_key=None,
        )
        with self._database.transaction() as connection:
            _prune(connection, now)
            (count,) = connection.execute("SELECT count(*) FROM registrations").fetchone()
            if count >= REGISTRATIONS_MAX:
                raise StateError(f"there are {count} registrations already", remedy="remove some first")
            connection.execute(
                "INSERT INTO registrations (id, alias, address, region, role, token_id, token_key, created_at, expires_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(made.id, made.alias, made.address, made.region, made.role),
                    *(pairing.token_id(token), pairing.token_key(token), made.created_at, made.expires_at),
                ),
            )
        return made, token

    def redeem(self, claim: pairing.Claim, now: float) -> Registration:
        """Bind a registration to the node that proves its token and its key. Repeating the same claim changes nothing.

        Raises:
            NotThere: no such token, or it has expired.
            AuthenticationError: proof or signature do not hold.
            Conflict: the token was redeemed by another node, or the node id is bound to another key.
        """
        self.prune(now)  # by itself: a refusal below takes back what its transaction did
        with self._database.transaction() as connection:
            row = connection.execute("SELECT * FROM registrations WHERE token_id = ?", (claim.token_id,)).fetchone()
            if row is None:
                raise NotThere("there is no such pairing token, or it has expired", remedy="register the node again")
            pairing.check_claim(claim, row["token_key"])
            if row["public_key"] is not None:
                if (row["node_id"], row["public_key"]) != (claim.node_id, claim.public_key):
                    raise Conflict("the pairing token was redeemed by another node", remedy="register the node again")
                return _registration(row)
            others = connection.execute(
                "SELECT public_key FROM registrations WHERE node_id = ?", (claim.node_id,)
            ).fetchall()
            if any(other["public_key"] != claim.public_key for other in others):
                raise Conflict("the node id is bound to another key", remedy="remove the old registration first")
            connection.execute("DELETE FROM registrations WHERE node_id = ?", (claim.node_id,))
            connection.execute(
                "UPDATE registrations SET node_id = ?, public_key = ?, redeemed_at = ? WHERE id = ?",
                (claim.node_id, claim.public_key, now, row["id"]),
            )
            bound = connection.execute("SELECT * FROM registrations WHERE id = ?", (row["id"],)).fetchone()
            return _registration(bound)

    def remove_registration(self, registration_id: str) -> None:
        """Forget a registration and what it binds.

        Raises:
            NotThere: there is none of this id.
        """
        with self._database.transaction() as connection:
            if connection.execute("DELETE FROM registrations WHERE id = ?", (registration_id,)).rowcount == 0:
                raise NotThere("there is no such registration")

    def registrations(self, now: float) -> list[Registration]:
        """Oldest first; pending ones that have expired are not among them, whether pruned already or not."""
        rows = self._database.rows(
            "SELECT * FROM registrations WHERE public_key IS NOT NULL OR expires_at > ? ORDER BY created_at, id", now
        )
        return [_registration(row) for row in rows]

    def prune(self, now: float) -> int:
        """Delete pending registrations that have expired; how many."""
        with self._database.transaction() as connection:
            return _prune(connection, now)

    # --- groups ------------------------------------------------------------------------------------------------------

    def create_group(self, name: str, node_ids: Sequence[str], now: float) -> Group:
        """Ids are taken once each, in their order; they need not exist.

        Raises:
            StateError: there are too many groups.
        """
        made = Group(secrets.token_hex(6), name, tuple(dict.fromkeys(node_ids)), now)
        with self._database.transaction() as connection:
            (count,) = connection.execute("SELECT count(*) FROM groups").fetchone()
            if count >= GROUPS_MAX:
                raise StateError(f"there are {count} groups already")
            connection.execute("INSERT INTO groups (id, name, created_at) VALUES (?, ?, ?)", (made.id, name, now))
            connection.executemany(
                "INSERT INTO group_members (group_id, position, node_id) VALUES (?, ?, ?)",
                [(made.id, position, node_id) for position, node_id in enumerate(made.node_ids)],
            )
        return made

    def groups(self) -> list[Group]:
        """Oldest first."""
        members: dict[str, list[str]] = {}
        for row in self._database.rows("SELECT group_id, node_id FROM group_members ORDER BY group_id, position"):
            members.setdefault(row["group_id"], []).append(row["node_id"])
        return [
            Group(row["id"], row["name"], tuple(members.get(row["id"], ())), row["created_at"])
            for row in self._database.rows("SELECT id, name, created_at FROM groups ORDER BY number")
        ]

    # --- tokens ------------------------------------------------------------------------------------------------------

    def add_tokens(self, node_id: str, completed: int, kv_assisted: int) -> None:
        """Add to a node's reported tokens.

        Raises:
            StateError: more came from KV than there were, or there are too many nodes or tokens.
        """
        if kv_assisted > completed:
            raise StateError("kv_assisted cannot be greater than completed")
        with self._database.transaction() as connection:
            total = connection.execute("SELECT count(*), total(completed) FROM token_counters").fetchone()
            known = connection.execute("SELECT 1 FROM token_counters WHERE node_id = ?", (node_id,)).fetchone()
            if known is None and total[0] >= TOKEN_NODES_MAX:
                raise StateError(f"tokens of {TOKEN_NODES_MAX} nodes are counted already")
            if total[1] + completed > TOKENS_MAX:
                raise StateError("the sum of tokens would be too large")
            connection.execute(
                "INSERT INTO token_counters (node_id, completed, kv_assisted) VALUES (?, ?, ?)"
                " ON CONFLICT (node_id) DO UPDATE SET completed = completed + excluded.completed,"
                " kv_assisted = kv_assisted + excluded.kv_assisted",
                (node_id, completed, kv_assisted),
            )

    def reported_tokens(self) -> ReportedTokens:
        """Sums over all nodes."""
        row = self._database.row(
            "SELECT coalesce(sum(completed), 0) AS completed, coalesce(sum(kv_assisted), 0) AS kv_assisted"
            " FROM token_counters"
        )
        return ReportedTokens(row["completed"], row["kv_assisted"]) if row is not None else ReportedTokens(0, 0)

    # --- counters of nodes -------------------------------------------------------------------------------------------

    def save_counters(self, rows: Iterable[LedgerRow], now: float) -> None:
        """Keep rows of the ledger, so that sums over the fleet survive this process."""
        with self._database.transaction() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO node_counters (node_id, incarnation, base, current, saved_at)"
                " VALUES (?, ?, ?, ?, ?)",
                [(r.node_id, str(r.incarnation), json.dumps(r.base), json.dumps(r.current), now) for r in rows],
            )
            connection.execute(
                "DELETE FROM node_counters WHERE node_id NOT IN"
                " (SELECT node_id FROM node_counters ORDER BY saved_at DESC, node_id LIMIT ?)",
                (LEDGER_NODES_MAX,),
            )

    def load_counters(self) -> list[LedgerRow]:
        """The kept ledger, the rows kept longest ago first."""
        return [
            LedgerRow(row["node_id"], int(row["incarnation"]), json.loads(row["base"]), json.loads(row["current"]))
            for row in self._database.rows("SELECT * FROM node_counters ORDER BY saved_at, node_id")
        ]


def _prune(connection: sqlite3.Connection, now: float) -> int:
    return connection.execute("DELETE FROM registrations WHERE public_key IS NULL AND expires_at <= ?", (now,)).rowcount


def _registration(row: sqlite3.Row) -> Registration:
    names = ("id", "alias", "address", "region", "role", "created_at", "expires_at", "node_id", "public_key")
    return Registration(**{name: row[name] for name in names})
