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
from kakeya_zmq.client import CALL_TIMEOUT_S, Client
from kakeya_zmq.config import kakeya_home
from kakeya_zmq.known_nodes import load_known_nodes
from wire.errors import ConfigError, FailureCode, RequestFailed
from wire.keys import KEY_BYTES, NodeIdentity
from wire.messages import CardList, ExchangeCards
from wire.revocations import Revocation, mark_of_key, open_revocation, sign_revocation


@dataclass(frozen=True, slots=True)
class Told:
    """A revocation that was made, and the addresses that took it."""

    revocation: Revocation
    addresses: tuple[str, ...]


class _Teller(Client):
    """A client that asks afterwards what has become of a revocation."""

    def lacks(self, key: bytes) -> bool:
        """Whether the node holds no revocation of this key: only marks that it lacks are asked for.

        Raises:
            RequestFailed: no answer.
        """
        mark = mark_of_key(key)
        body = ExchangeCards(cards=(), ages_ms=(), known=b"", revoked=mark)
        return self._call(body, CardList, CALL_TIMEOUT_S).wanted_revocations == mark


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
        RequestFailed: a node that was reached did not take it.
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
    reached: list[str] = []
    refused: list[str] = []
    signer_revoked = False
    for address in addresses or [member.address for member in live_members() if member.role != "dashboard"]:
        with contextlib.suppress(RequestFailed), _Teller(address, psk_file=psk_file) as client:
            client.tell_revocations((blob,))
            if lacks := client.lacks(key):
                refused.append(address)
                signer_revoked = signer_revoked or not client.lacks(identity.public_key)
            reached += [] if lacks else [address]
    if refused:
        raise _not_taken(refused, taken=len(reached), issuer=folder.name, signer_revoked=signer_revoked)
    if not reached:
        _keep(folder, blob, key)
    return Told(revocation, tuple(reached))


def _not_taken(refused: Sequence[str], *, taken: int, issuer: str, signer_revoked: bool) -> RequestFailed:
    where = ", ".join(refused) + (f" ({taken} took it)" if taken else "")
    if signer_revoked:
        text = f"the revocation was not taken by {where}: the key of {issuer}, which signed, is itself revoked"
        return RequestFailed(FailureCode.PERMISSION_DENIED, text, remedy="sign with another node: --as NODE")
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


def _keep(folder: Path, blob: bytes, key: bytes) -> None:
    """No node runs here: the one that signed spreads it when it starts."""
    held = load_revocations(folder)
    if key not in {open_revocation(each).identity_public_key for each in held}:
        save_revocations(folder, (*held, blob))
