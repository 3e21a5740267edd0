"""Reference: one plain TCP connection, ``sendall`` into ``recv_into`` of a warm buffer."""

from __future__ import annotations

import socket
import sys
import time

from daemons.bench.harness import serve
from daemons.bench.programs.bytes_source import MESSAGE_BYTES, pieces

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 60.0


class Sender:
    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self._listener.settimeout(TIMEOUT_SECONDS)

    def open(self) -> dict[str, object]:
        return {"port": self._listener.getsockname()[1]}

    def run(self, total_bytes: int) -> dict[str, object]:
        parts = pieces(total_bytes, MESSAGE_BYTES)
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(TIMEOUT_SECONDS)
            for part in parts:
                connection.sendall(part)
        return {}

    def close(self) -> None:
        self._listener.close()


class Receiver:
    def __init__(self) -> None:
        self._port = 0
        self._buffers: dict[int, memoryview] = {}

    def connect(self, port: int) -> None:
        self._port = port

    def fetch(self, total_bytes: int) -> dict[str, object]:
        buffer = self._buffers.setdefault(total_bytes, memoryview(bytearray(total_bytes)))
        started = time.perf_counter()
        with socket.create_connection((HOST, self._port), TIMEOUT_SECONDS) as connection:
            at = 0
            while at < total_bytes:
                count = connection.recv_into(buffer[at:])
                if count == 0:
                    raise ConnectionError("the sender went away")
                at += count
        return {"wall_s": time.perf_counter() - started}


def main() -> None:
    if sys.argv[1] == "sender":
        sender = Sender()
        serve({"open": sender.open, "run": sender.run})
        sender.close()
    else:
        receiver = Receiver()
        serve({"connect": receiver.connect, "fetch": receiver.fetch})


if __name__ == "__main__":
    main()
