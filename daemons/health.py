"""The health endpoint: a tiny read-only HTTP server on this machine, for service managers, load balancers and people.

``GET /healthz``                  200 when healthy, else 503; the body has the two below
``GET /v1/runtime/liveness``      what the model is doing, and since when
``GET /v1/runtime/memory``        the figures of the memory guard

The reactor's thread puts a report on the board, the server's threads read the last one. A report that is too old means that
the reactor does not turn any more, which is unhealthy, too. No session, token or address is in any of it.

It answers to the names of the loopback interface only (421 else): a page elsewhere can have its own name lead here, and its
browser says that name in the Host header. A probe of HTTP/1.0 that names no host is no browser, and is answered.
"""

from __future__ import annotations

import errno
import http.server
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any, Final

from dashboard.hosts import host_rule
from wire.errors import ConfigError, PortInUseError

HOST: Final = "127.0.0.1"
_HOSTS: Final = host_rule(HOST)
REQUEST_TIMEOUT_S: Final = 5.0
STALE_AFTER_S: Final = 30.0
"""Reports come at least every five seconds; a reactor that is silent for so long hangs."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """What the model is doing. ``phase``: starting, idle, prefill, decode, draining. ``step_s``: how long in this step."""

    phase: str
    pid: int
    sessions: int = 0
    step_s: float = 0.0
    unhealthy: str = ""
    """Why, or empty."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """One look at a daemon. ``at``: seconds on the board's clock; ``updated_at_unix``: for people."""

    liveness: Liveness
    memory: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0
    updated_at_unix: float = 0.0


class HealthBoard:
    """Holds the last report; written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: HealthReport | None = None

    def put(self, liveness: Liveness, memory: dict[str, Any]) -> None:
        self._last = HealthReport(liveness, dict(memory), self._clock(), time.time())

    def answer(self, path: str) -> tuple[HTTPStatus, dict[str, Any]] | None:
        """Status and body for a path; None when there is no such path."""
        last = self._last
        if path not in ("/healthz", "/v1/runtime/liveness", "/v1/runtime/memory"):
            return None
        if last is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "starting"}
        memory = {**last.memory, "updated_at_unix": last.updated_at_unix}
        liveness = {**asdict(last.liveness), "updated_at_unix": last.updated_at_unix}
        why = self._why_unhealthy(last)
        if why:
            liveness["unhealthy"] = why
        if path == "/v1/runtime/memory":
            return HTTPStatus.OK, memory
        if path == "/v1/runtime/liveness":
            return HTTPStatus.OK, liveness
        body = {"status": why or "ok", "liveness": liveness, "memory": memory}
        return HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, body

    def _why_unhealthy(self, last: HealthReport) -> str:
        if last.liveness.unhealthy:
            return last.liveness.unhealthy
        if last.memory.get("level") == "unhealthy":
            return "memory"
        if self._clock() - last.at > STALE_AFTER_S:
            return "the daemon does not react"
        return ""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    board: HealthBoard

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away in the middle is nobody's trouble."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        found = self.server.board.answer(self.path.partition("?")[0])
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


class HealthServer:
    """Serves a board until it is closed.

    Raises:
        PortInUseError: the port is taken.
        ConfigError: the port cannot be bound.
    """

    def __init__(self, board: HealthBoard, port: int) -> None:
        try:
            self._server = _Server((HOST, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = "stop what listens there, or choose another --runtime-health-port"
                raise PortInUseError(f"{HOST}:{port} is already in use", remedy=remedy) from None
            raise ConfigError(f"the health endpoint cannot listen on port {port}: {error.strerror}") from None
        self._server.board = board
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_TIMEOUT_S)
