"""One session of a client: a conversation on the primary, whose history grows by appending and generating."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from operator import index
from types import TracebackType
from typing import Final, Self

from kakeya_zmq.client_connection import Call, Connection, Failed, Progressed, Replied, expect
from wire import limits
from wire.codec import pack_tokens, unpack_tokens
from wire.errors import FailureCode, InvalidInput, RequestFailed
from wire.messages import (
    Appended,
    AppendTokens,
    CloseSession,
    Generate,
    Generated,
    GetSession,
    PrefillProgress,
    ProgressBody,
    SessionClosed,
    SessionCreated,
    SessionState,
    Tokens,
)

CALL_TIMEOUT_S: Final = 30.0
"""For calls that compute nothing."""
APPEND_TIMEOUT_S: Final = 1_800.0
"""A cold prefill of the longest prompt on a slow machine."""
GENERATE_TIMEOUT_S: Final = 3_600.0
_INT32_MAX: Final = 2**31 - 1


class Session:
    """A conversation on the primary: its history grows by :meth:`append` and :meth:`generate`."""

    def __init__(self, connection: Connection, created: SessionCreated) -> None:
        self.session_id = created.session_id
        self.model_id = created.model_id
        self.max_context_tokens = created.max_context_tokens
        self.eos_token_ids = created.eos_token_ids
        self.last_generated: Generated | None = None
        """How the last generation ended; None before, while one runs, and after one that did not finish."""
        self.last_appended: Appended | None = None
        """What became of the append of the last :meth:`answer`; None before, and after one that failed."""
        self._connection = connection
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._connection.peer is None:
            return  # the goodbye would only wait for a primary that is away
        try:
            self.close()
        except RequestFailed:
            if error is None:
                raise
            # What went wrong inside the block matters more than that the goodbye failed too.

    def append(
        self,
        token_ids: Sequence[int],
        on_progress: Callable[[PrefillProgress], None] | None = None,
        timeout_s: float = APPEND_TIMEOUT_S,
    ) -> Appended:
        """Append tokens to the history and bring the KV state up to date.

        Args:
            token_ids: at least one, each from 0 to 2**31 - 1.
            on_progress: called on this thread while the primary works.

        Raises:
            InvalidInput: no tokens, too many, or ids out of range.
            RequestFailed: the primary could not do it.
        """
        packed = _pack_prompt(token_ids)

        body = AppendTokens(session_id=self.session_id, tokens=packed)
        return self._connection.call(body, Appended, timeout_s, _telling(on_progress))

    def generate(
        self,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        seed: int | None = None,
        inter_token_timeout_s: float | None = None,
    ) -> Generator[int, None, None]:
        """Decode; yields token ids as they arrive. Closing the generator early cancels on the primary.

        The request starts with the first ``next()``. Afterwards ``last_generated`` says why it stopped.

        Args:
            max_tokens: at least 1.
            temperature: 0 is greedy.
            top_p: 0 is off.
            top_k: 0 is off.
            seed: makes sampling repeatable.
            inter_token_timeout_s: longest wait for the next token, the first one included.

        Raises:
            InvalidInput: a parameter is out of range.
            RequestFailed: from the iteration: the primary could not go on.
        """
        body = self._checked(max_tokens, temperature, top_p, top_k, seed)
        _check_timeout(inter_token_timeout_s)
        return self._stream(body, inter_token_timeout_s)

    def answer(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        seed: int | None = None,
        on_progress: Callable[[PrefillProgress], None] | None = None,
        inter_token_timeout_s: float | None = None,
    ) -> Generator[int, None, None]:
        """As :meth:`append`, then :meth:`generate`, but both are sent at once, which saves a round trip.

        The requests start with the first ``next()``. Once there is a token, ``last_appended`` tells what became of the
        append; ``inter_token_timeout_s`` counts from there.

        Raises:
            InvalidInput: what was given is out of range.
            RequestFailed: from the iteration: the append failed, or the generation after it.
        """
        prompt = AppendTokens(session_id=self.session_id, tokens=_pack_prompt(token_ids))
        body = self._checked(max_tokens, temperature, top_p, top_k, seed)
        _check_timeout(inter_token_timeout_s)
        return self._answer(prompt, body, on_progress, inter_token_timeout_s)

    def _answer(
        self,
        prompt: AppendTokens,
        body: Generate,
        on_progress: Callable[[PrefillProgress], None] | None,
        inter_token_timeout_s: float | None,
    ) -> Generator[int, None, None]:
        self.last_appended = self.last_generated = None
        append = self._connection.open(prompt, APPEND_TIMEOUT_S)
        generation = self._connection.open(body, APPEND_TIMEOUT_S + GENERATE_TIMEOUT_S)
        try:
            self.last_appended = append.wait(Appended, _telling(on_progress))
        except BaseException:
            generation.cancel()
            raise
        yield from self._tokens(generation, inter_token_timeout_s)

    def _checked(self, max_tokens: int, temperature: float, top_p: float, top_k: int, seed: int | None) -> Generate:
        if not 1 <= max_tokens <= limits.PROMPT_TOKENS_MAX:
            raise InvalidInput(f"max_tokens must be from 1 to {limits.PROMPT_TOKENS_MAX}, not {max_tokens}")
        if not 0.0 <= temperature <= 100.0:
            raise InvalidInput("temperature must be from 0 to 100")
        if not 0.0 <= top_p <= 1.0:
            raise InvalidInput("top_p must be from 0 to 1")
        if top_k < 0:
            raise InvalidInput("top_k must not be negative")
        if seed is not None and not 0 <= seed <= 2**63 - 1:
            raise InvalidInput("a seed must be from 0 to 2**63 - 1")
        return Generate(
            session_id=self.session_id,
            max_tokens=max_tokens,
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=top_k,
            seed=seed,
        )

    def info(self) -> SessionState:
        """The session as the primary sees it.

        Raises:
            RequestFailed: NOT_FOUND, the primary has forgotten it.
        """
        return self._connection.call(GetSession(session_id=self.session_id), SessionState, CALL_TIMEOUT_S)

    def close(self) -> None:
        """Let the primary forget the session. Idempotent, also when the primary forgot it first.

        Raises:
            RequestFailed: the primary does not answer.
        """
        if self._closed or self._connection.closed:
            return
        try:
            self._connection.call(CloseSession(session_id=self.session_id), SessionClosed, CALL_TIMEOUT_S)
        except RequestFailed as error:
            if error.code is not FailureCode.NOT_FOUND:
                raise
        self._closed = True

    def _stream(self, body: Generate, inter_token_timeout_s: float | None) -> Generator[int, None, None]:
        self.last_generated = None
        yield from self._tokens(self._connection.open(body, GENERATE_TIMEOUT_S), inter_token_timeout_s)

    def _tokens(self, call: Call, inter_token_timeout_s: float | None) -> Generator[int, None, None]:
        finished = False
        try:
            while True:
                match call.next(inter_token_timeout_s):
                    case Progressed(body=Tokens(tokens=packed)):
                        yield from unpack_tokens(packed)
                    case Progressed():
                        pass  # a kind of progress this client has no use for
                    case Failed(error=error):
                        finished = True
                        raise error
                    case Replied(body=reply):
                        finished = True
                        self.last_generated = expect(reply, Generated)
                        return
        finally:
            if not finished:
                call.cancel()


def _telling(on_progress: Callable[[PrefillProgress], None] | None) -> Callable[[ProgressBody], None]:
    def tell(progress: ProgressBody) -> None:
        if on_progress is not None and isinstance(progress, PrefillProgress):
            on_progress(progress)

    return tell


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidInput("a timeout must be above 0 s")


def _pack_prompt(token_ids: Sequence[int]) -> bytes:
    """Token ids in their wire form.

    Raises:
        InvalidInput: none, too many, or one that is no int32 token id.
    """
    if len(token_ids) == 0:
        raise InvalidInput("the prompt is empty")
    if len(token_ids) > limits.PROMPT_TOKENS_MAX:
        raise InvalidInput(f"a prompt has at most {limits.PROMPT_TOKENS_MAX} tokens, not {len(token_ids)}")
    return pack_tokens(check_token_ids(token_ids))


def check_token_ids(token_ids: Iterable[int]) -> list[int]:
    """Token ids as numbers.

    Raises:
        InvalidInput: one is no int32 token id.
    """
    try:
        numbers = [index(token) for token in token_ids]  # NumPy's integers too; floats and text are refused
    except TypeError:
        raise InvalidInput("token ids must be whole numbers") from None
    if numbers and not 0 <= min(numbers) <= max(numbers) <= _INT32_MAX:
        raise InvalidInput(f"token ids must be from 0 to {_INT32_MAX}")
    return numbers
