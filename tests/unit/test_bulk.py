"""Sealing of bulk chunks: both suites, every tampering, and what each suite is compatible with."""

from __future__ import annotations

import hashlib
import os

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from nacl.secret import SecretBox

from wire.bulk import SEAL_BYTES, ChunkSealer, choose_suite, has_hardware_aes, own_suites
from wire.errors import AuthenticationError, LocalProtocolError
from wire.messages import CipherSuite

SUITES = pytest.mark.parametrize("suite", list(CipherSuite))
KEY = bytes(range(32))
HEADER = b"header of chunk 5"
INDEX = 5
PLAINTEXT = os.urandom(70_000)


def seal(suite: CipherSuite, *pieces: bytes, header: bytes = HEADER, index: int = INDEX) -> bytearray:
    out = bytearray(sum(map(len, pieces)) + SEAL_BYTES)
    written = ChunkSealer(suite, KEY).seal_into(header, index, [memoryview(piece) for piece in pieces], memoryview(out))
    assert written == len(out)
    return out


def unseal(
    suite: CipherSuite, sealed: bytes | bytearray, *, header: bytes = HEADER, index: int = INDEX, key: bytes = KEY
) -> bytes:
    out = bytearray(max(0, len(sealed) - SEAL_BYTES))
    written = ChunkSealer(suite, key).open_into(header, index, memoryview(sealed), memoryview(out))
    return bytes(out[:written])


@SUITES
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 65_536, 70_000])
def test_what_was_sealed_opens(suite: CipherSuite, length: int) -> None:
    assert unseal(suite, seal(suite, PLAINTEXT[:length])) == PLAINTEXT[:length]


@SUITES
def test_gathered_pieces_are_sealed_like_one(suite: CipherSuite) -> None:
    assert seal(suite, PLAINTEXT[:1], PLAINTEXT[1:50_000], PLAINTEXT[50_000:]) == seal(suite, PLAINTEXT)
    assert seal(suite) == seal(suite, b"")


@SUITES
def test_a_sealer_can_be_used_again_and_writes_only_the_start_of_a_slot(suite: CipherSuite) -> None:
    sealer = ChunkSealer(suite, KEY)
    slot = bytearray(b"\xaa" * 1000)
    opened = bytearray(b"\xbb" * 1000)
    for index, pieces in enumerate([(b"first",), (b"se", b"cond"), (b"a longer third one", b"x" * 300)]):
        plaintext = b"".join(pieces)
        written = sealer.seal_into(b"h%d" % index, index, [memoryview(piece) for piece in pieces], memoryview(slot))
        count = sealer.open_into(b"h%d" % index, index, memoryview(slot)[:written], memoryview(opened))
        assert opened[:count] == plaintext
    assert slot[written:] == b"\xaa" * (1000 - written)
    assert opened[count:] == b"\xbb" * (1000 - count)


def test_the_suites_are_the_published_ones() -> None:
    assert seal(CipherSuite.AES_256_GCM, PLAINTEXT) == AESGCM(KEY).encrypt(INDEX.to_bytes(12, "big"), PLAINTEXT, HEADER)
    nonce = hashlib.blake2b(HEADER, digest_size=24).digest()
    assert seal(CipherSuite.SECRETBOX, PLAINTEXT) == SecretBox(KEY).encrypt(PLAINTEXT, nonce).ciphertext


@SUITES
@pytest.mark.parametrize("position", [0, 15, 16, 100, -17, -1])
def test_a_flipped_bit_is_noticed(suite: CipherSuite, position: int) -> None:
    sealed = seal(suite, PLAINTEXT)
    sealed[position] ^= 1
    with pytest.raises(AuthenticationError):
        unseal(suite, sealed)


@SUITES
@pytest.mark.parametrize("length", [0, 1, SEAL_BYTES - 1, SEAL_BYTES, 70_000])
def test_a_truncated_chunk_is_noticed(suite: CipherSuite, length: int) -> None:
    with pytest.raises(AuthenticationError):
        unseal(suite, seal(suite, PLAINTEXT)[:length])


@SUITES
def test_header_and_key_are_authenticated(suite: CipherSuite) -> None:
    sealed = seal(suite, PLAINTEXT)
    with pytest.raises(AuthenticationError):
        unseal(suite, sealed, header=b"Header of chunk 5")
    with pytest.raises(AuthenticationError):
        unseal(suite, sealed, key=bytes(32))
    other = CipherSuite.SECRETBOX if suite is CipherSuite.AES_256_GCM else CipherSuite.AES_256_GCM
    with pytest.raises(AuthenticationError):
        unseal(other, sealed)


def test_the_index_is_authenticated_by_aes_too() -> None:
    with pytest.raises(AuthenticationError):
        unseal(CipherSuite.AES_256_GCM, seal(CipherSuite.AES_256_GCM, PLAINTEXT), index=INDEX + 1)


