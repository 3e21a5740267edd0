"""Ours: made-up parts, published into a cache peer and fetched from it, sealed, verified and ready for an engine."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from daemons.bench.harness import resident_bytes, serve
from daemons.bench.programs.fleet_client import FleetClient
from daemons.memory import peak_memory_bytes
from kakeya_zmq.blocks import Chain, Part, RawPart, bind_parts
from kakeya_zmq.compat import Compatibility, block_hash, chain_hashes
from kakeya_zmq.engine import ModelFacts, TokenArray
from kakeya_zmq.io.memory import tune_heap
from kakeya_zmq.protocol.prepare_values import PeerView, PreparationSettings, PreparationTask
from wire.limits import BLOCK_TOKENS_DEFAULT, GIB
from wire.messages import CipherSuite, PartKind, PrefillPolicy, Requirement

TENANT_KEY = b"a tenant of the bench"
COMPATIBILITY = Compatibility(
    model_id="bench",
    model_revision="none",
    tokenizer_revision="none",
    quantization="none",
    kv_dtype="bytes",
    cache_format_version="bench",
    rope_hash="none",
    layer_geometry_hash="none",
    block_size_tokens=BLOCK_TOKENS_DEFAULT,
    sink_size=0,
    window_size=0,
    tenant_namespace="bench",
)
FINGERPRINT = COMPATIBILITY.fingerprint()


def facts(length_bytes: int) -> ModelFacts:
    """A model whose only parts are FULL parts of ``length_bytes``."""
    return ModelFacts(
        compatibility=COMPATIBILITY,
        requirement=Requirement(block_tokens=BLOCK_TOKENS_DEFAULT, full=True),
        part_bytes_per_token=(length_bytes // BLOCK_TOKENS_DEFAULT, 0, 0),
        max_context_tokens=1_000_000,
        eos_token_ids=(),
        vocabulary_size=1_000_000,
        weight_bytes=0,
    )


@lru_cache
def prompt(count: int, length_bytes: int) -> tuple[TokenArray, Chain]:
    """Tokens of ``count`` blocks and one more, and the chain of the blocks; other sizes are other prompts."""
    random = np.random.default_rng((count, length_bytes))
    tokens = random.integers(0, 1_000_000, count * BLOCK_TOKENS_DEFAULT + 1, dtype=np.int32)
    return tokens, chain_hashes(tokens[:-1], FINGERPRINT, TENANT_KEY, BLOCK_TOKENS_DEFAULT)


def make_parts(chain: Chain, length_bytes: int) -> tuple[Part, ...]:
    arena = np.random.default_rng(1).integers(0, 256, size=len(chain.blocks) * length_bytes, dtype=np.uint8).data
    raw = [
        RawPart(PartKind.FULL, block.start, block.token_count, arena[i * length_bytes : (i + 1) * length_bytes].toreadonly())
        for i, block in enumerate(chain.blocks)
    ]
    return bind_parts(chain, raw)


class SealedFetch:
    """The program's state: one connection, and the parts that came last."""

    def __init__(self, address: str, psk_file: Path) -> None:
        self._client = FleetClient(address, psk_file)
        self._held: tuple[RawPart, ...] = ()

    def publish(self, count: int, length_bytes: int) -> dict[str, object]:
        _, chain = prompt(count, length_bytes)
        return {"moved_bytes": self._client.publish(make_parts(chain, length_bytes), FINGERPRINT)}

    def fetch(self, count: int, length_bytes: int, suite: str) -> dict[str, object]:
        """``wall_s``: request to done. ``cpu_s``: of this process. ``peak_growth_bytes``: over what it held before."""
        self._held = ()
        suites = {"auto": PreparationSettings().suites, "secretbox": (CipherSuite.SECRETBOX,)}[suite]
        tokens, chain = prompt(count, length_bytes)
        task = PreparationTask(
            session_id="bench",
            tokens=tokens,
            live_position=0,
            chain=chain,
            facts=facts(length_bytes),
            fingerprint=FINGERPRINT,
            policy=PrefillPolicy.REMOTE_REQUIRED,
            publish=False,
            caches=(PeerView(node_id=self._client.peer_id),),
            settings=PreparationSettings(suites=suites, max_import_bytes=8 * GIB),
        )
        resident, cpu_s = resident_bytes(os.getpid()), time.process_time()

        def hash_tail(parent: bytes, start: int, size: int) -> bytes:
            return block_hash(tokens[start : start + size], FINGERPRINT, parent, TENANT_KEY)

        fetched = self._client.fetch(task, hash_tail)
        cpu_s = time.process_time() - cpu_s
        self._held = fetched.parts
        return {
            "wall_s": fetched.elapsed_s,
            "cpu_s": cpu_s,
            "moved_bytes": fetched.moved_bytes,
            "peak_growth_bytes": peak_memory_bytes() - resident,
        }

    def digest(self) -> dict[str, object]:
        """SHA-256 over the payloads that came last, in prefix order."""
        digest = hashlib.sha256()
        for part in self._held:
            digest.update(part.payload)
        return {"digest": digest.hexdigest()}

    def close(self) -> None:
        self._client.close()


def main() -> None:
    tune_heap()  # as every daemon does; references do too
    program = SealedFetch(sys.argv[1], Path(sys.argv[2]))
    try:
        serve({"publish": program.publish, "fetch": program.fetch, "digest": program.digest})
    finally:
        program.close()


if __name__ == "__main__":
    main()
