"""The synchronous client against a small server that speaks the session calls with canned logic."""

from __future__ import annotations

import os
import signal
import socket as os_socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kakeya_zmq.client import Client
from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.control_client import WRONG_PSK
from kakeya_zmq.io.control_server import ControlServer, IncomingRequest
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.session import LocalNode
from wire import limits
from wire.codec import pack_tokens, unpack_tokens
from wire.errors import ConfigError, FailureCode, InvalidInput, RemoteProtocolError, RequestFailed, SecretFileError
from wire.keys import FleetKey, NodeIdentity, write_secret_file
from wire.messages import (
    Appended,
    AppendTokens,
    CloseSession,
    CreateSession,
    Done,
    Explanation,
    Generate,
    Generated,
    GetSession,
    GetStatus,
    PrefillPolicy,
    PrefillProgress,
    SessionClosed,
    SessionCreated,
    SessionState,
    SourceKind,
    Status,
    StopReason,
    Tokens,
)

WAIT_S = 20.0
KEY = FleetKey(b"k" * 32)
STALL = 999
"""A prompt that ends with this token makes generate() stall after its first token."""
WRONG_REPLY = 998
"""A prompt that ends with this token is answered with a reply of another kind."""


class CannedPrimary:
    """Counts upwards from the last token of the history; on a reactor thread of its own."""

    def __init__(self, port: int = 0) -> None:
        self.histories: dict[str, list[int]] = {}
        self.created: list[CreateSession] = []
        self.ended: list[str] = []
        self.reactor = Reactor()
        local = LocalNode(
            node_id="primary", identity=NodeIdentity.generate(), roles=("primary",), incarnation=1, software="test"
        )
        self.server = ControlServer(
            self.reactor, bind=Address("127.0.0.1", port), local=local, fleet_key=KEY, on_request=self._on_request
        )
        self.address = str(self.server.address)
        self.reactor.start_thread("canned primary")

    def close(self) -> None:
        self.reactor.call(self.server.close)
        assert self.reactor.callback_errors == 0
        assert self.reactor.close()

    def _on_request(self, request: IncomingRequest) -> None:
        request.on_end = self.ended.append
        match request.body:
            case CreateSession() as body:
                self.created.append(body)
                session_id = f"sess-{len(self.created):032x}"
                self.histories[session_id] = []
                request.reply(
                    SessionCreated(session_id=session_id, model_id="canned", max_context_tokens=100, eos_token_ids=(1,))
                )
            case GetStatus():
                request.reply(Status(node_id="primary", roles=("primary",), sections={}, peers=(), recent=()))
            case AppendTokens() | Generate() | CloseSession() | GetSession() as body:
                history = self.histories.get(body.session_id)
                if history is None:
                    request.fail(FailureCode.NOT_FOUND, "no such session")
                else:
                    self._in_session(request, history)
            case _:
                request.fail(FailureCode.UNIMPLEMENTED, "not canned")

    def _in_session(self, request: IncomingRequest, history: list[int]) -> None:
        match request.body:
            case AppendTokens() as body:
                tokens = unpack_tokens(body.tokens)
                history.extend(tokens)
                for done in (len(tokens) // 2, len(tokens)):
                    request.progress(PrefillProgress(tokens_done=done, tokens_total=len(tokens), source=SourceKind.COMPUTED))
                explanation = Explanation(prompt_tokens=len(history), sources=(), reasons=(), elapsed_ms=1.0)
                request.reply(Appended(history_tokens=len(history), explanation=explanation))
            case Generate() as body:
                self._generate(request, body, history)
            case CloseSession() as body:
                del self.histories[body.session_id]
                request.reply(SessionClosed(history_tokens=len(history)))
            case _:
                request.reply(SessionState(history_tokens=len(history), kv_bytes=0, idle_ms=0, busy=False))

    def _generate(self, request: IncomingRequest, body: Generate, history: list[int]) -> None:
        if history[-1] == WRONG_REPLY:
            request.reply(Done())
            return
        stalls = history[-1] == STALL
        for number in range(body.max_tokens):
            history.append(history[-1] + 1)
            request.progress(Tokens(tokens=pack_tokens(history[-1:])))
            if stalls and number == 0:
                return
        request.reply(
            Generated(
                stop_reason=StopReason.MAX_TOKENS,
                token_count=body.max_tokens,
                history_tokens=len(history),
                elapsed_ms=1.0,
            )
        )


@pytest.fixture
def primary() -> Iterator[CannedPrimary]:
    threads = set(threading.enumerate())
    made = CannedPrimary()
    yield made
    made.close()
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def client(primary: CannedPrimary) -> Iterator[Client]:
    with Client(primary.address, fleet_key=KEY) as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    given_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < given_up_at
        time.sleep(0.002)


def test_a_conversation(primary: CannedPrimary, client: Client) -> None:
    with client.create_session(label="chat", policy=PrefillPolicy.LOCAL_ONLY, exclude_nodes=["w"]) as session:
        assert (session.model_id, session.eos_token_ids, session.max_context_tokens) == ("canned", (1,), 100)
        progress: list[PrefillProgress] = []
        appended = session.append([5, 6, 7, 8], on_progress=progress.append)
        assert appended.history_tokens == appended.explanation.prompt_tokens == 4
        assert [each.tokens_done for each in progress] == [2, 4]
        assert list(session.generate(max_tokens=3, temperature=0.5, top_p=0.9, top_k=5, seed=1)) == [9, 10, 11]
        assert session.last_generated is not None
        assert session.last_generated.stop_reason is StopReason.MAX_TOKENS
        assert session.info().history_tokens == 7
        session_id = session.session_id
        assert session_id in primary.histories
    assert session_id not in primary.histories
    session.close()  # idempotent
    with pytest.raises(RequestFailed, match="no such session") as caught:
        session.info()
    assert caught.value.code is FailureCode.NOT_FOUND
    assert primary.created == [CreateSession(label="chat", policy=PrefillPolicy.LOCAL_ONLY, exclude_nodes=("w",))]
    assert client.status().node_id == "primary"
    assert client.peer is not None
    assert client.peer.node_id == "primary"


def test_a_prompt_and_its_answer_at_once(client: Client) -> None:
    with client.create_session() as session:
        assert list(session.answer([10, 20], max_tokens=3)) == [21, 22, 23]
        assert session.last_appended is not None
        assert session.last_appended.history_tokens == 2
        assert session.last_generated is not None
        assert session.last_generated.token_count == 3
        with pytest.raises(InvalidInput, match="the prompt is empty"):
            session.answer([], max_tokens=3)
        with pytest.raises(InvalidInput, match="max_tokens"):
            session.answer([1], max_tokens=0)


def test_an_answer_whose_append_fails_raises_that_and_cancels_the_rest(client: Client) -> None:
    session = client.create_session()
    session.close()
    with pytest.raises(RequestFailed) as raised:
        list(session.answer([10, 20], max_tokens=3))
    assert raised.value.code is FailureCode.NOT_FOUND
    assert session.last_appended is None


def test_closing_the_stream_early_cancels_on_the_primary(primary: CannedPrimary, client: Client) -> None:
    session = client.create_session()
    session.append([STALL])
    stream = session.generate(max_tokens=10)
    assert primary.histories[session.session_id] == [STALL]  # nothing is asked before the first next()
    assert next(stream) == STALL + 1
    stream.close()
    until(lambda: primary.ended == ["cancelled by the client"])
    assert session.last_generated is None
    assert session.info().history_tokens == 2


def test_a_stream_that_was_never_started_asks_nothing(primary: CannedPrimary, client: Client) -> None:
    session = client.create_session()
    session.append([1])
    session.generate(max_tokens=10).close()
    assert session.info().history_tokens == 1


def test_a_stall_between_tokens_ends_in_an_error_and_a_cancel(primary: CannedPrimary, client: Client) -> None:
    session = client.create_session()
    session.append([STALL])
    seen: list[int] = []
    with pytest.raises(RequestFailed) as caught:
        seen.extend(session.generate(max_tokens=10, inter_token_timeout_s=0.2))
    assert caught.value.code is FailureCode.DEADLINE_EXCEEDED
    until(lambda: primary.ended == ["cancelled by the client"])


def test_an_interrupt_reaches_the_waiting_caller_and_cancels(primary: CannedPrimary, client: Client) -> None:
    session = client.create_session()
    session.append([STALL])
    stream = session.generate(max_tokens=10)
    next(stream)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    until(lambda: primary.ended == ["cancelled by the client"])
    assert client.status().node_id == "primary"  # the connection lives on


def test_an_error_in_on_progress_reaches_the_caller(client: Client) -> None:
    session = client.create_session()

    def on_progress(progress: PrefillProgress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.append([1, 2], on_progress=on_progress)


def test_a_reply_of_the_wrong_kind_is_the_primarys_error(client: Client) -> None:
    session = client.create_session()
    session.append([WRONG_REPLY])
    with pytest.raises(RemoteProtocolError, match="Done instead of Generated"):
        list(session.generate(max_tokens=1))


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ([], "empty"),
        ([1, -1], "from 0 to"),
        ([2**31], "from 0 to"),
        ([1.5], "whole numbers"),
        (["1"], "whole numbers"),
        ([0] * (limits.PROMPT_TOKENS_MAX + 1), "at most"),
    ],
)
def test_bad_tokens_are_refused_before_they_are_sent(client: Client, tokens: list[int], line: str) -> None:
    session = client.create_session()
    with pytest.raises(InvalidInput, match=line):
        session.append(tokens)
    assert session.info().history_tokens == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": limits.PROMPT_TOKENS_MAX + 1},
        {"max_tokens": 1, "temperature": -0.1},
        {"max_tokens": 1, "temperature": float("nan")},
        {"max_tokens": 1, "top_p": 1.1},
        {"max_tokens": 1, "top_k": -1},
        {"max_tokens": 1, "seed": -1},
        {"max_tokens": 1, "inter_token_timeout_s": 0.0},
    ],
)
def test_bad_generation_parameters_are_refused_at_once(client: Client, options: dict[str, float]) -> None:
    session = client.create_session()
    with pytest.raises(InvalidInput):
        session.generate(**options)  # type: ignore[arg-type]


