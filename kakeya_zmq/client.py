"""A small synchronous client of a primary: no model, no MLX, no asyncio.

    >>> from pathlib import Path
    >>> from kakeya_zmq.client import Client
    >>> with Client("127.0.0.1:51051", psk_file=Path.home() / ".kakeya/fleet.psk") as client:   # doctest: +SKIP
    ...     with client.create_session(label="example") as session:
    ...         appended = session.append([2, 651, 5778, 576])
    ...         for token in session.generate(max_tokens=32):
    ...             print(token)
    ...         print(session.last_generated.stop_reason, appended.explanation.elapsed_ms)

The connection lives on a thread of its own; every method may be called from any thread and waits for its answer.
KeyboardInterrupt reaches the waiting caller at once, and the request it waited for is cancelled on the primary.

Errors: :class:`InvalidInput` for what can be seen to be wrong before it is sent, :class:`RequestFailed` for everything the
primary or the network answers instead of a result, :class:`SecretFileError` for the PSK file.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

from kakeya_zmq.io.control_client import WRONG_PSK, ControlClient, Keys, OutgoingRequest
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import parse_address
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from wire import limits
from wire.bus import Topic
from wire.cards import Card, mark_of, open_card, pack_digest
from wire.codec import pack_tokens, unpack_tokens
from wire.errors import ConfigError, FailureCode, InvalidInput, KakeyaError, RemoteProtocolError, RequestFailed
from wire.events import RequestEvent, decode_event
from wire.keyring import KeyFile
from wire.keys import FleetKey, NodeIdentity
from wire.messages import (
    Appended,
    AppendTokens,
    CardList,
    CloseSession,
    CreateSession,
    ExchangeCards,
    Generate,
    Generated,
    GetRequests,
    GetSession,
    GetStatus,
    PrefillPolicy,
    PrefillProgress,
    ProgressBody,
    ReplyBody,
    RequestBody,
    Requests,
    SessionClosed,
    SessionCreated,
    SessionState,
    Status,
    Tokens,
)
from wire.text import NODE_ID_CHARACTERS_MAX, is_line, is_node_id

CALL_TIMEOUT_S: Final = 30.0
"""For calls that compute nothing."""
APPEND_TIMEOUT_S: Final = 1_800.0
"""A cold prefill of the longest prompt on a slow machine."""
GENERATE_TIMEOUT_S: Final = 3_600.0
ANSWER_GRACE_S: Final = 5.0
"""The connection itself ends a request at its deadline; only a stalled process needs this."""
SOFTWARE: Final = "kakeya-client"
_INT32_MAX: Final = 2**31 - 1
_ROLES: Final = ("client",)

_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True)
class _Replied:
    body: ReplyBody


@dataclass(frozen=True, slots=True)
class _Failed:
    error: RequestFailed


@dataclass(frozen=True, slots=True)
class _Progressed:
    body: ProgressBody


_Answer: TypeAlias = _Replied | _Failed | _Progressed


class _Call:
    """One request as seen by the waiting thread: answers come through a queue, in order."""

    def __init__(self, client: Client, body: RequestBody, timeout_s: float) -> None:
        self._client = client
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._request: OutgoingRequest | None = None
        self._cancelled = False
        self.deadline = time.monotonic() + timeout_s
        client._calls.add(self)
        client._reactor.post(lambda: self._start(body, timeout_s))
        if client._closed:
            self.abandon()  # closed meanwhile: what was posted may never run

    def next(self, wait_s: float | None = None) -> _Answer:
        """The next answer. An interrupt, or a wait that is too long, cancels the request.

        Raises:
            RequestFailed: DEADLINE_EXCEEDED after ``wait_s``, or some time after the request's own deadline.
        """
        remaining_s = max(self.deadline + ANSWER_GRACE_S - time.monotonic(), 0.0)
        try:
            return self._answers.get(timeout=remaining_s if wait_s is None else min(wait_s, remaining_s))
        except queue.Empty:
            self.cancel()
            raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, "the primary did not answer in time") from None
        except BaseException:
            self.cancel()
            raise

    def abandon(self) -> None:
        """Let the waiting thread go: the connection is closed for good."""
        self._answers.put(_Failed(RequestFailed(FailureCode.UNAVAILABLE, "the client is closed")))

    def cancel(self) -> None:
        """Tell the primary to stop. Harmless when the request is over."""
        self._cancelled = True
        self._client._reactor.post(self._cancel_request)

    def _cancel_request(self) -> None:
        if self._request is not None:
            self._request.cancel()

    def _start(self, body: RequestBody, timeout_s: float) -> None:
        if self._cancelled:
            return
        try:
            self._request = self._client._connection.request(
                body,
                timeout_s=timeout_s,
                on_reply=lambda reply: self._answers.put(_Replied(reply)),
                on_failure=lambda code, message: self._answers.put(_Failed(RequestFailed(code, message))),
                on_progress=lambda progress: self._answers.put(_Progressed(progress)),
            )
        except KakeyaError as error:  # it could not even be sent; the waiting thread is who must know
            self._answers.put(_Failed(RequestFailed(error.code, error.message, remedy=error.remedy)))


class Client:
    """A connection to one primary.

    Args:
        address: ``host:port`` of the primary.
        fleet_key: the fleet's key, or
        psk_file: the file that holds it.
        node_id: name of this client in the fleet; a random one by default.
        identity: key of this client; a new one by default. With ``node_id`` and key of a listed node it comes in where a
            roster lets no clients in.
        connect_timeout_s: how long the primary may take to answer the first time.

    Raises:
        ConfigError: the address or ``node_id`` is malformed, or not exactly one of ``fleet_key`` and ``psk_file`` is given.
        SecretFileError: the PSK file cannot be used.
        RequestFailed: UNAVAILABLE, nothing answers in time; UNAUTHENTICATED, the PSK is not the primary's.
    """

    def __init__(
        self,
        address: str,
        *,
        fleet_key: FleetKey | None = None,
        psk_file: Path | None = None,
        node_id: str | None = None,
        identity: NodeIdentity | None = None,
        connect_timeout_s: float = 5.0,
    ) -> None:
        if (fleet_key is None) == (psk_file is None):
            raise ConfigError("a client needs exactly one of fleet_key and psk_file")
        keys: FleetKey | Keys = fleet_key if fleet_key is not None else KeyFile(_given(psk_file)).valid_keys
        if node_id is not None and not is_node_id(node_id):
            raise ConfigError(f"a node name has 1 to {NODE_ID_CHARACTERS_MAX} letters, digits, '-', '_' and '.'")
        server = parse_address(address)
        local = LocalNode(
            node_id=node_id or f"client-{secrets.token_hex(6)}",
            identity=identity or NodeIdentity.generate(),
            roles=_ROLES,
            # The first one of a node: its process, which may be connected there, too, is not taken for one that has ended.
            incarnation=0 if identity is not None else time.time_ns() // 1000,
            software=SOFTWARE,
        )
        self._closed = False
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        # None: connected; a line: why not.
        self._link: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reactor = Reactor()
        try:
            self._connection = ControlClient(
                self._reactor,
                address=server,
                local=local,
                fleet_key=keys,
                on_up=lambda peer: self._link.put(None),
                on_down=self._link.put,
            )
            self._reactor.start_thread("kakeya-client")
            self._wait_until_connected(connect_timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def peer(self) -> PeerInfo | None:
        """The primary, None while the connection is down."""
        return self._connection.peer

    def create_session(
        self,
        eos_token_ids: Iterable[int] = (),
        label: str = "",
        policy: PrefillPolicy | None = None,
        use_local_cache: bool = True,
        publish: bool = True,
        exclude_nodes: Iterable[str] = (),
    ) -> Session:
        """Open an inference session (what the options mean: :class:`wire.messages.CreateSession`).

        Raises:
            InvalidInput: a token id is negative or above int32, or a name is too long or not one visible line.
            RequestFailed: the primary refused.
        """
        eos = tuple(_check_token_ids(eos_token_ids))
        excluded = tuple(exclude_nodes)
        if not all(map(is_node_id, excluded)):
            raise InvalidInput(f"node names have 1 to {NODE_ID_CHARACTERS_MAX} letters, digits, '-', '_' and '.'")
        if len(label) > limits.NAME_CHARACTERS_MAX or not is_line(label):
            raise InvalidInput(f"a label has at most {limits.NAME_CHARACTERS_MAX} characters, on one line, all visible")
        if len(eos) > 64 or len(excluded) > 64:
            raise InvalidInput("a session has at most 64 end tokens and 64 excluded nodes")
        body = CreateSession(
            label=label,
            eos_token_ids=eos,
            policy=policy,
            use_local_cache=use_local_cache,
            publish=publish,
            exclude_nodes=excluded,
        )
        return Session(self, self._call(body, SessionCreated, CALL_TIMEOUT_S))

    def status(self) -> Status:
        """What the primary is doing.

        Raises:
            RequestFailed: no answer.
        """
        return self._call(GetStatus(), Status, CALL_TIMEOUT_S)

    def requests(self, count: int = 20) -> tuple[RequestEvent, ...]:
        """The last requests of this primary (also of other clients), oldest first: sources, decisions, costs.

        Raises:
            InvalidInput: ``count`` is not from 1 to REQUEST_RECORDS_MAX.
            RequestFailed: no answer, or the node is no primary.
            RemoteProtocolError: a record cannot be read.
        """
        if not 1 <= count <= limits.REQUEST_RECORDS_MAX:
            raise InvalidInput(f"from 1 to {limits.REQUEST_RECORDS_MAX} requests can be asked for")
        found = self._call(GetRequests(count=count), Requests, CALL_TIMEOUT_S)
        records = (decode_event(Topic.REQUEST, record) for record in found.records)
        return tuple(record for record in records if isinstance(record, RequestEvent))

    def cards(self) -> tuple[Card, ...]:
        """The capability cards of the node and of every node it knows of, by node id.

        Raises:
            RequestFailed: no answer.
            RemoteProtocolError: a card cannot be read, or its signature does not hold.
        """
        found: dict[str, Card] = {}
        more = True
        while more:
            digest = pack_digest((mark_of(c.node_id), c.incarnation, c.sequence) for c in found.values())
            reply = self._call(ExchangeCards(cards=(), ages_ms=(), known=digest), CardList, CALL_TIMEOUT_S)
            fresh = {card.node_id: card for card in map(open_card, reply.cards)}
            more = reply.more and bool(fresh.keys() - found.keys())
            found.update(fresh)
        return tuple(found[node_id] for node_id in sorted(found))

    def tell_revocations(self, blobs: tuple[bytes, ...]) -> None:
        """Give the node signed revocations (:mod:`wire.revocations`), which it judges, keeps and spreads.

        Raises:
            RequestFailed: no answer.
        """
        self._call(ExchangeCards(cards=(), ages_ms=(), known=None, revocations=blobs), CardList, CALL_TIMEOUT_S)

    def close(self) -> None:
        """Leave; open calls fail with UNAVAILABLE. Idempotent. Sessions stay on the primary until it forgets them."""
        if self._closed:
            return
        self._closed = True
        connection = getattr(self, "_connection", None)
        if connection is not None:
            with contextlib.suppress(RequestFailed):  # the loop is stalled; closing the reactor below reports it
                self._reactor.call(connection.close, timeout_s=ANSWER_GRACE_S)
        self._reactor.close()
        for call in list(self._calls):
            call.abandon()  # one that is over already never looks at it

    def _wait_until_connected(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        line = "nothing answers at this address"
        while True:
            try:
                news = self._link.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise RequestFailed(FailureCode.UNAVAILABLE, line, remedy="is a node running there?") from None
            if news is None:
                return
            if news == WRONG_PSK:
                raise RequestFailed(FailureCode.UNAUTHENTICATED, news, remedy="use the PSK file of that fleet")
            line = news

    def _open(self, body: RequestBody, timeout_s: float) -> _Call:
        if self._closed:
            raise RequestFailed(FailureCode.UNAVAILABLE, "the client is closed")
        if not timeout_s > 0:
            raise InvalidInput("a timeout must be above 0 s")
        return _Call(self, body, timeout_s)

    def _call(
        self,
        body: RequestBody,
        reply_type: type[_Reply],
        timeout_s: float,
        on_progress: Callable[[ProgressBody], None] | None = None,
    ) -> _Reply:
        call = self._open(body, timeout_s)
        while True:
            match call.next():
                case _Replied(body=reply):
                    return _expect(reply, reply_type)
                case _Failed(error=error):
                    raise error
                case _Progressed(body=progress):
                    if on_progress is not None:
                        try:
                            on_progress(progress)
                        except BaseException:
                            call.cancel()
                            raise


class Session:
    """A conversation on the primary: its history grows by :meth:`append` and :meth:`generate`."""

    def __init__(self, client: Client, created: SessionCreated) -> None:
        self.session_id = created.session_id
        self.model_id = created.model_id
        self.max_context_tokens = created.max_context_tokens
        self.eos_token_ids = created.eos_token_ids
        self.last_generated: Generated | None = None
        """How the last :meth:`generate` ended; None before, while one runs, and after one that did not finish."""
        self._client = client
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._client.peer is None:
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

        def tell(progress: ProgressBody) -> None:
            if on_progress is not None and isinstance(progress, PrefillProgress):
                on_progress(progress)

        return self._client._call(AppendTokens(session_id=self.session_id, tokens=packed), Appended, timeout_s, tell)

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
        if inter_token_timeout_s is not None and not inter_token_timeout_s > 0:
            raise InvalidInput("a timeout must be above 0 s")
        body = Generate(
            session_id=self.session_id,
            max_tokens=max_tokens,
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=top_k,
            seed=seed,
        )
        return self._stream(body, inter_token_timeout_s)

    def info(self) -> SessionState:
        """The session as the primary sees it.

        Raises:
            RequestFailed: NOT_FOUND, the primary has forgotten it.
        """
        return self._client._call(GetSession(session_id=self.session_id), SessionState, CALL_TIMEOUT_S)

    def close(self) -> None:
        """Let the primary forget the session. Idempotent, also when the primary forgot it first.

        Raises:
            RequestFailed: the primary does not answer.
        """
        if self._closed or self._client._closed:
            return
        try:
            self._client._call(CloseSession(session_id=self.session_id), SessionClosed, CALL_TIMEOUT_S)
        except RequestFailed as error:
            if error.code is not FailureCode.NOT_FOUND:
                raise
        self._closed = True

    def _stream(self, body: Generate, inter_token_timeout_s: float | None) -> Generator[int, None, None]:
        self.last_generated = None
        call = self._client._open(body, GENERATE_TIMEOUT_S)
        finished = False
        try:
            while True:
                match call.next(inter_token_timeout_s):
                    case _Progressed(body=Tokens(tokens=packed)):
                        yield from unpack_tokens(packed)
                    case _Progressed():
                        pass  # a kind of progress this client has no use for
                    case _Failed(error=error):
                        finished = True
                        raise error
                    case _Replied(body=reply):
                        finished = True
                        self.last_generated = _expect(reply, Generated)
                        return
        finally:
            if not finished:
                call.cancel()


def _pack_prompt(token_ids: Sequence[int]) -> bytes:
    """Token ids in their wire form.

    Raises:
        InvalidInput: none, too many, or one that is no int32 token id.
    """
    if len(token_ids) == 0:
        raise InvalidInput("the prompt is empty")
    if len(token_ids) > limits.PROMPT_TOKENS_MAX:
        raise InvalidInput(f"a prompt has at most {limits.PROMPT_TOKENS_MAX} tokens, not {len(token_ids)}")
    return pack_tokens(_check_token_ids(token_ids))


def _check_token_ids(token_ids: Iterable[int]) -> list[int]:
    try:
        numbers = [index(token) for token in token_ids]  # NumPy's integers too; floats and text are refused
    except TypeError:
        raise InvalidInput("token ids must be whole numbers") from None
    if numbers and not 0 <= min(numbers) <= max(numbers) <= _INT32_MAX:
        raise InvalidInput(f"token ids must be from 0 to {_INT32_MAX}")
    return numbers


def _expect(reply: object, reply_type: type[_Reply]) -> _Reply:
    if not isinstance(reply, reply_type):
        raise RemoteProtocolError(f"the primary answered with {type(reply).__name__} instead of {reply_type.__name__}")
    return reply


def _given(path: Path | None) -> Path:
    assert path is not None
    return path
