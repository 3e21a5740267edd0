"""Pairing: a node proves, without sending a secret, that it was given a registration's token and owns its node key.

The administrator registers a node and hands the token over by other means. The node sends::

    token_id    BLAKE2b-64(token), names the registration
    node_id, public_key
    proof       BLAKE2b-256(key = token key, claim)
    signature   Ed25519 by the node key over claim ‖ proof

    token key = BLAKE2b-256(token)     claim = context ‖ token_id ‖ public_key ‖ node_id

The proof shows that who made it knows the token, the signature that it owns the key; both cover node id and public key, so
who listens can change nothing, and since a token is redeemed once, repeating the message yields nothing either. Tokens have
144 random bits and a life of ten minutes, so guessing one from its id or proof is out of reach.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from wire.errors import AuthenticationError
from wire.keys import NodeIdentity

TOKEN_PREFIX: Final = "kn_pair_"
TOKEN_CHARACTERS: Final = len(TOKEN_PREFIX) + 24
LIFE_S: Final = 600.0
"""How long a token can be redeemed."""

_CONTEXT: Final = b"kakeya-zmq pairing\0"
_PERSON_ID: Final = b"kz pair id"
_PERSON_KEY: Final = b"kz pair key"
_PERSON_PROOF: Final = b"kz pair proof"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a node sends to redeem a token. ``public_key`` 32 bytes, ``proof`` 32 bytes, ``signature`` 64 bytes."""

    token_id: str
    node_id: str
    public_key: bytes
    proof: bytes
    signature: bytes


def new_token(random_text: Callable[[int], str]) -> str:
    """A fresh token; ``random_text(18)`` must be 24 URL-safe characters (``secrets.token_urlsafe``)."""
    return TOKEN_PREFIX + random_text(18)


def token_id(token: str) -> str:
    """16 hexadecimal digits that name a token and don't reveal it."""
    return hashlib.blake2b(token.encode(), digest_size=8, person=_PERSON_ID).hexdigest()


def token_key(token: str) -> bytes:
    """32 bytes; what the dashboard keeps instead of the token."""
    return hashlib.blake2b(token.encode(), digest_size=32, person=_PERSON_KEY).digest()


def make_claim(token: str, node_id: str, identity: NodeIdentity) -> Claim:
    """What the node sends."""
    name = token_id(token)
    text = _claim_text(name, node_id, identity.public_key)
    proof = _proof(token_key(token), text)
    return Claim(name, node_id, identity.public_key, proof, identity.sign(text + proof))


def check_claim(claim: Claim, key: bytes) -> None:
    """Hold a claim against the kept key of its token.

    Raises:
        AuthenticationError: the token is another one, or the signature is not by that node key.
    """
    text = _claim_text(claim.token_id, claim.node_id, claim.public_key)
    if not hmac.compare_digest(_proof(key, text), claim.proof):
        raise AuthenticationError("the proof does not match the token")
    NodeIdentity.verify(claim.public_key, text + claim.proof, claim.signature)


def _claim_text(name: str, node_id: str, public_key: bytes) -> bytes:
    return _CONTEXT + bytes.fromhex(name) + public_key + node_id.encode()


def _proof(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, key=key, digest_size=32, person=_PERSON_PROOF).digest()
