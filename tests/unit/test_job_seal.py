"""Prompts of jobs are sealed for holders of the tenant's key, and bound to one job between two identities."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import AuthenticationError, LocalProtocolError
from wire.job_seal import (
    PREFIX_BYTES,
    PROOF_BYTES,
    SEALED_PROMPT_OVERHEAD_BYTES,
    JobBinding,
    JobKeys,
    sealed_token_count,
)

BINDING = JobBinding(b"f" * 32, b"j" * 16, b"a" * 32, b"w" * 32)
OTHERS = {
    "fingerprint": replace(BINDING, fingerprint=b"g" * 32),
    "job": replace(BINDING, job_id=b"k" * 16),
    "asker": replace(BINDING, asker_key=b"b" * 32),
    "worker": replace(BINDING, worker_key=b"x" * 32),
    "both identities changed over": replace(BINDING, asker_key=b"w" * 32, worker_key=b"a" * 32),
}
KEYS = JobKeys(b"t" * 32)


@given(tokens=st.binary(max_size=400), prefix=st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_what_was_sealed_opens_with_the_same_key_and_binding_only(tokens: bytes, prefix: bytes) -> None:
    sealed = KEYS.seal(BINDING, prefix, tokens)
    assert len(sealed) == len(tokens) + SEALED_PROMPT_OVERHEAD_BYTES
    assert sealed_token_count(sealed) == len(tokens) // 4
    assert KEYS.open(BINDING, sealed) == tokens
    for binding in OTHERS.values():
        with pytest.raises(AuthenticationError):
            KEYS.open(binding, sealed)
    with pytest.raises(AuthenticationError):
        JobKeys(b"u" * 32).open(BINDING, sealed)


@given(position=st.integers(min_value=0), length=st.integers(min_value=0))
def test_changed_or_cut_it_does_not_open(position: int, length: int) -> None:
    sealed = KEYS.seal(BINDING, bytes(PREFIX_BYTES), b"tokens of a prompt")
    at = position % len(sealed)
    changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
    for broken in (changed, sealed[: length % len(sealed)]):
        with pytest.raises(AuthenticationError):
            KEYS.open(BINDING, broken)


def test_a_proof_is_of_one_submission_one_binding_and_one_key() -> None:
    sealed, other = (KEYS.seal(BINDING, bytes([n]) * PREFIX_BYTES, b"tokens") for n in (1, 2))
    proofs = [KEYS.proof(binding, sealed) for binding in (BINDING, *OTHERS.values())]
    proofs += [KEYS.proof(BINDING, other), JobKeys(b"u" * 32).proof(BINDING, sealed)]
    assert len(set(proofs)) == len(proofs)
    assert {len(proof) for proof in proofs} == {PROOF_BYTES}


def test_wrong_lengths_are_refused_before_anything_is_sealed() -> None:
    with pytest.raises(LocalProtocolError):
        JobKeys(b"short")
    with pytest.raises(LocalProtocolError):
        KEYS.seal(BINDING, b"short", b"tokens")
    for field in ("fingerprint", "job_id", "asker_key", "worker_key"):
        with pytest.raises(LocalProtocolError):
            replace(BINDING, **{field: b"short"})


def test_nothing_secret_is_shown() -> None:
    assert repr(KEYS) == "JobKeys()"
