"""Reference: a real redis-server that holds the bytes in 2 MiB values, and a client that GETs them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import redis

from daemons.bench.harness import serve
from daemons.bench.programs.bytes_source import STREAM_CHUNK_BYTES, pieces
from wire.errors import FailureCode, RequestFailed

HOST = "127.0.0.1"
START_TIMEOUT_SECONDS = 20.0


class Sender:
    """Runs the server, without persistence, in a folder that goes away."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kakeya-bench-redis-")
        with socket.create_server((HOST, 0)) as placeholder:
            self._port = int(placeholder.getsockname()[1])
        arguments = ["--bind", HOST, "--port", str(self._port), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            ["redis-server", *arguments, "--dir", self._folder.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._filled: set[int] = set()
        self._client: Any = redis.Redis(host=HOST, port=self._port)

    def open(self) -> dict[str, object]:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            with contextlib.suppress(redis.ConnectionError):
                self._client.ping()
                return {"port": self._port}
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RequestFailed(FailureCode.UNAVAILABLE, "redis-server did not start")
            time.sleep(0.02)

    def run(self, total_bytes: int) -> dict[str, object]:
        """Only prepares: the server sends."""
        if total_bytes not in self._filled:
            self._filled.add(total_bytes)
            for number, part in enumerate(pieces(total_bytes, STREAM_CHUNK_BYTES)):
                self._client.set(f"{total_bytes}:{number}", bytes(part))
        return {}

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()


class Receiver:
    def __init__(self) -> None:
        self._client: Any = None
        self._held: list[bytes] = []

    def connect(self, port: int) -> None:
        self._client = redis.Redis(host=HOST, port=port)
        self._client.ping()

    def fetch(self, total_bytes: int) -> dict[str, object]:
        self._held = []
        started = time.perf_counter()
        for number in range(-(-total_bytes // STREAM_CHUNK_BYTES)):
            self._held.append(self._client.get(f"{total_bytes}:{number}"))
        wall_s = time.perf_counter() - started
        if sum(map(len, self._held)) != total_bytes:
            raise RequestFailed(FailureCode.INTERNAL, "redis lost values")
        return {"wall_s": wall_s}


def main() -> None:
    if sys.argv[1] == "sender":
        sender = Sender()
        try:
            serve({"open": sender.open, "run": sender.run})
        finally:
            sender.close()
    else:
        receiver = Receiver()
        serve({"connect": receiver.connect, "fetch": receiver.fetch})


if __name__ == "__main__":
    main()
