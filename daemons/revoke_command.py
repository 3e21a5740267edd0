"""``kakeya revoke``: signs that a node's identity key is not accepted any more, and tells the fleet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from daemons.entitlement import load_revocations, save_revocations
from daemons.fleet import live_members
from daemons.node import node_folder
from kakeya_zmq.client import Client
from kakeya_zmq.config import kakeya_home
from kakeya_zmq.known_nodes import load_known_nodes
from wire.errors import ConfigError, RequestFailed
from wire.keys import KEY_BYTES, NodeIdentity
from wire.revocations import Revocation, open_revocation, sign_revocation


@dataclass(frozen=True, slots=True)
class Told:
    """A revocation that was made, and the addresses that took it."""

    revocation: Revocation
    addresses: tuple[str, ...]


def revoke(node_id: str, *, issuer: str, public_key: str, addresses: Sequence[str], psk_file: Path) -> Told:
    """Revoke the key of a node.

    Args:
        node_id: the name it is known under.
        issuer: the node of this machine that signs; empty: the only one there is.
        public_key: the key, 64 hexadecimal digits; empty: the one that the issuer knows for the name.
        addresses: nodes to tell; empty: those that `kakeya up` runs here.
        psk_file: the fleet's key.

    Raises:
        ConfigError: it is not clear who signs, or which key is meant.
        RequestFailed: no node was reached.
    """
    folder = node_folder(_issuer(issuer, node_id))
    identity = NodeIdentity.load_or_create(folder / "identity.key")
    key = _key(public_key) if public_key else load_known_nodes(folder).get(node_id)
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
    reached = []
    for address in addresses or [member.address for member in live_members() if member.role != "dashboard"]:
        with contextlib.suppress(RequestFailed), Client(address, psk_file=psk_file) as client:
            client.tell_revocations((blob,))
            reached.append(address)
    if not reached:
        _keep(folder, blob, key)
    return Told(revocation, tuple(reached))


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


def _keep(folder: Path, blob: bytes, key: bytes) -> None:
    """No node runs here: the one that signed spreads it when it starts."""
    held = load_revocations(folder)
    if key not in {open_revocation(each).identity_public_key for each in held}:
        save_revocations(folder, (*held, blob))
