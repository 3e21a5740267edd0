"""The MLX engine: sessions of one loaded model, driven in bounded steps (see kakeya_zmq.engine for the interface).

Rules
- Every iterator from :meth:`MlxEngine.handle` does one bounded piece of work for each ``next()``: one import, one prefill
  segment, one decoded token, one stretch of capture. Between two steps any other session may run.
- Failures of a command are events (:class:`CommandFailed`), never exceptions. A model that fails in the middle of a
  forward pass leaves caches nobody can trust: that session is emptied, the others are untouched.
- A session's position counts exactly the tokens whose KV its caches hold, whenever no step is running, also after a
  command was cancelled at any point.

Prefill runs on an *absolute* grid: from position p the first segment ends at the next multiple of ``segment_tokens``. A
prompt continued from a reused prefix therefore does the same arithmetic, segment for segment, as an unbroken run, and the
results are the same bits when the prefix ends on the grid. Output logits are never computed in prefill: only the cache
state is evaluated, and MLX is lazy.

Decode launches the next step before it hands a token out (as mlx-lm does), so that the processor never waits for Python.
When that token turns out to be the last one, the launched step is taken back (kakeya_zmq.model.undo). Hence KV = prompt +
generated tokens without the last one, for every model kind. The end-of-sequence token is never handed out: after
``StopReason.EOS`` the KV holds the prompt and all tokens that were.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, assert_never

import mlx.core as mx
import numpy as np

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
    TokenArray,
    TokenDecoded,
)
from kakeya_zmq.model import undo
from kakeya_zmq.model.layout import CacheLayout
from kakeya_zmq.model.rebuild import Rebuild
from kakeya_zmq.model.sampling import TokenSampler, check_sampling
from kakeya_zmq.model.session_kv import PartExporter, SessionKv
from wire.errors import ConfigError, InvalidInput, KakeyaError
from wire.limits import TEXT_CHARACTERS_MAX
from wire.messages import StopReason

CAPTURE_STEP_TOKENS = 1024
"""Tokens exported in one step of a Capture: about 40 MB, or 5 ms, with the demo model."""
BUFFER_RELEASE_TOKENS = 2048
"""Prefilled tokens between two releases of MLX's cached buffers; releasing more often only costs page faults."""
BUFFER_RELEASE_DECODE_STEPS = 256

MODEL_FAILURES = (RuntimeError, ValueError, MemoryError)
"""What MLX raises when a computation cannot be done (out of memory, shapes that do not fit)."""


