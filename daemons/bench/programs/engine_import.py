"""Reference for a remote hit: the same bytes imported in-process, plus one forward pass. No network, no other process.

It loads the model, fetches a prompt's parts from the cache peer once, keeps them, and then imports them again and again.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from daemons.bench.harness import serve
from daemons.bench.programs.fleet_client import FleetClient
from kakeya_zmq.blocks import RawPart
from kakeya_zmq.compat import block_hash, chain_hashes
from kakeya_zmq.engine import CloseSession, Command, CommandFailed, Decode, Engine, ImportPrefix, OpenSession, TokenDecoded
from kakeya_zmq.io.memory import tune_heap
from kakeya_zmq.protocol.prepare_values import PeerView, PreparationTask
from wire.errors import FailureCode, RequestFailed
from wire.keys import load_or_create_tenant_key
from wire.messages import PrefillPolicy

SESSION = "bench"


class EngineImport:
    """The program's state: an engine, and the parts of one prompt."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._parts: tuple[RawPart, ...] = ()
        self._tokens = np.empty(0, dtype=np.int32)

    def load(self, folder: str, threads: int) -> dict[str, object]:
        from kakeya_zmq.model.loader import load_engine

        self._engine = load_engine(Path(folder), blas_threads=threads)
        return {}

    def take(self, tokens: list[int], address: str, psk_file: str, tenant_key_file: str) -> dict[str, object]:
        """Fetch the prompt's parts from the cache peer and keep them."""
        assert self._engine is not None
        facts = self._engine.facts
        fingerprint = facts.compatibility.fingerprint()
        tenant_key = load_or_create_tenant_key(Path(tenant_key_file))
        self._tokens = np.array(tokens, dtype=np.int32)
        client = FleetClient(address, Path(psk_file))
        try:
            task = PreparationTask(
                session_id=SESSION,
                tokens=self._tokens,
                live_position=0,
                chain=chain_hashes(self._tokens[:-1], fingerprint, tenant_key, facts.requirement.block_tokens),
                facts=facts,
                fingerprint=fingerprint,
                policy=PrefillPolicy.REMOTE_REQUIRED,
                publish=False,
                caches=(PeerView(node_id=client.peer_id),),
            )

            def hash_tail(parent: bytes, start: int, count: int) -> bytes:
                return block_hash(self._tokens[start : start + count], fingerprint, parent, tenant_key)

            fetched = client.fetch(task, hash_tail)
        finally:
            client.close()
        self._parts = fetched.parts
        return {"moved_bytes": fetched.moved_bytes}

    def measure(self) -> dict[str, object]:
        """Import, then decode one token. ``wall_s``: both; ``token``: what came out."""
        self._run(OpenSession(SESSION))
        started = time.perf_counter()
        self._run(ImportPrefix(SESSION, len(self._tokens) - 1, self._parts))
        token = self._run(Decode(SESSION, int(self._tokens[-1]), 1, ()))
        wall_s = time.perf_counter() - started
        self._run(CloseSession(SESSION))
        return {"wall_s": wall_s, "token": token}

    def _run(self, command: Command) -> int | None:
        assert self._engine is not None
        token: int | None = None
        for event in self._engine.handle(command):
            match event:
                case CommandFailed(message=message):
                    raise RequestFailed(FailureCode.INTERNAL, message)
                case TokenDecoded(token=token):
                    return token  # the clock stops at the first token, as a user's does
                case _:
                    pass
        return None


def main() -> None:
    tune_heap()
    program = EngineImport()
    serve({"load": program.load, "take": program.take, "measure": program.measure})


if __name__ == "__main__":
    main()
