"""Sealing of bulk chunks into and out of buffers that the caller owns; no allocation of the chunk's size on the way.

Every transfer has its own random key, and every chunk its own nonce, so a key never meets the same nonce with other bytes;
whatever is computed again travels under a new transfer id and key.

==============  ==============================  ============================  ==============================
suite           nonce                           header authenticated as       sealed layout
==============  ==============================  ============================  ==============================
AES_256_GCM     chunk index, 96-bit big-endian  associated data               ciphertext, 16-byte tag
SECRETBOX       BLAKE2b-192 of the header       part of the nonce             16-byte tag, ciphertext
==============  ==============================  ============================  ==============================

AES-GCM (NIST SP 800-38D) is several times faster where the CPU has AES instructions; secretbox (XSalsa20-Poly1305) is at
home everywhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from nacl._sodium import ffi as _ffi  # type: ignore[import-not-found]  # compiled, without stubs
from nacl._sodium import lib as _sodium

from wire import limits
from wire.errors import AuthenticationError, LocalProtocolError
from wire.messages import CipherSuite

SEAL_BYTES: Final = 16
"""What sealing adds to a chunk, in both suites."""
KEY_BYTES: Final = 32
_HARDWARE_AES_BYTES_PER_S_MIN: Final = 1_500_000_000
"""Between the slowest hardware AES-GCM (above 2 GB/s) and the fastest bit-sliced software (a few hundred MB/s)."""
_PROBE_BYTES: Final = 256 * limits.KIB
_PROBE_ROUNDS: Final = 8


class ChunkSealer:
    """Seals and opens the chunks of one transfer. Not for two threads at once (it keeps a scratch buffer).

    Args:
        suite: the negotiated suite.
        key: 32 random bytes, this transfer's own.
    """

    def __init__(self, suite: CipherSuite, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise LocalProtocolError(f"a transfer key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._algorithm = algorithms.AES(key)
        self._aes = AESGCM(key) if suite is CipherSuite.AES_256_GCM else None
        self._scratch = memoryview(bytearray())

    def __repr__(self) -> str:
        return "ChunkSealer(...)"

    def seal_into(self, header: bytes, index: int, plaintext_buffers: Sequence[memoryview], out: memoryview) -> int:
        """Seal the concatenation of ``plaintext_buffers`` into the start of ``out``.

        Buffers are sealed from where they lie; only secretbox, which takes one piece, has several gathered first (the copy
        is still in the CPU's cache when it is sealed).

        Args:
            header: packed ChunkHeader; must be different for every chunk of the transfer.
            index: the chunk's index, never used twice in a transfer.
            plaintext_buffers: contiguous byte views.
            out: writable, at least as large as the plaintext and SEAL_BYTES, not overlapping it.

        Returns:
            bytes written.

        Raises:
            LocalProtocolError: ``out`` is too small.
        """
        length = sum(buffer.nbytes for buffer in plaintext_buffers)
        sealed_bytes = length + SEAL_BYTES
        if out.nbytes < sealed_bytes:
            raise LocalProtocolError(f"{sealed_bytes} sealed bytes do not fit into {out.nbytes}")
        target = out[:sealed_bytes]
        if self._aes is not None and len(plaintext_buffers) > 1:
            return self._seal_several(header, index, plaintext_buffers, target)
        plaintext = plaintext_buffers[0] if len(plaintext_buffers) == 1 else self._gather(plaintext_buffers, length)
        if self._aes is not None:
            return self._aes.encrypt_into(_index_nonce(index), plaintext, header, target)
        result = _sodium.crypto_secretbox_easy(
            _ffi.from_buffer(target), _ffi.from_buffer(plaintext), length, _header_nonce(header), self._key
        )
        if result != 0:
            raise LocalProtocolError("sealing failed")
        return sealed_bytes

    def open_into(self, header: bytes, index: int, sealed: memoryview, out: memoryview) -> int:
        """Open ``sealed`` into the start of ``out``.

        When it fails, ``out`` may hold unverified bytes (AES-GCM decrypts while it verifies): the caller must not show
        them to anybody.

        Args:
            header: packed ChunkHeader as received.
            index: the index in that header.
            sealed: what :meth:`seal_into` wrote.
            out: writable, at least as large as the plaintext, not overlapping ``sealed``.

        Returns:
            bytes written.

        Raises:
            AuthenticationError: header, order or bytes are not what was sealed under this key.
            LocalProtocolError: ``out`` is too small.
        """
        length = sealed.nbytes - SEAL_BYTES
        if length < 0:
            raise AuthenticationError(f"a sealed chunk of {sealed.nbytes} bytes is too short")
        if out.nbytes < length:
            raise LocalProtocolError(f"{length} bytes do not fit into {out.nbytes}")
        target = out[:length]
        if self._aes is not None:
            try:
                return self._aes.decrypt_into(_index_nonce(index), sealed, header, target)
            except InvalidTag as error:
                raise AuthenticationError("a chunk's seal does not hold") from error
        result = _sodium.crypto_secretbox_open_easy(
            _ffi.from_buffer(target), _ffi.from_buffer(sealed), sealed.nbytes, _header_nonce(header), self._key
        )
        if result != 0:
            raise AuthenticationError("a chunk's seal does not hold")
        return length

    def open_into_several(self, header: bytes, index: int, sealed: memoryview, outs: Sequence[memoryview]) -> None:
        """Open ``sealed`` into ``outs``, one after the other, without a copy in between (secretbox aside).

        When it fails, ``outs`` may hold unverified bytes, as with :meth:`open_into`.

        Args:
            header: packed ChunkHeader as received.
            index: the index in that header.
            sealed: what :meth:`seal_into` wrote.
            outs: writable contiguous byte views, together exactly as large as the plaintext.

        Raises:
            AuthenticationError: header, order or bytes are not what was sealed under this key.
            LocalProtocolError: ``outs`` have another size.
        """
        length = sealed.nbytes - SEAL_BYTES
        if sum(out.nbytes for out in outs) != length:
            raise LocalProtocolError(f"{length} bytes are to be opened into buffers of another size")
        position = 0
        if self._aes is None:
            opened = self._scratch_of(length)
            self.open_into(header, index, sealed, opened)
            for out in outs:
                out[:] = opened[position : position + out.nbytes]
                position += out.nbytes
            return
        opening = Cipher(self._algorithm, modes.GCM(_index_nonce(index))).decryptor()
        opening.authenticate_additional_data(header)
        for out in outs:
            opening.update_into(sealed[position : position + out.nbytes], out)
            position += out.nbytes
        try:
            opening.finalize_with_tag(bytes(sealed[length:]))
        except InvalidTag as error:
            raise AuthenticationError("a chunk's seal does not hold") from error

    def _seal_several(self, header: bytes, index: int, buffers: Sequence[memoryview], target: memoryview) -> int:
        sealing = Cipher(self._algorithm, modes.GCM(_index_nonce(index))).encryptor()
        sealing.authenticate_additional_data(header)
        position = 0
        for buffer in buffers:
            position += sealing.update_into(buffer, target[position:])
        sealing.finalize()
        target[position:] = sealing.tag
        return target.nbytes

    def _gather(self, buffers: Sequence[memoryview], length: int) -> memoryview:
        gathered = self._scratch_of(length)
        position = 0
        for buffer in buffers:
            gathered[position : position + buffer.nbytes] = buffer
            position += buffer.nbytes
        return gathered

    def _scratch_of(self, length: int) -> memoryview:
        if self._scratch.nbytes < length:
            self._scratch = memoryview(bytearray(length))
        return self._scratch[:length]


def _index_nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")


def _header_nonce(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=24).digest()


# --- which suite ---------------------------------------------------------------------------------------------------


def choose_suite(offered: Sequence[CipherSuite], *, has_aes: bool) -> CipherSuite:
    """The suite for a transfer: AES-256-GCM if it was offered and this CPU has AES too, else secretbox.

    Args:
        offered: what the asker can do, in any order; an asker offers AES only if its own CPU has it.
        has_aes: :func:`has_hardware_aes` of this machine.

    Returns:
        one of ``offered``: AES without hardware only when nothing else was offered.

    Raises:
        LocalProtocolError: nothing was offered.
    """
    if not offered:
        raise LocalProtocolError("no cipher suite was offered")
    preferred = CipherSuite.AES_256_GCM if has_aes else CipherSuite.SECRETBOX
    return preferred if preferred in offered else offered[0]


def own_suites(*, has_aes: bool) -> tuple[CipherSuite, ...]:
    """What this machine offers when it asks for a transfer, best first."""
    return (CipherSuite.AES_256_GCM, CipherSuite.SECRETBOX) if has_aes else (CipherSuite.SECRETBOX,)


def has_hardware_aes() -> bool:
    """Whether this CPU has AES instructions. Asks the system where it can tell, else measures for a few ms.

    Call it once at start; nothing is remembered here.
    """
    machine = platform.machine().lower()
    if sys.platform == "darwin":
        return machine == "arm64" or _mac_features_have_aes()
    flags = _linux_cpu_flags()
    if flags is not None:
        return "aes" in flags
    return aes_bytes_per_s() >= _HARDWARE_AES_BYTES_PER_S_MIN


def aes_bytes_per_s() -> float:
    """AES-256-GCM of this CPU on one thread, best of a few short rounds, in bytes per second."""
    aes = AESGCM(os.urandom(KEY_BYTES))
    plaintext = bytes(_PROBE_BYTES)
    out = bytearray(_PROBE_BYTES + SEAL_BYTES)
    best_s = float("inf")
    for index in range(_PROBE_ROUNDS):
        start = time.perf_counter()
        aes.encrypt_into(_index_nonce(index), plaintext, b"", out)
        best_s = min(best_s, time.perf_counter() - start)
    return _PROBE_BYTES / max(best_s, 1e-9)


def _linux_cpu_flags() -> frozenset[str] | None:
    """The first CPU's feature flags, or None where there is no such file or it has no such line."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass  # not Linux, or a sandbox: the caller measures
    return None


def _mac_features_have_aes() -> bool:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.features"]
    try:
        output = subprocess.run(command, capture_output=True, timeout=5, check=True, text=True).stdout
    except (OSError, subprocess.SubprocessError):
        return aes_bytes_per_s() >= _HARDWARE_AES_BYTES_PER_S_MIN
    return "AES" in output.split()
