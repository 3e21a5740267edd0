"""The roster ``fleet.toml``: who belongs to the fleet, what each node may do, and how much room each tenant has.

    clients = true                      # whether clients that are not listed may use a primary (default: yes)

    [nodes.mac-mini]
    key = "64 hexadecimal digits"       # `kakeya key show` on that machine
    roles = ["primary"]                 # primary, worker, cache
    tenants = ["default"]               # whose KV it may look up, publish, compute and hold, and whose primaries it may
                                        # open sessions on; primaries ask no other node (default: none)
    admin = true                        # whether it may revoke others (default: no)

    [tenants.default]
    quota_gb = 8.0                      # room in each store (default: no bound of its own)

Without a roster every holder of the PSK is a member and acts for every tenant. With one only the nodes on it are admitted,
each under its key and in its roles.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kakeya_zmq.compat import Compatibility
from kakeya_zmq.protocol.identities import CLIENT_ROLES
from wire.cards import Card
from wire.errors import ConfigError
from wire.files import read_guarded, unreadable
from wire.keys import KEY_BYTES
from wire.limits import GIB
from wire.messages import (
    AppendTokens,
    CloseSession,
    CreateSession,
    ExchangeCards,
    Generate,
    GetRequests,
    GetSession,
    GetStatus,
    PublishOffer,
    RequestBody,
    SubmitJob,
)
from wire.text import is_node_id

ROSTER_FILE: Final = "fleet.toml"
FILE_BYTES_MAX: Final = 1024 * 1024
ROLES: Final = ("primary", "worker", "cache")
NOT_LISTED: Final = "the node is not on the roster"
OTHER_KEY_LISTED: Final = "the roster has another identity key for the node"
ROLE_NOT_LISTED: Final = "the node claims a role that the roster does not give it"
FOREIGN_TENANT: Final = "the roster does not let this node act for that tenant"
NOT_ASKED: Final = "the node offers KV or work to a tenant that the roster does not list it with: it is not asked"
CLIENTS_ONLY_ASK: Final = "a client that is not on the roster may use sessions and read the status, nothing else"

_SECONDARY_ROLES: Final = frozenset({"cache-holder", "client"})
"""What nodes add to their role by themselves."""
_TENANT_REQUESTS: Final = (CreateSession, GetRequests)
"""What a primary does for its own tenant only: it computes with that tenant's key, and tells of its prompts."""
_CLIENT_REQUESTS: Final = (
    CreateSession,
    AppendTokens,
    Generate,
    CloseSession,
    GetSession,
    GetStatus,
    GetRequests,
    ExchangeCards,
)


@dataclass(frozen=True, slots=True)
class RosterNode:
    """One listed node."""

    public_key: bytes
    roles: frozenset[str]
    tenants: frozenset[str]
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Roster:
    """The content of the file."""

    nodes: Mapping[str, RosterNode]
    clients: bool = True
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Tenant → bytes in each store."""

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Read it.

        Raises:
            UnsafeFileError: others could change it.
            ConfigError: it cannot be read, or something in it does not fit; the line names what.
        """
        try:
            document = tomllib.loads(read_guarded(path, FILE_BYTES_MAX, "the roster").decode("utf-8"))
        except OSError as error:
            raise unreadable("the roster", path, error) from None
        except (ValueError, RecursionError) as error:
            text = " ".join(str(error).split())[:120]
            raise ConfigError(f"the roster {path} is not TOML: {text}") from None
        return cls.parse(document)

    @classmethod
    def load_if_any(cls, path: Path, *, named: bool) -> Roster | None:
        """Read it where there is one; without, every holder of the PSK belongs to the fleet.

        Args:
            named: somebody wrote this path: then there must be one. A slip of the pen must not open the fleet.

        Raises:
            ConfigError: see :meth:`load`; or it was named and is not there.
        """
        if named or os.path.lexists(path):
            return cls.load(path)
        return None

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Roster:
        """The roster in a TOML document.

        Raises:
            ConfigError: something does not fit.
        """
        _only(document, {"clients", "nodes", "tenants"}, "the roster")
        nodes = {name: _node(name, row) for name, row in _table(document, "nodes").items()}
        if not nodes:
            # Copying a file empties it first: that must not shut everybody out.
            raise ConfigError("the roster lists no node", remedy="list the nodes, or remove the file and restart")
        keys = [node.public_key for node in nodes.values()]
        if len(set(keys)) < len(keys):
            raise ConfigError("two nodes of the roster have the same key", remedy="every node has a key of its own")
        quotas = {name: _quota(name, row) for name, row in _table(document, "tenants").items()}
        return cls(nodes, _flag(document, "clients", True, "the roster"), {n: q for n, q in quotas.items() if q})

    def judge(self, node_id: str, public_key: bytes, roles: Collection[str]) -> str:
        """Why a node is not admitted (fixed text), or an empty text."""
        listed = self.nodes.get(node_id)
        if listed is None:
            return "" if self.clients and tuple(roles) == CLIENT_ROLES else NOT_LISTED
        if listed.public_key != public_key:
            return OTHER_KEY_LISTED
        return "" if set(roles) - _SECONDARY_ROLES <= listed.roles else ROLE_NOT_LISTED

    def may_revoke(self, public_key: bytes) -> bool:
        return any(node.admin and node.public_key == public_key for node in self.nodes.values())

    def acts_for(self, node_id: str, tenant: str) -> bool:
        node = self.nodes.get(node_id)
        return node is not None and tenant in node.tenants


