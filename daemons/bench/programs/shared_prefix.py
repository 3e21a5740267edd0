"""Ours: prompts that share their beginning, computed by the real engine on a tiny random model, in a cache peer's store.

The model is a gemma3_text of four layers (two with a sliding window), so that blocks have FULL and WINDOW parts and a tail,
as the demo model's have; its size changes the bytes of a token and nothing else.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from daemons.bench.harness import serve
from daemons.bench.programs.fleet_client import FleetClient
from kakeya_zmq.blocks import Chain, Part, RawPart, bind_parts, needed_parts, raw_part
from kakeya_zmq.compat import block_hash, chain_hashes
from kakeya_zmq.engine import (
    CloseSession,
    Command,
    CommandFailed,
    Engine,
    ImportPrefix,
    ModelFacts,
    OpenSession,
    Prefill,
    SegmentComputed,
    TokenArray,
)
from kakeya_zmq.protocol.prepare_values import PeerView, PreparationTask
from kakeya_zmq.store import BlockStore
from wire.errors import FailureCode, RequestFailed
from wire.limits import GIB
from wire.messages import PrefillPolicy

TENANT_KEY = b"a tenant of the bench"
SESSION = "bench"
TINY: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "vocab_size": 512,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
}


def tiny_model(threads: int) -> Any:
    from kakeya_zmq.model.blas import prepare_blas

    prepare_blas(threads)
    import mlx.core as mx
    from mlx_lm.models import gemma3_text

    mx.random.seed(1)
    return gemma3_text.Model(gemma3_text.ModelArgs.from_dict(TINY))


def tiny_engine(threads: int) -> Engine:
    model = tiny_model(threads)
    from kakeya_zmq.model.loader import engine_from_model

    return engine_from_model(model, name="bench-tiny")


def write_tiny_model(folder: str, threads: int) -> dict[str, object]:
    """The same model as a folder that daemons can load."""
    model = tiny_model(threads)
    import mlx.core as mx
    from mlx.utils import tree_flatten

    path = Path(folder)
    path.mkdir(parents=True)
    mx.eval(model.parameters())
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return {}


class SharedPrefix:
    """The program's state: an engine, the connection to the cache peer, and every part made so far."""

    def __init__(self, address: str, psk_file: Path) -> None:
        self._client = FleetClient(address, psk_file)
        self._engine: Engine | None = None
        self._held: dict[bytes, dict[int, Part]] = {}
        self._prompts: list[tuple[TokenArray, Chain]] = []

    def load(self, threads: int) -> dict[str, object]:
        self._engine = tiny_engine(threads)
        sizes = self._facts.part_bytes_per_token
        return {"token_bytes": sizes[0] + sizes[1]}

    def publish(self, prompts: int, shared_tokens: int, own_tokens: int) -> dict[str, object]:
        """Compute and publish that many prompts. ``moved_bytes`` and ``made_bytes`` (all parts of it) of each."""
        shared = np.random.default_rng(10).integers(0, 512, shared_tokens, dtype=np.int32)
        moved: list[int] = []
        made: list[int] = []
        held: dict[bytes, dict[int, Part]] = {}
        for number in range(prompts):
            own = np.random.default_rng(100 + number).integers(0, 512, own_tokens, dtype=np.int32)
            tokens = np.concatenate([shared, own])
            chain = chain_hashes(tokens[:-1], self._fingerprint, TENANT_KEY, self._facts.requirement.block_tokens)
            for part in self._compute(tokens, chain, shared_tokens if number else 0, held):
                held.setdefault(part.meta.block_hash, {})[part.meta.kind] = part
            parts = [part for block in chain.blocks for part in held[block.block_hash].values()]
            self._prompts.append((tokens, chain))
            moved.append(self._client.publish(parts, self._fingerprint))
            made.append(sum(part.meta.length_bytes for part in parts))
        self._held = held
        return {"moved_bytes": moved, "made_bytes": made}

    def fetch_second(self) -> dict[str, object]:
        """Fetch prompt 2 with what prompt 1 left here. ``needed_bytes``: all that a hit of prompt 2 needs."""
        store = BlockStore(GIB, random_bytes=secrets.token_bytes)
        for block in self._prompts[0][1].blocks:
            for part in self._held[block.block_hash].values():
                store.put(part, fingerprint=self._fingerprint, now=0.0)
        tokens, chain = self._prompts[1]
        task = PreparationTask(
            session_id=SESSION,
            tokens=tokens,
            live_position=0,
            chain=chain,
            facts=self._facts,
            fingerprint=self._fingerprint,
            policy=PrefillPolicy.REMOTE_REQUIRED,
            publish=False,
            caches=(PeerView(node_id=self._client.peer_id),),
        )

        def hash_tail(parent: bytes, start: int, count: int) -> bytes:
            return block_hash(tokens[start : start + count], self._fingerprint, parent, TENANT_KEY)

        fetched = self._client.fetch(task, hash_tail, store)
        return {
            "moved_bytes": fetched.moved_bytes,
            "needed_bytes": sum(part.payload.nbytes for part in fetched.parts),
        }

    @property
    def _facts(self) -> ModelFacts:
        assert self._engine is not None
        return self._engine.facts

    @property
    def _fingerprint(self) -> bytes:
        return self._facts.compatibility.fingerprint()

    def _compute(
        self, tokens: TokenArray, chain: Chain, position: int, held: dict[bytes, dict[int, Part]]
    ) -> tuple[Part, ...]:
        """The parts of a prompt from ``position`` on; what is before is imported."""
        self._run(OpenSession(SESSION))
        if position:
            refs = needed_parts(chain, position, self._facts.requirement)
            prefix = sorted((held[ref.block_hash][ref.kind] for ref in refs), key=lambda p: (p.meta.start, p.meta.kind))
            self._run(ImportPrefix(SESSION, position, tuple(raw_part(part) for part in prefix)))
        raw = self._run(Prefill(SESSION, tokens[position:-1]))
        self._run(CloseSession(SESSION))
        return bind_parts(chain, raw)

    def _run(self, command: Command) -> Sequence[RawPart]:
        assert self._engine is not None
        parts: list[RawPart] = []
        for event in self._engine.handle(command):
            match event:
                case CommandFailed(message=message):
                    raise RequestFailed(FailureCode.INTERNAL, message)
                case SegmentComputed(parts=made):
                    parts.extend(made)
                case _:
                    pass
        return parts

    def close(self) -> None:
        self._client.close()


def main() -> None:
    program = SharedPrefix(sys.argv[1], Path(sys.argv[2]))
    try:
        serve(
            {
                "load": program.load,
                "write_model": write_tiny_model,
                "publish": program.publish,
                "fetch_second": program.fetch_second,
            }
        )
    finally:
        program.close()


if __name__ == "__main__":
    main()
