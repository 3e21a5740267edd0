"""``kakeya revoke``: signs that a node's identity key is not accepted any more, and tells the fleet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from daemons.fleet import live_members
from daemons.node_keys import node_folder
from kakeya_zmq.client import Client
from kakeya_zmq.config import kakeya_home
from kakeya_zmq.known_nodes import load_known_nodes
from kakeya_zmq.revocation_file import add_revocation
from kakeya_zmq.roster import ROSTER_FILE, Roster
from wire.errors import ConfigError, FailureCode, RequestFailed
from wire.keys import KEY_BYTES, NodeIdentity
from wire.revocations import Revocation, sign_revocation


@dataclass(frozen=True, slots=True)
class Told:
    """A revocation that was made, and where it was told."""

    revocation: Revocation
    addresses: tuple[str, ...]
    """That took it."""
    unreached: tuple[str, ...]
    """``host:port: why``, of those that could not be asked."""


def revoke(node_id: str, *, issuer: str, public_key: str, addresses: Sequence[str], psk_file: Path) -> Told:
    """Revoke the key of a node.

    Args:
        node_id: the name it is known under.
        issuer: the node of this machine that signs; empty: the only one there is.
        public_key: the key, 64 hexadecimal digits; empty: the one that the issuer knows for the name.
        addresses: nodes to tell; empty: those that `kakeya up` runs here.
        psk_file: the fleet's key.

    Raises:
        ConfigError: it is not clear who signs, or which key is meant; or the roster does not let him.
        RequestFailed: a node that was reached did not take it.
    """
    folder = node_folder(_issuer(issuer, node_id))
    identity = NodeIdentity.load_or_create(folder / "identity.key")
    roster_file = psk_file.with_name(ROSTER_FILE)
    roster = Roster.load(roster_file) if roster_file.exists() else None
    if roster is not None and not roster.may_revoke(identity.public_key):
        raise _no_administrator(folder.name, roster)
    # A node does not note down its own name.
    known = {**load_known_nodes(folder), folder.name: identity.public_key}
    key = _key(public_key) if public_key else known.get(node_id)
    if key is None:
        text = f"{folder.name} has never seen {node_id[:64]!r}"
        raise ConfigError(text, remedy="name its key with --public-key (`kakeya key show` on its machine)")
    if key == identity.public_key:
        raise ConfigError("a node does not revoke itself", remedy="sign with another node: --as NODE")
    revocation = Revocation(
        node_id=node_id,
        identity_public_key=key,
        issuer_id=folder.name,
        issuer_public_key=identity.public_key,
        issued_at_unix=time.time(),
    )
    blob = sign_revocation(revocation, identity)
    # Where the roster lets no clients in, the signer comes in under its own name: it is listed, or it could not revoke.
    signer = (folder.name, identity) if roster is not None and not roster.clients else (None, None)
    reached: list[str] = []
    refused: list[str] = []
    unreached: list[str] = []
    for address in addresses or [member.address for member in live_members() if member.role != "dashboard"]:
        try:
            with Client(address, psk_file=psk_file, node_id=signer[0], identity=signer[1]) as client:
                client.tell_revocations((blob,))
                (refused if client.lacks_revocation(revocation.mark) else reached).append(address)
        except RequestFailed as error:
            unreached.append(f"{address}: {error.message}")
    if refused:
        raise _not_taken(refused, taken=len(reached), issuer=folder.name)
    if not reached:
        # The node that signed spreads it: at once when it runs, else when it starts.
        add_revocation(folder, blob)
    return Told(revocation, tuple(reached), tuple(unreached))


def _no_administrator(issuer: str, roster: Roster) -> ConfigError:
    admins = sorted(name for name, node in roster.nodes.items() if node.admin)
    who = ", ".join(admins[:8]) or "nobody: give a node `admin = true`"
    return ConfigError(f"the roster does not let {issuer} revoke", remedy=f"administrators are: {who}")


def _not_taken(refused: Sequence[str], *, taken: int, issuer: str) -> RequestFailed:
    where = ", ".join(refused) + (f" ({taken} took it)" if taken else "")
    text = f"the revocation was not taken by {where}: {issuer} may not revoke there, or there are too many"
    remedy = "`kakeya audit` on that machine tells which; sign with an administrator of its roster, or another node"
    return RequestFailed(FailureCode.FAILED_PRECONDITION, text, remedy=remedy)


def _issuer(issuer: str, revoked: str) -> str:
    here = [path.parent.name for path in sorted((kakeya_home() / "nodes").glob("*/identity.key"))]
    if issuer:
        if issuer not in here:
            raise ConfigError(f"no node {issuer[:64]!r} on this machine", remedy=f"one of: {', '.join(here) or 'none'}")
        return issuer
    others = [name for name in here if name != revoked]
    if not others:
        raise ConfigError("no node of this machine can sign", remedy="run this on a machine with a node of the fleet")
    if len(others) > 1:
        raise ConfigError("several nodes of this machine could sign", remedy=f"--as one of: {', '.join(others)}")
    return others[0]


def _key(text: str) -> bytes:
    with contextlib.suppress(ValueError):
        if len(key := bytes.fromhex(text)) == KEY_BYTES:
            return key
    raise ConfigError("--public-key is not an identity key", remedy=f"it has {2 * KEY_BYTES} hexadecimal digits")
