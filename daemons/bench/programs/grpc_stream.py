"""Reference: a gRPC response stream of 2 MiB chunks, each with its SHA-256, checked on arrival: the earlier system's way."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from daemons.bench.harness import serve
from daemons.bench.programs.bytes_source import STREAM_CHUNK_BYTES, pieces

HOST = "127.0.0.1"
SERVICE, METHOD = "bench.Transfer", "Fetch"
DIGEST_BYTES = 32
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
TIMEOUT_SECONDS = 60.0


class Sender:
    def __init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
        handler = grpc.unary_stream_rpc_method_handler(self._stream)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self._port = self._server.add_insecure_port(f"{HOST}:0")
        self._server.start()

    def open(self) -> dict[str, object]:
        return {"port": self._port}

    def run(self, total_bytes: int) -> dict[str, object]:
        """Only prepares: the server's own threads send."""
        pieces(total_bytes, STREAM_CHUNK_BYTES)
        return {}

    def _stream(self, request: bytes, context: Any) -> Iterator[bytes]:
        for part in pieces(int(request), STREAM_CHUNK_BYTES):
            yield hashlib.sha256(part).digest() + part

    def close(self) -> None:
        self._server.stop(1.0).wait()


class Receiver:
    def __init__(self) -> None:
        self._channel: Any = None
        self._held: list[bytes] = []

    def connect(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"{HOST}:{port}", options=OPTIONS)

    def fetch(self, total_bytes: int) -> dict[str, object]:
        self._held = []
        started = time.perf_counter()
        call = self._channel.unary_stream(f"/{SERVICE}/{METHOD}")
        for message in call(str(total_bytes).encode(), timeout=TIMEOUT_SECONDS):
            view = memoryview(message)
            if hashlib.sha256(view[DIGEST_BYTES:]).digest() != view[:DIGEST_BYTES]:
                raise ConnectionError("a chunk arrived damaged")
            self._held.append(message)
        return {"wall_s": time.perf_counter() - started}

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def main() -> None:
    if sys.argv[1] == "sender":
        sender = Sender()
        serve({"open": sender.open, "run": sender.run})
        sender.close()
    else:
        receiver = Receiver()
        serve({"connect": receiver.connect, "fetch": receiver.fetch})
        receiver.close()


if __name__ == "__main__":
    main()
