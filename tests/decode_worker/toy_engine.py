"""An engine without a model: its KV is the list of its tokens, and what it samples is a hash of that list.

So everything that a journal can get wrong (a token too many, too few, another order, another seed, a draw too many) gives
other tokens. Prefill runs on an absolute grid as the real one does. Some tokens make it fail.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.compat import Compatibility
from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    Capture,
    CloseSession,
    Command,
    CommandFailed,
    Decode,
    DecodeFinished,
    EngineMemory,
    Event,
    FinishImport,
    ImportAdvanced,
    ImportPrefix,
    ModelFacts,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    SegmentComputed,
    SessionReady,
    TokenDecoded,
)
from wire.messages import PartKind, Requirement, StopReason

BLOCK = 4
SEGMENT = 8
CONTEXT = 200
VOCABULARY = 1000
HANG, EXIT, BUG, FAIL = 990, 991, 992, 993
"""Tokens: a prefill that runs one of them never ends, ends the process, raises, or fails and empties the session."""

FACTS = ModelFacts(
    compatibility=Compatibility("toy", "r", "t", "none", "float32", "v", "h", "g", BLOCK, 0, 0, "default"),
    requirement=Requirement(block_tokens=16, full=True),
    part_bytes_per_token=(4, 0, 0),
    max_context_tokens=CONTEXT,
    eos_token_ids=(),
    vocabulary_size=VOCABULARY,
    weight_bytes=1,
)


@dataclass
class _Session:
    tokens: list[int] = field(default_factory=list)
    """Whose KV is held."""
    importing: tuple[int, dict[int, list[int]]] | None = None
    busy: bool = False


class ToyEngine:
    """Implements :class:`kakeya_zmq.engine.Engine`."""

    def __init__(self, facts: ModelFacts = FACTS) -> None:
        self._facts = facts
        self._sessions: dict[str, _Session] = {}

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def session_kv_bytes(self, session_id: str) -> int:
        return 4 * (self.session_position(session_id) or 0)

    def session_position(self, session_id: str) -> int | None:
        session = self._sessions.get(session_id)
        return len(session.tokens) if session is not None else None

    def memory(self) -> EngineMemory:
        return EngineMemory(active_bytes=sum(len(session.tokens) for session in self._sessions.values()))

    def close(self) -> None:
        self._sessions.clear()

    def handle(self, command: Command) -> Iterator[Event]:
        session_id = command.session_id
        session = self._sessions.get(session_id)
        if isinstance(command, OpenSession):
            if session is not None:
                yield CommandFailed(session_id, "the session is already open", len(session.tokens))
                return
            self._sessions[session_id] = _Session()
            yield SessionReady(session_id)
            return
        if session is None or session.busy:
            yield CommandFailed(session_id, "no such session, or busy", len(session.tokens) if session else 0)
            return
        session.busy = True
        try:
            yield from self._run(session, command)
        finally:
            session.busy = False

    def _run(self, session: _Session, command: Command) -> Iterator[Event]:
        session_id = command.session_id
        if not isinstance(command, AddParts | FinishImport):
            session.importing = None
        match command:
            case ImportPrefix() | BeginImport() | AddParts() | FinishImport():
                yield self._import(session, command)
            case Prefill(tokens=tokens):
                yield from self._prefill(session, session_id, [int(token) for token in tokens])
            case Decode():
                yield from self._decode(session, command)
            case Capture(start=start):
                yield from self._capture(session, session_id, start)
            case CloseSession():
                del self._sessions[session_id]
                yield SessionReady(session_id)
            case OpenSession():
                raise AssertionError

    def _import(self, session: _Session, command: ImportPrefix | BeginImport | AddParts | FinishImport) -> Event:
        session_id = command.session_id
        if isinstance(command, ImportPrefix):
            session.tokens = []
            session.importing = (command.position, {})
        if isinstance(command, BeginImport):
            session.importing = (command.position, {})
            return ImportAdvanced(session_id, 0.0)
        if session.importing is None:
            return CommandFailed(session_id, "no import was begun", len(session.tokens))
        position, blocks = session.importing
        if isinstance(command, ImportPrefix | AddParts):
            for part in command.parts:
                blocks[part.start] = np.frombuffer(part.payload, np.int32).tolist()
            if isinstance(command, AddParts):
                return ImportAdvanced(session_id, 0.0)
        tokens = [token for start in sorted(blocks) for token in blocks[start]]
        session.importing = None
        if len(tokens) != position:
            return CommandFailed(session_id, "parts are missing", len(session.tokens))
        session.tokens = tokens
        return PrefixImported(session_id, position, 0.0)

    def _prefill(self, session: _Session, session_id: str, tokens: list[int]) -> Iterator[Event]:
        if not tokens or len(session.tokens) + len(tokens) > CONTEXT:
            yield CommandFailed(session_id, "too many tokens, or none", len(session.tokens))
            return
        end = len(session.tokens) + len(tokens)
        begin = len(session.tokens)
        while len(session.tokens) < end:
            start = len(session.tokens)
            stop = min(end, start - start % SEGMENT + SEGMENT)
            segment = tokens[start - begin : stop - begin]
            if HANG in segment:
                threading.Event().wait()
            if EXIT in segment:
                os._exit(7)
            if BUG in segment:
                session.tokens = []
                raise ZeroDivisionError("a bug")
            if FAIL in segment:
                session.tokens = []
                yield CommandFailed(session_id, "the model failed", 0)
                return
            session.tokens += segment
            yield SegmentComputed(session_id, stop, self._parts(session, start, stop == end), 0.0)

    def _decode(self, session: _Session, command: Decode) -> Iterator[Event]:
        room = CONTEXT - len(session.tokens)
        token, reason = command.last_token, StopReason.CONTEXT_FULL
        limit = min(command.max_tokens, room)
        for count in range(limit):
            session.tokens.append(token)
            token = self._sample(session.tokens, command, count)
            if token in command.eos_token_ids:
                reason = StopReason.EOS
                break
            yield TokenDecoded(command.session_id, token)
        else:
            if limit == command.max_tokens:
                reason = StopReason.MAX_TOKENS
        yield DecodeFinished(command.session_id, reason, len(session.tokens))

    def _sample(self, tokens: list[int], command: Decode, draws: int) -> int:
        sampling = command.sampling
        seed = (sampling.seed, draws) if sampling.temperature else None
        digest = hashlib.sha256(repr((tokens, seed)).encode()).digest()
        return int.from_bytes(digest[:4], "big") % 900

    def _capture(self, session: _Session, session_id: str, start: int) -> Iterator[Event]:
        while True:
            stop = min(len(session.tokens), start - start % BLOCK + 2 * BLOCK)
            last = stop == len(session.tokens)
            yield PartsCaptured(session_id, self._parts(session, start, last, stop))
            if last:
                return
            start = stop

    def _parts(self, session: _Session, start: int, tail: bool, stop: int | None = None) -> tuple[RawPart, ...]:
        stop = len(session.tokens) if stop is None else stop
        parts = []
        for at in range(start - start % BLOCK, stop, BLOCK):
            held = np.array(session.tokens[at : min(at + BLOCK, stop)], dtype=np.int32)
            if len(held) == BLOCK or (tail and len(held)):
                parts.append(RawPart(PartKind.FULL, at, len(held), memoryview(held.tobytes())))
        return tuple(parts)
