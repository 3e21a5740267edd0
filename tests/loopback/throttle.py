"""A TCP proxy that stands for a slow link: it passes so many megabytes a second from the server to the client."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
PIECE_BYTES = 16 * 1024


class SlowLink:
    """Serves one connection after another to ``port`` of this host, until it is left.

    Args:
        port: where the server listens.
        megabytes_per_second: from the server to the client; the other way is not slowed down. It may be changed while
            bytes pass.
        listen: address and port to serve on; port 0 picks a free one.
    """

    def __init__(self, port: int, megabytes_per_second: float, listen: tuple[str, int] = (HOST, 0)) -> None:
        self._target = (HOST, port)
        self.megabytes_per_second = megabytes_per_second
        self._listener = socket.create_server(listen)
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.port: int = self._listener.getsockname()[1]
        self.passed_bytes = 0

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        # A thread that waits in accept or recv is only woken by this.
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):  # not connected any more
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
        for one in self._sockets:
            one.close()
        assert not any(thread.is_alive() for thread in self._threads)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target, timeout=5)
                except OSError:  # nothing serves there at the moment
                    client.close()
                    continue
                server.settimeout(None)
                self._sockets += [client, server]
                for source, sink, slow in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink, slow))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):  # one side is gone
            while piece := source.recv(PIECE_BYTES):
                if slow:
                    self.passed_bytes += len(piece)
                    self._ended.wait(len(piece) / (self.megabytes_per_second * 1e6))
                sink.sendall(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):  # closed before
                one.shutdown(socket.SHUT_RDWR)