class MlxEngine:
    """Runs one model for many sessions; implements :class:`kakeya_zmq.engine.Engine`.

    Args:
        model: an mlx-lm model with evaluated parameters.
        layout: how its caches are cut into parts.
        facts: what the rest of the system needs to know of it.
        segment_tokens: grid of prefill, a multiple of the layout's block size.
        launch_ahead: while decoding, start the next step before the current token is handed out, as mlx-lm does: it keeps
            a GPU busy. None: on a GPU only, because MLX's CPU backend accepts no more than a few waiting tasks, so that
            starting the next step waits for most of it and every token comes one step late.
        clock: seconds, for elapsed times.
        fresh_seed: a seed for decodes that name none.

    All methods must be called on the thread that made the engine: MLX streams belong to threads.

    Raises:
        ConfigError: ``segment_tokens`` is not a positive multiple of the block size.
    """

    def __init__(
        self,
        model: Any,
        layout: CacheLayout,
        facts: ModelFacts,
        *,
        segment_tokens: int = 256,
        launch_ahead: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        block_tokens = layout.requirement.block_tokens
        if segment_tokens < block_tokens or segment_tokens % block_tokens:
            raise ConfigError(
                f"prefill segments of {segment_tokens} tokens are not whole blocks of {block_tokens}",
                remedy="choose a multiple of the block size",
            )
        self._model = model
        self._layout = layout
        self._facts = facts
        self._block_tokens = block_tokens
        self._segment_tokens = segment_tokens
        self._clock = clock
        self._fresh_seed = fresh_seed
        self._sessions: dict[str, SessionKv] = {}
        caches = layout.new_caches()
        self._can_take_back = undo.can_take_back(caches)
        self._launch_ahead = mx.default_device().type == mx.DeviceType.gpu if launch_ahead is None else launch_ahead
        self._parts = PartExporter(layout, caches, window_tokens=facts.requirement.window_tokens)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def layout(self) -> CacheLayout:
        """How the model's KV state is cut into parts."""
        return self._layout

    def handle(self, command: Command) -> Iterator[Event]:
        """Run a command step by step; nothing happens before the first ``next()``. Closing the iterator cancels the rest."""
        return self._run(command)

    def session_kv_bytes(self, session_id: str) -> int:
        """Bytes of KV memory the session's caches occupy, over-allocation included; 0 for an unknown session."""
        session = self._sessions.get(session_id)
        return self._layout.kv_bytes(session.caches) if session else 0

    def session_position(self, session_id: str) -> int | None:
        """Tokens whose KV the session holds, None for an unknown session. Exact only while none of its commands runs."""
        session = self._sessions.get(session_id)
        return session.position if session else None

    def memory(self) -> EngineMemory:
        """MLX's own figures, of the whole process."""
        return EngineMemory(active_bytes=mx.get_active_memory(), cached_bytes=mx.get_cache_memory())

    def close(self) -> None:
        """Drop every session and the model, and give the memory back."""
        self._sessions.clear()
        self._model = None
        mx.clear_cache()

    # --- commands ------------------------------------------------------------------------------------------------

    def _run(self, command: Command) -> Generator[Event, None, None]:
        session_id = command.session_id
        session = self._sessions.get(session_id)
        if isinstance(command, OpenSession):
            if session is not None:
                yield CommandFailed(session_id, "the session is already open", session.position)
                return
            self._sessions[session_id] = SessionKv(session_id, self._layout.new_caches())
            yield SessionReady(session_id)
            return
        if session is None:
            yield CommandFailed(session_id, "no such session", 0)
            return
        if session.busy:
            yield CommandFailed(session_id, "the session is busy with another command", session.position)
            return
        session.busy = True
        try:
            yield from self._run_on(session, command)
        except InvalidInput as error:
            # Raised by the checks before any work: the session stands where it stood.
            yield CommandFailed(session_id, _one_line(error), session.position)
        except MODEL_FAILURES as error:
            # The caches may be half written: an empty session is the only state that is surely right.
            session.empty(self._layout.new_caches())
            yield CommandFailed(session_id, f"the model failed: {_one_line(error)}", 0)
        except Exception:
            # A bug, here or in the model's code: the runner reports it, but the session must not go on from such caches.
            session.empty(self._layout.new_caches())
            raise
        finally:
            session.busy = False

    def _run_on(self, session: SessionKv, command: Command) -> Generator[Event, None, None]:
        if not isinstance(command, AddParts | FinishImport):
            session.rebuild = None
        match command:
            case BeginImport() | AddParts() | FinishImport():
                yield from self._import_step(session, command)
            case ImportPrefix():
                yield from self._import(session, command)
            case Prefill():
                yield from self._prefill(session, command)
            case Decode():
                yield from self._decode(session, command)
            case Capture():
                yield from self._capture(session, command)
            case OpenSession():
                raise AssertionError("handled by the caller")
            case CloseSession():
                del self._sessions[session.session_id]
                session.caches = []
                mx.clear_cache()
                yield SessionReady(session.session_id)
            case _:
                assert_never(command)

    def _import(self, session: SessionKv, command: ImportPrefix) -> Generator[Event, None, None]:
        started = self._clock()
        session.empty(self._layout.new_caches())
        self._check_position(command.position)
        if command.position > 0:
            try:
                caches = self._layout.rebuild(command.parts, command.position)
                mx.eval([cache.state for cache in caches])
            except (KakeyaError, *MODEL_FAILURES) as error:
                # Parts come from other machines: whatever is wrong with them is a miss, and the session is empty.
                yield CommandFailed(session.session_id, _one_line(error), 0)
                return
            session.caches = caches
            session.position = command.position
        yield PrefixImported(session.session_id, session.position, self._elapsed_ms(started))

    def _import_step(
        self, session: SessionKv, command: BeginImport | AddParts | FinishImport
    ) -> Generator[Event, None, None]:
        started = self._clock()
        try:
            if isinstance(command, BeginImport):
                self._check_position(command.position)
                session.rebuild = self._layout.begin_rebuild(command.position)
            elif session.rebuild is None:
                raise InvalidInput("no import was begun")
            elif isinstance(command, AddParts):
                session.rebuild.add(command.parts)
            else:
                self._finish_import(session, session.rebuild)
                yield PrefixImported(session.session_id, session.position, self._elapsed_ms(started))
                return
        except (KakeyaError, *MODEL_FAILURES) as error:
            # Parts come from other machines: whatever is wrong with them is a miss, and the session stays as it was.
            session.rebuild = None
            yield CommandFailed(session.session_id, _one_line(error), session.position)
            return
        yield ImportAdvanced(session.session_id, self._elapsed_ms(started))

    def _finish_import(self, session: SessionKv, rebuild: Rebuild) -> None:
        session.rebuild = None
        caches = rebuild.finish()
        mx.eval([cache.state for cache in caches])
        session.empty(self._layout.new_caches())
        session.caches = caches
        session.position = rebuild.position

    def _check_position(self, position: int) -> None:
        if not 0 <= position <= self._facts.max_context_tokens:
            raise InvalidInput(f"position {position} is outside the context of {self._facts.max_context_tokens} tokens")

    def _prefill(self, session: SessionKv, command: Prefill) -> Generator[Event, None, None]:
        tokens = self._checked_tokens(command.tokens)
        begin = session.position
        end = begin + len(tokens)
        if end > self._facts.max_context_tokens:
            raise InvalidInput(f"{end} tokens exceed the context of {self._facts.max_context_tokens}")
        while session.position < end:
            started = self._clock()
            start = session.position
            stop = min(end, start - start % self._segment_tokens + self._segment_tokens)
            self._model(mx.array(tokens[start - begin : stop - begin])[None], cache=session.caches)
            mx.eval([cache.state for cache in session.caches])
            session.position = stop
            parts = self._parts.export(session, start, stop, with_tail=stop == end) if command.capture else ()
            if stop == end or stop % BUFFER_RELEASE_TOKENS < self._segment_tokens:
                mx.clear_cache()
            yield SegmentComputed(session.session_id, stop, parts, self._elapsed_ms(started))

    def _decode(self, session: SessionKv, command: Decode) -> Generator[Event, None, None]:
        self._check_token(command.last_token)
        if command.max_tokens < 1:
            raise InvalidInput(f"max_tokens must be at least 1, not {command.max_tokens}")
        check_sampling(command.sampling)
        room = self._facts.max_context_tokens - session.position
        if room < 1:
            reason = StopReason.CONTEXT_FULL
        else:
            # The n-th token is sampled from position + n tokens of KV.
            limit = min(command.max_tokens, room)
            found_end = yield from self._decode_tokens(session, command, limit)
            if found_end:
                reason = StopReason.EOS
            else:
                reason = StopReason.MAX_TOKENS if limit == command.max_tokens else StopReason.CONTEXT_FULL
        yield DecodeFinished(session.session_id, reason, session.position)

    def _decode_tokens(self, session: SessionKv, command: Decode, limit: int) -> Generator[TokenDecoded, None, bool]:
        """Hand out up to ``limit`` tokens; returns whether an end-of-sequence token was met."""
        sampler = TokenSampler(command.sampling, fresh_seed=self._fresh_seed)
        end_tokens = frozenset(command.eos_token_ids)
        ahead: undo.Mark | None = None
        """Set while a step has been built whose input token is not yet known to be wanted."""
        following = self._build(session, mx.array([command.last_token], mx.int32), sampler)
        _start(following)
        session.position += 1
        try:
            for count in range(1, limit + 1):
                sampled = following
                if count < limit and self._can_take_back:
                    # Building a step costs Python time, which passes while the current one is being computed.
                    ahead = undo.mark(session.caches)
                    following = self._build(session, sampled, sampler)
                    if self._launch_ahead:
                        _start(following)
                token = int(sampled.item())  # type: ignore[arg-type]
                if token in end_tokens:
                    return True
                yield TokenDecoded(session.session_id, token)
                if count < limit:
                    if not self._can_take_back:
                        following = self._build(session, sampled, sampler)
                    _start(following)
                    ahead = None
                    session.position += 1
                if count % BUFFER_RELEASE_DECODE_STEPS == 0:
                    mx.clear_cache()
            return False
        finally:
            if ahead is not None:
                session.destroyed_rows |= undo.take_back(session.caches, ahead)

    def _build(self, session: SessionKv, token: mx.array, sampler: TokenSampler) -> mx.array:
        """Build the step of one token, shape (1,); returns the token sampled after it, not yet computed, shape (1,).

        ``session.position`` is still the token's own position.
        """
        self._parts.keep_leaving_window(session)
        logits = self._model(token[None], cache=session.caches)[:, -1, :]
        return sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def _capture(self, session: SessionKv, command: Capture) -> Generator[Event, None, None]:
        """One PartsCaptured for each stretch of :data:`CAPTURE_STEP_TOKENS`; at least one, perhaps without parts."""
        if not 0 <= command.start <= session.position:
            raise InvalidInput(f"cannot capture from position {command.start}: the session stands at {session.position}")
        start = command.start
        while True:
            stop = min(session.position, start - start % self._block_tokens + CAPTURE_STEP_TOKENS)
            last = stop == session.position
            parts = self._parts.export(session, start, stop, with_tail=last)
            yield PartsCaptured(session.session_id, parts)
            if last:
                return
            start = stop

    def _checked_tokens(self, tokens: TokenArray) -> TokenArray:
        if tokens.ndim != 1 or len(tokens) == 0:
            raise InvalidInput("there must be at least one token")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._facts.vocabulary_size:
            raise InvalidInput(f"a token is outside the vocabulary of {self._facts.vocabulary_size}")
        return np.ascontiguousarray(tokens, dtype=np.int32)

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self._facts.vocabulary_size:
            raise InvalidInput(f"a token is outside the vocabulary of {self._facts.vocabulary_size}")

    def _elapsed_ms(self, started: float) -> float:
        return (self._clock() - started) * 1000.0


def _start(step: mx.array) -> None:
    """Let a built step be computed; starting it twice does nothing."""
    mx.async_eval(step)  # type: ignore[no-untyped-call]


def _one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[: TEXT_CHARACTERS_MAX // 2]