class Access:
    """What members may do to a store and a worker: everything without a roster, and by its words with one.

    A fingerprint is the hash of a compatibility tuple that has the tenant in it, so a card that tells the tuple *proves*
    whose namespace it is, whoever signed the card. What nobody has proven is answered like what is not there.

    Of each node the namespaces that its latest card proves are known, until it has left the fleet: so many as a card has
    room for, and no card takes the place of another node's. Beyond that a namespace is known as long as the store holds
    something of it, or it would count in nobody's quota.
    """

    def __init__(self) -> None:
        self.roster: Roster | None = None
        self.is_held: Callable[[bytes], bool] = lambda fingerprint: False
        """Whether the store holds something of a namespace."""
        self._own_tenant: str | None = None
        self._own: dict[bytes, str] = {}
        self._told: dict[str, dict[bytes, str]] = {}
        """What each other node's latest card proves."""
        self._tenants: dict[bytes, str] = {}
        """All that is known."""
        self._tellers: Counter[bytes] = Counter()
        """How many cards tell of a namespace."""
        self._kept: set[bytes] = set()
        """Known only because the store holds something of it."""

    def __len__(self) -> int:
        """Namespaces that are known."""
        return len(self._tenants)

    def learn(self, card: Card) -> None:
        """Take note of the namespaces that a node's new card proves; those of its card before are told no more."""
        tuples = [model.compatibility for model in card.models]
        if card.worker is not None:
            tuples.append(card.worker.compatibility)
        proven = [compatibility for values in tuples if (compatibility := _compatibility(values)) is not None]
        told = {compatibility.fingerprint(): compatibility.tenant_namespace for compatibility in proven}
        before = self._told.get(card.node_id, {})
        if told == before:
            return
        self._tenants |= told
        self._tellers.update(told.keys())
        if told:
            self._told[card.node_id] = told
        else:
            del self._told[card.node_id]
        self._untell(before)

    def learn_tuple(self, values: Mapping[str, Any]) -> None:
        """Take note of the namespace that this node itself serves; what is no compatibility tuple is ignored."""
        if (compatibility := _compatibility(values)) is not None:
            self._own_tenant = compatibility.tenant_namespace
            self._own[compatibility.fingerprint()] = compatibility.tenant_namespace
            self._tenants |= self._own

    def forget(self, node_id: str) -> None:
        """A node has left the fleet."""
        self._untell(self._told.pop(node_id, {}))

    def _untell(self, fingerprints: Iterable[bytes]) -> None:
        """These are told by one card less. What no card tells any more is dropped once nothing of it is held."""
        for fingerprint in fingerprints:
            self._tellers[fingerprint] -= 1
            if not self._tellers[fingerprint]:
                del self._tellers[fingerprint]
                self._kept.add(fingerprint)
        for fingerprint in tuple(self._kept):
            told = fingerprint in self._tellers or fingerprint in self._own
            if not told and self.is_held(fingerprint):
                continue
            self._kept.remove(fingerprint)
            if not told:
                del self._tenants[fingerprint]

    def tenant_of(self, fingerprint: bytes) -> str | None:
        """Whose namespace it is; None when nobody has proven it."""
        return self._tenants.get(fingerprint)

    def hides(self, node_id: str, fingerprint: bytes) -> bool:
        """Whether a namespace does not exist for this node."""
        if self.roster is None:
            return False
        tenant = self._tenants.get(fingerprint)
        return tenant is None or not self.roster.acts_for(node_id, tenant)

    def may_be_asked(self, node_id: str) -> bool:
        """Whether this node may ask another one for KV or work, and give it KV or prompts of its own tenant.

        What a card offers is a claim: whoever saw another node's card can claim the same. The roster is what counts.
        Before its own tenant is known a node with a roster asks nobody.
        """
        if self.roster is None:
            return True
        return self._own_tenant is not None and self.roster.acts_for(node_id, self._own_tenant)

    def refusal(self, node_id: str, roles: Collection[str], body: RequestBody) -> str:
        """Why a request is refused (fixed text), or an empty text. Lookups are not refused: they find nothing."""
        roster = self.roster
        if roster is None:
            return ""
        if tuple(roles) == CLIENT_ROLES and node_id not in roster.nodes:
            return "" if isinstance(body, _CLIENT_REQUESTS) else CLIENTS_ONLY_ASK
        # Before its model is loaded a node serves no tenant, and has nothing to tell.
        own = self._own_tenant
        if isinstance(body, _TENANT_REQUESTS) and own is not None and not roster.acts_for(node_id, own):
            return FOREIGN_TENANT
        if isinstance(body, PublishOffer | SubmitJob) and self.hides(node_id, body.fingerprint):
            return FOREIGN_TENANT
        return ""

    def quota_bytes(self, fingerprint: bytes, usage: Mapping[bytes, int]) -> int | None:
        """Bytes that a namespace may take: what its tenant's others leave of the tenant's quota; None: no bound.

        With a roster a namespace whose tenant is not known (any more) takes nothing: it would count for nobody.
        """
        if self.roster is None:
            return None
        tenant = self._tenants.get(fingerprint)
        quota = self.roster.quotas.get(tenant) if tenant is not None else 0
        if quota is None:
            return None
        others = sum(used for other, used in usage.items() if other != fingerprint and self._tenants.get(other) == tenant)
        return max(0, quota - others)