def test_bad_session_options_are_refused(client: Client) -> None:
    for options in ({"label": "x" * 129}, {"eos_token_ids": [-1]}, {"exclude_nodes": [""]}, {"eos_token_ids": range(65)}):
        with pytest.raises(InvalidInput):
            client.create_session(**options)


def test_many_threads_share_one_client(client: Client) -> None:
    results: dict[int, list[int]] = {}

    def talk(number: int) -> None:
        with client.create_session() as session:
            session.append([number])
            results[number] = list(session.generate(max_tokens=5))

    threads = [threading.Thread(target=talk, args=(100 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == {100 * number: [100 * number + step for step in range(1, 6)] for number in range(8)}


def test_a_wrong_psk_is_told_at_once(primary: CannedPrimary) -> None:
    with pytest.raises(RequestFailed, match=WRONG_PSK) as caught:
        Client(primary.address, fleet_key=FleetKey(b"o" * 32), connect_timeout_s=WAIT_S)
    assert caught.value.code is FailureCode.UNAUTHENTICATED
    assert "PSK file" in caught.value.remedy


def test_a_primary_that_ends_during_the_handshake_is_not_taken_for_one_of_another_fleet() -> None:
    """It is started again, and the client waits for it."""
    started: list[CannedPrimary] = []
    with os_socket.socket() as dying:
        dying.bind(("127.0.0.1", 0))
        dying.listen()
        port = dying.getsockname()[1]

        def end_and_start_again() -> None:
            connection, _ = dying.accept()
            connection.recv(1)
            connection.close()
            dying.close()
            started.append(CannedPrimary(port))

        thread = threading.Thread(target=end_and_start_again)
        thread.start()
        try:
            with Client(f"127.0.0.1:{port}", fleet_key=KEY, connect_timeout_s=WAIT_S) as client:
                assert client.status().node_id == "primary"
        finally:
            thread.join()
            for primary in started:
                primary.close()


def test_an_absent_primary_is_told_after_the_timeout(primary: CannedPrimary) -> None:
    with os_socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        with pytest.raises(RequestFailed, match="nothing answers") as caught:
            Client(f"127.0.0.1:{placeholder.getsockname()[1]}", fleet_key=KEY, connect_timeout_s=0.3)
    assert caught.value.code is FailureCode.UNAVAILABLE


def test_the_key_comes_from_a_file_or_an_argument(primary: CannedPrimary, tmp_path: Path) -> None:
    path = tmp_path / "psk"
    write_secret_file(path, KEY.psk)
    with Client(primary.address.replace("127.0.0.1", "localhost"), psk_file=path) as client:
        assert client.status().node_id == "primary"
    with pytest.raises(SecretFileError):
        Client(primary.address, psk_file=tmp_path / "missing")
    with pytest.raises(ConfigError, match="exactly one"):
        Client(primary.address)
    with pytest.raises(ConfigError, match="not an address"):
        Client("nonsense", fleet_key=KEY)


def test_a_closed_client_says_so(primary: CannedPrimary) -> None:
    client = Client(primary.address, fleet_key=KEY)
    session = client.create_session()
    client.close()
    client.close()
    session.close()
    with pytest.raises(RequestFailed, match="closed"):
        client.status()


def test_closing_the_client_ends_a_call_that_waits_on_another_thread(primary: CannedPrimary) -> None:
    client = Client(primary.address, fleet_key=KEY)
    session = client.create_session()
    session.append([STALL])
    stream = session.generate(max_tokens=10)
    next(stream)
    errors: list[RequestFailed] = []

    def wait() -> None:
        try:
            next(stream)
        except RequestFailed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    thread.join(WAIT_S)
    assert [error.code for error in errors] == [FailureCode.CANCELLED]


def test_a_primary_that_leaves_fails_the_call_at_once(client: Client, primary: CannedPrimary) -> None:
    session = client.create_session()
    session.append([STALL])
    stream = session.generate(max_tokens=10)
    next(stream)
    primary.reactor.call(lambda: primary.server.close("maintenance"))
    with pytest.raises(RequestFailed, match="maintenance") as caught:
        next(stream)
    assert caught.value.code is FailureCode.UNAVAILABLE
