"""Ours: a block store filled with small parts of many prompts; measures putting, looking up and memory."""

from __future__ import annotations

import gc
import hashlib
import os
import secrets
import statistics
import time
from collections.abc import Iterator

import numpy as np

from daemons.bench.harness import resident_bytes, serve
from kakeya_zmq.blocks import ROOT_HASH, Part, part_checksum
from kakeya_zmq.compat import chain_hashes
from kakeya_zmq.coverage import best_boundary
from kakeya_zmq.store import BlockStore
from kakeya_zmq.store_values import BYTES_PER_PART
from wire.errors import FailureCode, RequestFailed
from wire.limits import BLOCK_TOKENS_DEFAULT
from wire.messages import PartKind, PartMeta, Requirement

FINGERPRINT = bytes(32)
TENANT_KEY = b"a tenant of the bench"
PAYLOAD_BYTES = 64
PROMPT_BLOCKS = 64
"""4,096 tokens in blocks of 64."""
REQUIREMENT = Requirement(block_tokens=BLOCK_TOKENS_DEFAULT, full=True)


def made_up_parts(blocks: int) -> Iterator[Part]:
    """Parts of unrelated prompts of 64 blocks; every byte string is made anew, as if it had come from the wire."""
    for number in range(blocks):
        place = number % PROMPT_BLOCKS
        if place == 0:
            parent = ROOT_HASH
        block_hash = secrets.token_bytes(32)
        yield _part(block_hash, bytes(bytearray(parent)), place * BLOCK_TOKENS_DEFAULT)
        parent = block_hash


def _part(block_hash: bytes, parent_hash: bytes, start: int) -> Part:
    payload = secrets.token_bytes(PAYLOAD_BYTES)
    meta = PartMeta(
        block_hash=block_hash,
        parent_hash=parent_hash,
        kind=PartKind.FULL,
        start=start,
        token_count=BLOCK_TOKENS_DEFAULT,
        length_bytes=PAYLOAD_BYTES,
        digest=hashlib.sha256(payload).digest(),
        checksum=part_checksum(payload),
    )
    return Part(meta=meta, payload=memoryview(payload))


class StoreLoad:
    """The program's state: one store."""

    def __init__(self) -> None:
        self._store = self._fresh(1)
        self._prompt = np.empty(0, dtype=np.int32)

    def memory(self, blocks: int) -> dict[str, object]:
        """Fill a fresh store. ``overhead_bytes`` a block beyond its payload: what the whole process grew by."""
        gc.collect()
        before_bytes = resident_bytes(os.getpid())
        self._store = self._fresh(blocks + PROMPT_BLOCKS)
        for part in made_up_parts(blocks):
            self._store.put(part, fingerprint=FINGERPRINT, now=0.0)
        gc.collect()
        grown_bytes = resident_bytes(os.getpid()) - before_bytes
        self._add_prompt()
        return {"overhead_bytes": grown_bytes / blocks - PAYLOAD_BYTES, "blocks": self._store.stats().block_count}

    def put(self, blocks: int) -> dict[str, object]:
        """Blocks a second into a fresh store; making the parts is not part of it."""
        parts = list(made_up_parts(blocks))
        store = self._fresh(blocks)
        started = time.perf_counter()
        for part in parts:
            store.put(part, fingerprint=FINGERPRINT, now=0.0)
        return {"blocks_per_second": blocks / (time.perf_counter() - started)}

    def lookup(self, times: int) -> dict[str, object]:
        """Seconds, medians of ``times`` lookups of the prompt: hashing its tokens, then how far the store covers them."""
        hashing: list[float] = []
        finding: list[float] = []
        has = self._store.presence(FINGERPRINT)
        for _ in range(times):
            started = time.perf_counter()
            chain = chain_hashes(self._prompt, FINGERPRINT, TENANT_KEY, BLOCK_TOKENS_DEFAULT)
            hashed = time.perf_counter()
            position = best_boundary(chain, REQUIREMENT, has)
            ended = time.perf_counter()
            if position != len(self._prompt):
                raise RequestFailed(FailureCode.INTERNAL, "the store lost a block")
            hashing.append(hashed - started)
            finding.append(ended - hashed)
        return {"hashing_s": statistics.median(hashing), "finding_s": statistics.median(finding)}

    def _add_prompt(self) -> None:
        tokens = np.random.default_rng(3).integers(0, 262_144, PROMPT_BLOCKS * BLOCK_TOKENS_DEFAULT)
        self._prompt = tokens.astype(np.int32)
        for block in chain_hashes(self._prompt, FINGERPRINT, TENANT_KEY, BLOCK_TOKENS_DEFAULT).blocks:
            part = _part(block.block_hash, block.parent_hash, block.start)
            self._store.put(part, fingerprint=FINGERPRINT, now=0.0)

    def _fresh(self, blocks: int) -> BlockStore:
        return BlockStore(blocks * BYTES_PER_PART, random_bytes=secrets.token_bytes)


def main() -> None:
    program = StoreLoad()
    serve({"memory": program.memory, "put": program.put, "lookup": program.lookup})


if __name__ == "__main__":
    main()