@SUITES
def test_secretbox_writes_nothing_before_it_has_verified(suite: CipherSuite) -> None:
    sealed = seal(suite, PLAINTEXT)
    sealed[20] ^= 1
    out = bytearray(len(PLAINTEXT))
    with pytest.raises(AuthenticationError):
        ChunkSealer(suite, KEY).open_into(HEADER, INDEX, memoryview(sealed), memoryview(out))
    if suite is CipherSuite.SECRETBOX:
        assert out == bytes(len(PLAINTEXT))


@SUITES
def test_too_small_buffers_and_keys_are_our_own_mistake(suite: CipherSuite) -> None:
    sealer = ChunkSealer(suite, KEY)
    with pytest.raises(LocalProtocolError, match="fit"):
        sealer.seal_into(HEADER, INDEX, [memoryview(PLAINTEXT)], memoryview(bytearray(len(PLAINTEXT) + SEAL_BYTES - 1)))
    with pytest.raises(LocalProtocolError, match="fit"):
        sealer.open_into(HEADER, INDEX, memoryview(seal(suite, PLAINTEXT)), memoryview(bytearray(len(PLAINTEXT) - 1)))
    with pytest.raises(LocalProtocolError, match="31"):
        ChunkSealer(suite, bytes(31))
    assert "0001" not in repr(sealer)


def test_aes_is_chosen_only_when_both_sides_have_it() -> None:
    both = (CipherSuite.AES_256_GCM, CipherSuite.SECRETBOX)
    assert choose_suite(both, has_aes=True) is CipherSuite.AES_256_GCM
    assert choose_suite(both[::-1], has_aes=True) is CipherSuite.AES_256_GCM
    assert choose_suite(both, has_aes=False) is CipherSuite.SECRETBOX
    assert choose_suite((CipherSuite.SECRETBOX,), has_aes=True) is CipherSuite.SECRETBOX
    assert choose_suite((CipherSuite.AES_256_GCM,), has_aes=False) is CipherSuite.AES_256_GCM
    with pytest.raises(LocalProtocolError):
        choose_suite((), has_aes=True)
    assert own_suites(has_aes=True) == both
    assert own_suites(has_aes=False) == (CipherSuite.SECRETBOX,)


@pytest.mark.parametrize(
    ("system", "machine", "flags", "speed", "expected"),
    [
        ("darwin", "arm64", None, 0.0, True),
        ("linux", "x86_64", frozenset({"sse2", "aes"}), 0.0, True),
        ("linux", "x86_64", frozenset({"sse2"}), 9e9, False),
        ("freebsd14", "amd64", None, 9e9, True),
        ("freebsd14", "amd64", None, 2e8, False),
    ],
)
def test_hardware_aes_is_told_by_the_system_or_else_measured(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, flags: frozenset[str] | None, speed: float, expected: bool
) -> None:
    monkeypatch.setattr("wire.bulk.sys.platform", system)
    monkeypatch.setattr("wire.bulk.platform.machine", lambda: machine)
    monkeypatch.setattr("wire.bulk._linux_cpu_flags", lambda: flags)
    monkeypatch.setattr("wire.bulk.aes_bytes_per_s", lambda: speed)
    assert has_hardware_aes() is expected


def test_the_measurement_runs_here() -> None:
    from wire.bulk import aes_bytes_per_s

    assert aes_bytes_per_s() > 0
    assert has_hardware_aes() in (True, False)


@pytest.mark.parametrize("suite", list(CipherSuite))
def test_several_buffers_are_sealed_and_opened_as_if_they_were_one(suite: CipherSuite) -> None:
    key, header = b"k" * 32, b"header"
    pieces = [memoryview(bytes([number]) * length) for number, length in enumerate((1, 15, 16, 17, 4096, 100_003), start=1)]
    whole = b"".join(pieces)
    several, one = bytearray(len(whole) + SEAL_BYTES), bytearray(len(whole) + SEAL_BYTES)
    assert ChunkSealer(suite, key).seal_into(header, 7, pieces, memoryview(several)) == len(several)
    ChunkSealer(suite, key).seal_into(header, 7, [memoryview(whole)], memoryview(one))
    assert several == one, "how a chunk is cut must not show on the wire"
    outs = [memoryview(bytearray(piece.nbytes)) for piece in pieces]
    ChunkSealer(suite, key).open_into_several(header, 7, memoryview(bytes(one)), outs)
    assert outs == pieces
    for wrong in ((b"other", 7, one), (header, 8, one), (header, 7, one[:-1] + bytes([one[-1] ^ 1]))):
        if suite is CipherSuite.SECRETBOX and wrong[1] == 8:
            continue  # its nonce is the header's hash; the index is part of the real header
        with pytest.raises(AuthenticationError):
            ChunkSealer(suite, key).open_into_several(wrong[0], wrong[1], memoryview(bytes(wrong[2])), outs)
    with pytest.raises(LocalProtocolError):
        ChunkSealer(suite, key).open_into_several(header, 7, memoryview(bytes(one)), outs[:-1])
