"""An engine whose parts are stored packed: encodes what a model's engine captures and decodes what it imports.

It stands between the model's engine and everything else, on the engine's thread, so that stores, lanes and peers only ever
see stored bytes, and their digests are over those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.codecs.geometry import RowGeometry
from kakeya_zmq.codecs.registry import StorageCodec, decode_part, encode_part, format_version
from kakeya_zmq.engine import (
    AddParts,
    Command,
    Engine,
    EngineMemory,
    Event,
    ImportPrefix,
    ModelFacts,
    PartsCaptured,
    SegmentComputed,
)
from wire.errors import KakeyaError
from wire.messages import PartKind

ESTIMATE_TOKENS = 64
"""Tokens of the made-up part that tells how large stored parts will be."""


class CodecEngine:
    """Implements :class:`kakeya_zmq.engine.Engine` around another one.

    Args:
        engine: the model's.
        codec: how FULL and WINDOW parts are stored; STATE parts stay as they are.
        geometry: rows of a kind, None where the model has none.

    Raises:
        ModelError: the codec cannot take this model's rows.
    """

    def __init__(self, engine: Engine, codec: StorageCodec, geometry: Callable[[PartKind], RowGeometry | None]) -> None:
        self._engine = engine
        self._codec = codec
        self._geometry = {kind: geometry(kind) for kind in (PartKind.FULL, PartKind.WINDOW)}
        for rows in self._geometry.values():
            if rows is not None:
                codec.check(rows)
        self._facts = self._stored_facts(engine.facts)

    @property
    def facts(self) -> ModelFacts:
        """The model's, with the codec's format version and sizes of stored parts."""
        return self._facts

    def handle(self, command: Command) -> Iterator[Event]:
        match command:
            case ImportPrefix() | AddParts():
                yield from self._engine.handle(replace(command, parts=tuple(self._decode(part) for part in command.parts)))
            case _:
                for event in self._engine.handle(command):
                    yield self._encode_event(event)

    def session_kv_bytes(self, session_id: str) -> int:
        return self._engine.session_kv_bytes(session_id)

    def session_position(self, session_id: str) -> int | None:
        return self._engine.session_position(session_id)

    def memory(self) -> EngineMemory:
        return self._engine.memory()

    def close(self) -> None:
        self._engine.close()

    def _decode(self, part: RawPart) -> RawPart:
        try:
            payload = decode_part(self._codec, part.payload, self._geometry.get(part.kind), part.token_count)
        except KakeyaError:
            # Without its bytes the engine refuses the part, and with it the import, as it refuses every damaged part.
            payload = memoryview(b"")
        return replace(part, payload=payload)

    def _encode_event(self, event: Event) -> Event:
        match event:
            case SegmentComputed() | PartsCaptured():
                parts = tuple(self._encoded(event.parts))
                return replace(event, parts=parts, parts_not_encoded=len(event.parts) - len(parts))
            case _:
                return event

    def _encoded(self, parts: tuple[RawPart, ...]) -> Iterator[RawPart]:
        """Without those that the codec refuses (not finite numbers): they are not stored, which is a later miss."""
        for part in parts:
            try:
                payload = encode_part(self._codec, part.payload, self._geometry.get(part.kind), part.token_count)
            except KakeyaError:
                continue
            yield replace(part, payload=payload)

    def _stored_facts(self, facts: ModelFacts) -> ModelFacts:
        sizes = list(facts.part_bytes_per_token)
        raw = [0, 0]
        for kind, rows in self._geometry.items():
            if rows is None:
                continue
            raw_bytes = rows.raw_bytes(ESTIMATE_TOKENS)
            # Noise packs worst, so the estimate errs on the large side.
            noise = np.random.default_rng(0).standard_normal(raw_bytes // rows.itemsize).astype(np.float32)
            sample = noise.view(np.uint32) >> 16 if rows.dtype == "bfloat16" else noise
            packed = sample.astype({"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}[rows.dtype]).tobytes()
            stored = encode_part(self._codec, memoryview(packed), rows, ESTIMATE_TOKENS)
            sizes[kind] = -(-stored.nbytes // ESTIMATE_TOKENS)
            if self._codec.name != "none":
                raw[kind] = rows.raw_bytes(1)
        return replace(
            facts,
            compatibility=replace(facts.compatibility, cache_format_version=format_version(self._codec)),
            part_bytes_per_token=(sizes[0], sizes[1], sizes[2]),
            raw_bytes_per_token=(raw[0], raw[1]),
        )
