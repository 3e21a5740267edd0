"""Sealing of small messages."""

from __future__ import annotations

import pytest

from wire.errors import AuthenticationError, LocalProtocolError
from wire.seal import TAG_BYTES, header_nonce, open_sealed, seal

KEY, NONCE = b"k" * 32, b"n" * 24


@pytest.mark.parametrize("plaintext", [b"", b"x", b"text" * 1000])
def test_round_trip(plaintext: bytes) -> None:
    sealed = seal(KEY, NONCE, plaintext)
    assert len(sealed) == len(plaintext) + TAG_BYTES
    assert open_sealed(KEY, NONCE, sealed) == plaintext


def test_matches_the_published_vector_of_secretbox() -> None:
    # First values of the vector in "Cryptography in NaCl" (Bernstein, 2009), section 10.
    key = bytes.fromhex("1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389")
    nonce = bytes.fromhex("69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37")
    plaintext = bytes.fromhex("be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffc")
    sealed = seal(key, nonce, plaintext)
    assert sealed[TAG_BYTES:].hex() == "8e993b9f48681273c29650ba32fc76ce48332ea7164d96a4476fb8c531a1186a"


def test_any_changed_byte_breaks_the_seal() -> None:
    sealed = seal(KEY, NONCE, b"some text")
    for index in range(len(sealed)):
        changed = bytearray(sealed)
        changed[index] ^= 1
        with pytest.raises(AuthenticationError):
            open_sealed(KEY, NONCE, bytes(changed))


def test_any_truncation_breaks_the_seal() -> None:
    sealed = seal(KEY, NONCE, b"some text")
    for length in range(len(sealed)):
        with pytest.raises(AuthenticationError):
            open_sealed(KEY, NONCE, sealed[:length])


def test_key_and_nonce_matter() -> None:
    sealed = seal(KEY, NONCE, b"some text")
    for key, nonce in ((b"K" * 32, NONCE), (KEY, b"N" * 24)):
        with pytest.raises(AuthenticationError):
            open_sealed(key, nonce, sealed)


@pytest.mark.parametrize(("key", "nonce"), [(b"k" * 31, NONCE), (KEY, b"n" * 23), (b"", b"")])
def test_wrong_lengths_are_our_own_fault(key: bytes, nonce: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        seal(key, nonce, b"")
    with pytest.raises(LocalProtocolError):
        open_sealed(key, nonce, bytes(32))


def test_header_nonce() -> None:
    assert len(header_nonce(b"")) == 24
    assert header_nonce(b"a") != header_nonce(b"b")
