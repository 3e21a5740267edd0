"""One connection of the web server: one request at a time, and no thread that waits for its reader.

waitress takes up all requests that come at once, and answers each as soon as the answer before it is made. Who asks for much
and reads nothing would so have a thread wait, without bound, for room in the connection. Here a request is taken up when the
answer before it has left for the system; what came behind it waits as bytes, one read of them at most, and nothing more is
read meanwhile. So one answer waits in a connection at most, and since it is written in one piece into an empty buffer, the
thread that made it never waits. Live events come in many pieces: their threads wait, and there are threads for all of them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.task import ErrorTask

from dashboard.api_types import Problem
from dashboard.http import JSON, SECURITY_HEADERS, encode_json

_DROP_WHAT_WAITS: Final = struct.pack("ii", 1, 0)
_TEXTS: Final[Mapping[int, str]] = {
    400: "the request is malformed",
    413: "the body is too large",
    431: "the headers are too large",
    500: "internal error",
    501: "this transfer encoding is not known here",
}


class OneRequestParser(HTTPRequestParser):  # type: ignore[misc]
    """Takes up one request; ``keep`` is given what came behind it."""

    def __init__(self, adjustments: Any, keep: Callable[[bytes], None]) -> None:
        super().__init__(adjustments)
        self._keep = keep

    def received(self, data: bytes) -> int:
        taken = int(super().received(data))
        # Blank lines before a request make an empty one, of which nobody is told: what follows them is read on at once.
        if self.completed and not self.empty and taken < len(data):
            self._keep(data[taken:])
            return len(data)
        return taken


class JsonErrorTask(ErrorTask):  # type: ignore[misc]
    """Tells an error that no route makes in the form of all others."""

    def execute(self) -> None:
        error = self.request.error
        body = encode_json(Problem(detail=_TEXTS.get(error.code, _TEXTS[400])))
        self.status = f"{error.code} {error.reason}"
        self.response_headers.extend([("Content-Type", JSON), ("Cache-Control", "no-store"), *SECURITY_HEADERS.items()])
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class WebChannel(HTTPChannel):  # type: ignore[misc]
    """A connection by the rules above, and what :class:`~dashboard.connections.ConnectionRules` look at."""

    error_task_class = JsonErrorTask

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.since = time.monotonic()
        self.sent_bytes = 0
        self._behind = b""
        super().__init__(*arguments, **named)

    def parser_class(self, adjustments: Any) -> OneRequestParser:
        return OneRequestParser(adjustments, self._keep)

    def _keep(self, data: bytes) -> None:
        self._behind = data

    def readable(self) -> bool:
        return not self._behind and bool(super().readable())

    def writable(self) -> bool:
        return bool(super().writable()) or bool(self._behind and not self.requests)

    def handle_write(self) -> None:
        super().handle_write()
        if self._behind and self.connected and not self.requests and not self.total_outbufs_len:
            data, self._behind = self._behind, b""
            self.received(data)

    def received(self, data: bytes) -> bool:
        before = self.request
        taken = bool(super().received(data))
        if self.request is not before:
            self.since = time.monotonic()
        return taken

    def service(self) -> None:
        try:
            super().service()
        finally:
            self.since = time.monotonic()

    def send(self, data: bytes, do_close: bool = True) -> int:
        sent = int(super().send(data, do_close))
        self.sent_bytes += sent
        return sent

    def cut(self) -> None:
        """Close it now, on the thread that serves all connections. What was not taken is not kept by the system either."""
        if self.total_outbufs_len:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_WHAT_WAITS)
        self.handle_close()
