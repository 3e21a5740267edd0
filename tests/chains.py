"""Made-up chains and parts for tests of everything that never looks into a payload."""

from __future__ import annotations

import hashlib
import random

import numpy as np

from kakeya_zmq.blocks import Chain, Part, RawPart, bind_parts
from kakeya_zmq.compat import chain_hashes
from wire.messages import PartKind

FINGERPRINT = bytes(range(32))
TENANT_KEY = b"tenant key for tests"


def make_chain(tokens: int, block_tokens: int = 16, *, seed: int = 0, shared_tokens: int = 0) -> Chain:
    """A chain over random tokens; chains of different seeds share their first ``shared_tokens``."""
    shared = np.random.default_rng(99).integers(0, 1000, shared_tokens, dtype=np.int32)
    own = np.random.default_rng(seed).integers(0, 1000, tokens - shared_tokens, dtype=np.int32)
    return chain_hashes(np.concatenate([shared, own]), FINGERPRINT, TENANT_KEY, block_tokens)


def make_parts(chain: Chain, *, length_bytes: int = 10, kinds: tuple[PartKind, ...] = (PartKind.FULL,)) -> tuple[Part, ...]:
    """Parts of every block of the chain, ``length_bytes`` each, with contents that follow from the block's hash."""
    raw = [
        RawPart(kind, block.start, block.token_count, memoryview(_content(block.block_hash, kind, length_bytes)))
        for block in chain.blocks
        for kind in kinds
    ]
    return bind_parts(chain, raw)


def _content(block_hash: bytes, kind: PartKind, length_bytes: int) -> bytes:
    return random.Random(hashlib.sha256(block_hash + bytes([kind])).digest()).randbytes(length_bytes)


class CountingBytes:
    """Stands in for the random source: every call gives other bytes, every run the same ones."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, count: int) -> bytes:
        self._calls += 1
        return self._calls.to_bytes(count, "big")
