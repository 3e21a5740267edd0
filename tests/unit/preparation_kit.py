"""What the tests of prompt preparation share: a small model's facts, parts whose bytes tell which tokens they are of, a fake
engine that refuses anything but the right parts, and a store filled with chosen ones."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from kakeya_zmq.blocks import Block, Chain, Part, RawPart, bind_parts, needed_parts
from kakeya_zmq.compat import Compatibility, chain_hashes
from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    Command,
    CommandFailed,
    Event,
    FinishImport,
    ImportAdvanced,
    ImportPrefix,
    ModelFacts,
    Prefill,
    PrefixImported,
    SegmentComputed,
    TokenArray,
)
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_values import IdAllocator, PeerView, PreparationSettings, PreparationTask, WorkerView
from kakeya_zmq.store import BlockStore
from wire.errors import CapacityError
from wire.ids import NodeId
from wire.job_seal import JobBinding, JobKeys
from wire.messages import CipherSuite, JobAccepted, PartKind, PartRef, PrefillPolicy, Requirement, SubmitJob, TransferGrant

BLOCK = 16
SEGMENT = 32
TENANT_KEY = b"t" * 32
JOB_KEYS = JobKeys(TENANT_KEY)
OWN_KEY = b"p" * 32
"""Identity key of the primary."""
COMPATIBILITY = Compatibility(
    model_id="m",
    model_revision="r",
    tokenizer_revision="t",
    quantization="none",
    kv_dtype="float32",
    cache_format_version="v",
    rope_hash="p",
    layer_geometry_hash="g",
    block_size_tokens=BLOCK,
    sink_size=0,
    window_size=0,
    tenant_namespace="default",
)
FINGERPRINT = COMPATIBILITY.fingerprint()
GRANT = TransferGrant(
    transfer_id=bytes(16), port=1, token="0" * 32, key=bytes(32), suite=CipherSuite.SECRETBOX, chunk_bytes=65_536
)
PART_BYTES = 48
ROW_BYTES = 3

FULL = Requirement(block_tokens=BLOCK, full=True)
WINDOWED = Requirement(block_tokens=BLOCK, full=True, window_tokens=24, sink_tokens=4)
STATEFUL = Requirement(block_tokens=BLOCK, full=True, state=True)
WINDOW_ONLY = Requirement(block_tokens=BLOCK, full=False, window_tokens=40, sink_tokens=4)
REQUIREMENTS = (FULL, WINDOWED, STATEFUL, WINDOW_ONLY)


def key_of(node_id: str) -> bytes:
    """Identity key of another node."""
    return hashlib.sha256(node_id.encode()).digest()


def binding_of(body: SubmitJob, worker: str, asker_key: bytes = OWN_KEY) -> JobBinding:
    return JobBinding(body.fingerprint, body.job_id, asker_key, key_of(worker))


def accepted(body: SubmitJob, worker: str, **fields: int) -> JobAccepted:
    """What a worker that has the tenant's key answers."""
    proof = JOB_KEYS.proof(binding_of(body, worker), body.prompt)
    return JobAccepted(proof=proof, **{"queued_jobs": 0, "queued_tokens": 0, "eta_ms": 0, **fields})


def facts_of(requirement: Requirement) -> ModelFacts:
    return ModelFacts(
        compatibility=COMPATIBILITY,
        requirement=requirement,
        part_bytes_per_token=(3, 3, 48),
        max_context_tokens=4096,
        eos_token_ids=(1,),
        vocabulary_size=1000,
        weight_bytes=1,
    )


def tokens_of(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)


def chain_of(tokens: TokenArray) -> Chain:
    return chain_hashes(tokens, FINGERPRINT, TENANT_KEY, BLOCK)


