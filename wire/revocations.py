"""Revocations: signed statements that a node's identity key is not accepted any more, so that anybody may relay them.

A revocation is ``[statement as msgpack, Ed25519 signature of the issuer]``. It names a *key*, not a name: the machine may
come back under its old name with a new key, and the key may not come back under any name. Who may issue one is for the
receiver to judge (kakeya_zmq.protocol.revocation).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from wire import limits
from wire.codec import decode_bounded, encode_bounded
from wire.keys import NodeIdentity
from wire.messages import Key32, Name

MARK_BYTES: Final = 8
_CONTEXT: Final = b"kakeya-zmq revocation\0"


class Revocation(Struct, frozen=True, array_like=True, kw_only=True):
    """What is signed."""

    node_id: Name
    """The name the issuer knows the key under. What the issuer writes; nobody else shows it or goes by it."""
    identity_public_key: Key32
    """The key that is revoked."""
    issuer_id: Name
    """As above."""
    issuer_public_key: Key32
    issued_at_unix: Annotated[float, Meta(ge=0.0, le=1e12)]
    """As the issuer says. Orders the revocations of one issuer among each other, and nothing else."""

    @property
    def mark(self) -> bytes:
        """8 bytes that stand for this revocation in an exchange: one for each revoked key and issuer."""
        return mark_of(self.identity_public_key, self.issuer_public_key)


class _Signed(Struct, frozen=True, array_like=True, kw_only=True):
    statement: Annotated[bytes, Meta(max_length=limits.REVOCATION_BYTES_MAX)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


_STATEMENT: Final = msgspec.msgpack.Decoder(Revocation)
_SIGNED: Final = msgspec.msgpack.Decoder(_Signed)


def mark_of(identity_public_key: bytes, issuer_public_key: bytes) -> bytes:
    """The mark of the revocation of a key by an issuer."""
    pair = identity_public_key + issuer_public_key
    return blake2b(pair, digest_size=MARK_BYTES, person=b"kz revocation").digest()


def sign_revocation(revocation: Revocation, issuer: NodeIdentity) -> bytes:
    """The revocation as it travels.

    Raises:
        LocalProtocolError: it is too large.
    """
    statement = encode_bounded(revocation, limits.REVOCATION_BYTES_MAX)
    signed = _Signed(statement=statement, signature=issuer.sign(_CONTEXT + statement))
    return encode_bounded(signed, limits.REVOCATION_BYTES_MAX)


def open_revocation(data: bytes) -> Revocation:
    """A revocation whose signature holds for the issuer it names.

    Raises:
        RemoteProtocolError: oversize or malformed.
        AuthenticationError: the signature does not hold.
    """
    signed, revocation = _read(data)
    NodeIdentity.verify(revocation.issuer_public_key, _CONTEXT + signed.statement, signed.signature)
    return revocation


def claimed_revocation(data: bytes) -> Revocation:
    """What a revocation says, its signature unchecked: a hundredth of the work of :func:`open_revocation`.

    Raises:
        RemoteProtocolError: oversize or malformed.
    """
    return _read(data)[1]


def _read(data: bytes) -> tuple[_Signed, Revocation]:
    signed = decode_bounded(_SIGNED, data, limits.REVOCATION_BYTES_MAX, "revocation")
    return signed, decode_bounded(_STATEMENT, signed.statement, limits.REVOCATION_BYTES_MAX, "revocation")
