"""What a tenant's key protects in a prefill job: the prompt on its way, and that whoever answers has the key.

A primary finds workers by their cards, which any member can copy. So the prompt travels sealed for holders of the tenant's
key, and the worker proves that it has the key before anything it sends is used. Two keys of 32 bytes come from the
tenant's: BLAKE2b-256("", key=tenant's key, person=purpose).

Everything is bound to one job between two identities (:class:`JobBinding`): what an impostor was sent opens nowhere else,
neither under its own name nor at the worker whose card it copied, and a proof is worth nothing to anybody else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from wire import seal
from wire.errors import AuthenticationError, LocalProtocolError
from wire.limits import TOKEN_BYTES

PREFIX_BYTES: Final = 24
"""Random bytes in front of the seal: they make its nonce, and are the challenge that the proof answers."""
SEALED_PROMPT_OVERHEAD_BYTES: Final = PREFIX_BYTES + seal.TAG_BYTES
PROOF_BYTES: Final = 32
_PERSON_PROMPT: Final = b"kz job prompt"
_PERSON_PROOF: Final = b"kz job proof"
_FIELD_BYTES: Final = (32, 16, 32, 32)


@dataclass(frozen=True, slots=True)
class JobBinding:
    """One job between two nodes, each named by its identity key as the session's handshake has proven it.

    Raises:
        LocalProtocolError: a field has a wrong length.
    """

    fingerprint: bytes
    """Of the namespace, 32 bytes."""
    job_id: bytes
    """16 bytes."""
    asker_key: bytes
    """Identity key of the node that asks, 32 bytes."""
    worker_key: bytes
    """Identity key of the node that is asked, 32 bytes."""

    def __post_init__(self) -> None:
        fields = (self.fingerprint, self.job_id, self.asker_key, self.worker_key)
        if tuple(map(len, fields)) != _FIELD_BYTES:
            raise LocalProtocolError("a job is bound to a fingerprint, an id and two identity keys")

    def pack(self) -> bytes:
        """112 bytes; every field has a fixed length."""
        return self.fingerprint + self.job_id + self.asker_key + self.worker_key


class JobKeys:
    """The two keys that jobs of one tenant use.

    Args:
        tenant_key: 32 bytes.

    Raises:
        LocalProtocolError: it has another length.
    """

    __slots__ = ("_prompt_key", "_proof_key")

    def __init__(self, tenant_key: bytes) -> None:
        if len(tenant_key) != seal.KEY_BYTES:
            raise LocalProtocolError(f"a tenant's key has {seal.KEY_BYTES} bytes, not {len(tenant_key)}")
        self._prompt_key = _derive(tenant_key, _PERSON_PROMPT)
        self._proof_key = _derive(tenant_key, _PERSON_PROOF)

    def __repr__(self) -> str:
        return "JobKeys()"

    def seal(self, binding: JobBinding, prefix: bytes, tokens: bytes) -> bytes:
        """Seal a prompt for the worker of ``binding``.

        Args:
            prefix: PREFIX_BYTES random bytes, used once.
            tokens: packed.

        Returns:
            ``prefix ‖ secretbox``, SEALED_PROMPT_OVERHEAD_BYTES longer than ``tokens``.
        """
        if len(prefix) != PREFIX_BYTES:
            raise LocalProtocolError(f"the prefix has {PREFIX_BYTES} bytes, not {len(prefix)}")
        return prefix + seal.seal(self._prompt_key, _nonce(binding, prefix), tokens)

    def open(self, binding: JobBinding, sealed: bytes) -> bytes:
        """The tokens that :meth:`seal` sealed.

        Raises:
            AuthenticationError: they were sealed with another key, or for another job, asker or worker.
        """
        prefix, box = sealed[:PREFIX_BYTES], sealed[PREFIX_BYTES:]
        if len(prefix) != PREFIX_BYTES:
            raise AuthenticationError("the seal is broken")
        return seal.open_sealed(self._prompt_key, _nonce(binding, prefix), box)

    def proof(self, binding: JobBinding, sealed: bytes) -> bytes:
        """PROOF_BYTES that say: the worker of ``binding`` has the tenant's key, and has seen this very submission."""
        data = binding.pack() + sealed[:PREFIX_BYTES]
        return hashlib.blake2b(data, key=self._proof_key, person=_PERSON_PROOF, digest_size=PROOF_BYTES).digest()


def sealed_token_count(sealed: bytes) -> int:
    """How many tokens are under the seal, for those who do not open it; 0 when it is none."""
    return max(0, len(sealed) - SEALED_PROMPT_OVERHEAD_BYTES) // TOKEN_BYTES


def _derive(tenant_key: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(b"", key=tenant_key, person=person, digest_size=seal.KEY_BYTES).digest()


def _nonce(binding: JobBinding, prefix: bytes) -> bytes:
    return seal.header_nonce(binding.pack() + prefix)