def payload_of(history: TokenArray, start: int, count: int, kind: PartKind) -> memoryview:
    """A row a token that depends on every token up to it, as K/V do; state depends on all up to the end of the part."""
    tokens = history[: start + count].astype("<i4").tobytes()
    if kind is PartKind.STATE:
        return memoryview(hashlib.sha256(tokens).digest() + bytes(PART_BYTES - 32))
    running = hashlib.sha256(bytes([kind]) + tokens[: 4 * start])
    payload = b""
    for at in range(4 * start, len(tokens), 4):
        running.update(tokens[at : at + 4])
        payload += running.copy().digest()[:ROW_BYTES]
    return memoryview(payload.ljust(PART_BYTES, b"\0"))


def is_payload_of(part: RawPart, history: TokenArray) -> bool:
    """Whether a part is of these tokens, as far as they go."""
    expected = payload_of(history, part.start, part.token_count, part.kind)
    known = len(history) - part.start
    cut = part.kind is not PartKind.STATE and known < part.token_count
    return part.payload[: ROW_BYTES * known] == expected[: ROW_BYTES * known] if cut else part.payload == expected


def part_of(history: TokenArray, chain: Chain, ref: PartRef) -> Part:
    block = next(block for block in chain.blocks if block.block_hash == ref.block_hash)
    payload = payload_of(history, block.start, block.token_count, ref.kind)
    return bind_parts(chain, [RawPart(ref.kind, block.start, block.token_count, payload)])[0]


def kinds_of(requirement: Requirement) -> tuple[PartKind, ...]:
    kinds = [PartKind.FULL] if requirement.full else []
    kinds += [PartKind.WINDOW] if requirement.window_tokens else []
    return (*kinds, *([PartKind.STATE] if requirement.state else []))


def all_parts(history: TokenArray, requirement: Requirement) -> tuple[Part, ...]:
    """Every part of the history's chain, tail included."""
    chain = chain_of(history)
    refs = [PartRef(block_hash=b.block_hash, kind=k) for b in chain.blocks for k in kinds_of(requirement)]
    return tuple(part_of(history, chain, ref) for ref in refs)


def new_store(parts: Iterable[Part] = (), max_bytes: int = 1 << 20) -> BlockStore:
    numbers = itertools.count(1)
    store = BlockStore(max_bytes, random_bytes=lambda count: next(numbers).to_bytes(count, "big"))
    for part in parts:
        with suppress(CapacityError):  # a small store holds what it can
            store.put(part, fingerprint=FINGERPRINT, now=0.0)
    return store


