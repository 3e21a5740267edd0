"""Sealing of small messages with NaCl secretbox (XSalsa20-Poly1305), through the bindings: its objects cost five times more.

secretbox has no associated data. What must be authenticated though it travels in the clear goes into the nonce
(:func:`header_nonce`): another header, another nonce, and the seal does not open. A key and nonce pair must never seal two
different messages; the callers see to that (a counter in the header, or random bytes beside it).
"""

from __future__ import annotations

import hashlib
from typing import Final

from nacl.bindings import crypto_secretbox_easy, crypto_secretbox_open_easy
from nacl.exceptions import CryptoError

from wire.errors import AuthenticationError, LocalProtocolError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 24
TAG_BYTES: Final = 16


def seal(key: bytes, nonce: bytes, plaintext: bytes) -> bytes:
    """Seal ``plaintext``.

    Args:
        key: 32 bytes.
        nonce: 24 bytes, never used before with this key for another message.
        plaintext: any length.

    Returns:
        16 bytes more than ``plaintext``.

    Raises:
        LocalProtocolError: key or nonce have a wrong length.
    """
    _check_lengths(key, nonce)
    return crypto_secretbox_easy(plaintext, nonce, key)


def open_sealed(key: bytes, nonce: bytes, sealed: bytes) -> bytes:
    """Open what :func:`seal` made.

    Raises:
        AuthenticationError: it was not sealed with this key and nonce, or was changed.
        LocalProtocolError: key or nonce have a wrong length.
    """
    _check_lengths(key, nonce)
    if len(sealed) < TAG_BYTES:
        raise AuthenticationError("the seal is broken")
    try:
        return crypto_secretbox_open_easy(sealed, nonce, key)
    except CryptoError:
        raise AuthenticationError("the seal is broken") from None


def header_nonce(header: bytes) -> bytes:
    """24 bytes: BLAKE2b-192 of what must be authenticated with the seal."""
    return hashlib.blake2b(header, digest_size=NONCE_BYTES).digest()


def _check_lengths(key: bytes, nonce: bytes) -> None:
    if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise LocalProtocolError(f"key and nonce have {KEY_BYTES} and {NONCE_BYTES} bytes, not {len(key)} and {len(nonce)}")
