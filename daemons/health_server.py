"""The HTTP server of the health endpoint: one thread and sixteen connections, whoever knocks and however slowly.

Any program of this machine can connect, so nothing here grows with what it does. A request has five seconds from its
connection's first moment to its last byte, and a few kilobytes. Of too many connections the oldest goes: a probe sends its
request at once and is answered in the same turn, and one that is not may try again.

It answers to the names of the loopback interface only (421 else): a page elsewhere can have its own name lead here, and its
browser says that name in the Host header. A probe of HTTP/1.0 that names no host is no browser, and is answered.
"""

from __future__ import annotations

import errno
import http.server
import io
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from dashboard.hosts import host_rule
from kakeya_zmq.io.wake_up import WakeUp
from wire.errors import ConfigError, PortInUseError

HOST: Final = "127.0.0.1"
_HOSTS: Final = host_rule(HOST)
CONNECTIONS_MAX: Final = 16
REQUEST_S: Final = 5.0
REQUEST_BYTES_MAX: Final = 8192
BACKLOG: Final = 128
TURN_S: Final = 0.5
"""How long at most nothing is looked at."""
ACCEPT_PAUSE_S: Final = 0.1
"""Before the next attempt to let somebody in when the process has no free file descriptors."""
_HEADERS_END: Final = (b"\r\n\r\n", b"\n\n")

Answer: TypeAlias = Callable[[str], tuple[HTTPStatus, dict[str, Any]] | None]
"""Status and body for a path; None when there is no such path. Called on the server's thread."""


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    until: float
    request: bytearray = field(default_factory=bytearray)
    answered: bool = False


class HealthServer:
    """Answers until it is closed.

    Raises:
        PortInUseError: the port is taken.
        ConfigError: the port cannot be bound.
    """

    def __init__(self, answer: Answer, port: int) -> None:
        self._answer = answer
        self._listener = _listen(port)
        self.port = int(self._listener.getsockname()[1])
        self._connections: list[_Connection] = []
        """The oldest first."""
        self._wake_up = WakeUp()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, whatever is under way. Idempotent."""
        self._closing = True
        self._wake_up.notify()
        self._thread.join(REQUEST_S)

    # --- the server's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._wake_up, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ, self._listener)
            try:
                while not self._closing:
                    self._turn(selector)
            finally:
                for connection in list(self._connections):
                    self._end(selector, connection)
                self._wake_up.close()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        ready = [key.data for key, _ in selector.select(TURN_S)]
        # Whoever has been let in is answered before the next one may take his place.
        for each in ready:
            if isinstance(each, _Connection):
                self._read(selector, each)
        now = time.monotonic()
        for connection in [each for each in self._connections if now >= each.until]:
            self._end(selector, connection)
        if self._listener in ready:
            self._let_in(selector, now)

    def _let_in(self, selector: selectors.BaseSelector, now: float) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Out of file descriptors: one of ours is given up, and the next attempt is not made at once.
            for oldest in self._connections[:1]:
                self._end(selector, oldest)
            time.sleep(ACCEPT_PAUSE_S)
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            self._end(selector, self._connections[0])
        accepted.setblocking(False)
        connection = _Connection(accepted, now + REQUEST_S)
        self._connections.append(connection)
        selector.register(accepted, selectors.EVENT_READ, connection)
        self._read(selector, connection)  # it is mostly there already

    def _read(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(selector, connection)
            return
        if connection.answered:
            return  # what comes after the request is nobody's business, but closing now would take the answer back
        connection.request += data
        if len(connection.request) > REQUEST_BYTES_MAX:
            self._end(selector, connection)
        elif any(end in connection.request for end in _HEADERS_END):
            connection.answered = True
            try:
                # An answer is smaller than the buffer of any new connection.
                connection.socket.send(_Exchange(bytes(connection.request), self._answer).answered)
                connection.socket.shutdown(socket.SHUT_WR)
            except Exception:  # gone, or a request that the parser has no answer for: the next one is served all the same
                self._end(selector, connection)

    def _end(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        selector.unregister(connection.socket)
        self._connections.remove(connection)
        connection.socket.close()


class _Exchange(http.server.BaseHTTPRequestHandler):
    """One request and its answer, both as bytes."""

    def __init__(self, request: bytes, answer: Answer) -> None:
        self._answer = answer
        self.rfile = io.BytesIO(request)
        self.wfile = io.BytesIO()
        self.client_address = (HOST, 0)
        self.close_connection = True
        self.handle_one_request()

    @property
    def answered(self) -> bytes:
        return self.wfile.getvalue()  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        found = self._answer(self.path.partition("?")[0])
        status, body = found if found is not None else (HTTPStatus.NOT_FOUND, {"detail": "no such path"})
        if not self._is_meant():
            status, body = HTTPStatus.MISDIRECTED_REQUEST, {"detail": "this is not the host that was asked for"}
        data = json.dumps(body).encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def _is_meant(self) -> bool:
        """Whether the request names this machine's loopback interface."""
        named = self.headers.get_all("Host", [])
        if not named:
            return self.request_version == "HTTP/1.0"
        return len(named) == 1 and _HOSTS.allows(named[0].strip())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Not logged: a probe comes every few seconds."""


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            remedy = "stop what listens there, or choose another --runtime-health-port"
            raise PortInUseError(f"{HOST}:{port} is already in use", remedy=remedy) from None
        raise ConfigError(f"the health endpoint cannot listen on port {port}: {error.strerror}") from None
    return listener
