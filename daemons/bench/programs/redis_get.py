"""Reference: a real redis-server that holds the bytes in 2 MiB values, and a client that GETs them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from daemons.bench.harness import serve
from daemons.bench.programs.bytes_source import STREAM_CHUNK_BYTES, pieces
from wire.errors import FailureCode, RequestFailed

HOST = "127.0.0.1"
START_TIMEOUT_SECONDS = 10.0
ANSWER_TIMEOUT_SECONDS = 10.0
"""For one value, or a word of the server."""
STOP_TIMEOUT_SECONDS = 3.0


def connected(port: int) -> Any:
    """A client that waits for no answer longer than it should take, and asks once."""
    return redis.Redis(
        host=HOST,
        port=port,
        socket_timeout=ANSWER_TIMEOUT_SECONDS,
        socket_connect_timeout=ANSWER_TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


class Sender:
    """Runs the server, without persistence, in a folder that goes away: in the run's home, if nothing else removes it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="redis-", dir=os.environ.get("KAKEYA_HOME"))
        with socket.create_server((HOST, 0)) as placeholder:
            self._port = int(placeholder.getsockname()[1])
        arguments = ["--bind", HOST, "--port", str(self._port), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            ["redis-server", *arguments, "--dir", self._folder.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what is called redis-server may be a script: it ends with all that it has started
        )
        self._filled: set[int] = set()
        self._client = connected(self._port)

    def open(self) -> dict[str, object]:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                self._client.ping()
                return {"port": self._port}
            if self._process.poll() is not None:
                raise RequestFailed(FailureCode.UNAVAILABLE, f"redis-server ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise RequestFailed(FailureCode.UNAVAILABLE, f"redis-server did not answer in {START_TIMEOUT_SECONDS:.0f} s")
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
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; on macOS a group of zombies
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_SECONDS)
        self._folder.cleanup()


class Receiver:
    def __init__(self) -> None:
        self._client: Any = None
        self._held: list[bytes] = []

    def connect(self, port: int) -> None:
        self._client = connected(port)
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