class FakeEngine:
    """One session that holds the KV of ``history[:position]``, and refuses parts that are not exactly that."""

    def __init__(self, history: TokenArray, requirement: Requirement, position: int) -> None:
        self.history = history
        self.requirement = requirement
        self.position = position
        self.import_fails = False
        self.early_import_fails = False
        self.building: tuple[int, list[RawPart]] | None = None
        self.prefill_fails_at: int | None = None
        self.commands: list[Command] = []

    def run(self, command: Command) -> Iterable[Event]:
        self.commands.append(command)
        match command:
            case ImportPrefix():
                yield self._import(command)
            case BeginImport(position=position):
                self.building = (position, [])
                yield ImportAdvanced(command.session_id, 1.0)
            case AddParts(parts=parts):
                assert self.building is not None
                self.building[1].extend(parts)
                yield ImportAdvanced(command.session_id, 1.0)
            case FinishImport():
                yield self._finish_import(command)
            case Prefill():
                yield from self._prefill(command)
            case _:
                raise AssertionError(f"unexpected command {type(command).__name__}")

    def _finish_import(self, command: FinishImport) -> Event:
        assert self.building is not None
        (position, parts), self.building = self.building, None
        if self.early_import_fails:
            return CommandFailed(command.session_id, "bad parts", self.position)
        ordered = tuple(sorted(parts, key=lambda part: (part.start, part.kind)))
        return self._import(ImportPrefix(command.session_id, position, ordered))

    def _import(self, command: ImportPrefix) -> Event:
        position = command.position
        chain = chain_of(self.history[:position])
        needed = needed_parts(chain, position, self.requirement)
        blocks = {block.block_hash: block for block in chain.blocks}
        expected = sorted((blocks[ref.block_hash].start, ref.kind, blocks[ref.block_hash].token_count) for ref in needed)
        given = [(part.start, part.kind, min(part.token_count, position - part.start)) for part in command.parts]
        assert given == expected, "an import must hold exactly the needed parts, in order"
        assert all(is_payload_of(part, self.history[:position]) for part in command.parts)
        if self.import_fails:
            self.position = 0
            return CommandFailed(command.session_id, "bad parts", 0)
        self.position = position
        return PrefixImported(command.session_id, position, 1.0)

    def _prefill(self, command: Prefill) -> Iterable[Event]:
        start = self.position
        end = start + len(command.tokens)
        assert np.array_equal(command.tokens, self.history[start:end]), "prefill must go on where the session stands"
        while self.position < end:
            if self.prefill_fails_at is not None and self.position >= self.prefill_fails_at:
                yield CommandFailed(command.session_id, "out of memory", self.position)
                return
            before = self.position
            self.position = min(end, (self.position // SEGMENT + 1) * SEGMENT)
            parts = self._captured(before, end) if command.capture else ()
            yield SegmentComputed(command.session_id, self.position, parts, 10.0)

    def _captured(self, before: int, end: int) -> tuple[RawPart, ...]:
        complete = [b for b in chain_of(self.history[: self.position]).blocks if before < b.end <= self.position]
        spans = [b for b in complete if b.token_count == BLOCK or b.end == end]
        return tuple(
            RawPart(kind, b.start, b.token_count, payload_of(self.history, b.start, b.token_count, kind))
            for b in spans
            for kind in kinds_of(self.requirement)
        )


def hash_tail_of(history: TokenArray) -> object:
    """The callback a preparation gets: hashes its own tokens under a parent of its own chain."""

    def hash_tail(parent_hash: bytes, start: int, count: int) -> bytes:
        blocks = chain_of(history[: start + count]).blocks
        assert blocks[-1].parent_hash == parent_hash
        return blocks[-1].block_hash

    return hash_tail


def tail_of(history: TokenArray, length: int) -> Block:
    """The last block of the chain over the first ``length`` tokens."""
    return chain_of(history[:length]).blocks[-1]


def preparation(
    history: TokenArray,
    requirement: Requirement,
    *,
    live: int = 0,
    store: BlockStore | None = None,
    policy: PrefillPolicy = PrefillPolicy.LOCAL_FALLBACK,
    caches: Iterable[str] = (),
    workers: Iterable[str] = (),
    settings: PreparationSettings | None = None,
    publish: bool = True,
    values: dict[str, object] | None = None,
    rates: MeasuredRates | None = None,
    ids: IdAllocator | None = None,
    hints: tuple[str, ...] = (),
    flights: Flights | None = None,
) -> PromptPreparation:
    task = PreparationTask(
        session_id="sess-1",
        tokens=history,
        live_position=live,
        chain=chain_of(history[:-1]),
        facts=facts_of(requirement),
        fingerprint=FINGERPRINT,
        policy=policy,
        hints=hints,
        publish=publish,
        caches=tuple(PeerView(NodeId(name), 1.0, 1000.0) for name in caches),
        workers=tuple(WorkerView(NodeId(name), key_of(name), prefill_tokens_per_second=1000.0) for name in workers),
        settings=settings or PreparationSettings(remote_minimum_tokens=8),
        job_keys=JOB_KEYS,
        identity_public_key=OWN_KEY,
    )
    known: dict[str, object] = {} if values is None else values
    return PromptPreparation(
        task,
        store=store,
        ids=ids or IdAllocator(itertools.count(1).__next__),
        rates=rates or MeasuredRates(),
        hash_tail=hash_tail_of(history),  # type: ignore[arg-type]
        random_bytes=bytes,
        set_value=known.__setitem__,
        flights=flights,
    )