def _compatibility(values: Mapping[str, Any]) -> Compatibility | None:
    fields = Compatibility.__dataclass_fields__
    return Compatibility(**{name: values[name] for name in fields}) if fields.keys() <= values.keys() else None


# --- reading -----------------------------------------------------------------------------------------------------


def _node(name: str, row: Any) -> RosterNode:
    where = f"node {name[:64]!r} of the roster"
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a table", remedy="write [nodes.NAME]")
    if not is_node_id(name):
        raise ConfigError(f"{where} has a name that no node can have", remedy="use letters, digits, '-', '_' and '.'")
    _only(row, {"key", "roles", "tenants", "admin"}, where)
    try:
        key = bytes.fromhex(row.get("key", ""))
    except (ValueError, TypeError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{where} has no key", remedy=f"key = {2 * KEY_BYTES} hexadecimal digits; see `kakeya key show`")
    roles = _names(row, "roles", where)
    if not roles <= set(ROLES):
        raise ConfigError(f"{where} has an unknown role", remedy=f"one of: {', '.join(ROLES)}")
    return RosterNode(key, roles, _names(row, "tenants", where), _flag(row, "admin", False, where))


def _quota(name: str, row: Any) -> int:
    where = f"tenant {name[:64]!r} of the roster"
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a table", remedy="write [tenants.NAME]")
    _only(row, {"quota_gb"}, where)
    quota = row.get("quota_gb", 0)
    if isinstance(quota, bool) or not isinstance(quota, int | float) or not 0 <= quota <= 4096:
        raise ConfigError(f"{where}: quota_gb is not a number of GiB")
    return int(quota * GIB)


def _only(row: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(row) - known):
        raise ConfigError(f"{where} has an unknown entry {unknown[0][:40]!r}", remedy=f"known: {', '.join(sorted(known))}")


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name!r} of the roster is not a table")
    return table


def _names(row: Mapping[str, Any], name: str, where: str) -> frozenset[str]:
    values = row.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ConfigError(f"{where}: {name} is not a list of names")
    return frozenset(values)


def _flag(row: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    value = row.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} is not true or false")
    return value
