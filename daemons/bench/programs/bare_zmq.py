"""Reference: bare pyzmq PUSH/PULL, nothing sealed and nothing verified. Fresh sockets for each transfer, warm arenas.

``run`` answers a request with the port of a fresh PUSH and sends the bytes through it; ``fetch`` asks, connects a fresh PULL
and takes them. As with ours, the clock runs from the request until the last byte is there. The receiver lets each frame go
when the next one comes, so that libzmq's buffers stay warm: kept frames would cost it page faults, three times the time.
"""

from __future__ import annotations

import sys
import time

import zmq

from daemons.bench.harness import serve
from daemons.bench.programs.bytes_source import MESSAGE_BYTES, pieces
from kakeya_zmq.io.memory import tune_heap

HOST = "127.0.0.1"
TIMEOUT_MS = 60_000


class Sender:
    """The holder of the bytes; ``run`` serves one transfer."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.REP)
        self._control.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._port = self._control.bind_to_random_port(f"tcp://{HOST}")

    def open(self) -> dict[str, object]:
        return {"port": self._port}

    def run(self, total_bytes: int) -> dict[str, object]:
        parts = pieces(total_bytes, MESSAGE_BYTES)
        self._control.recv()
        with self._context.socket(zmq.PUSH) as push:
            push.setsockopt(zmq.LINGER, TIMEOUT_MS)
            self._control.send_string(str(push.bind_to_random_port(f"tcp://{HOST}")))
            cpu_s = time.process_time()
            for part in parts:
                push.send(part, copy=False)
            cpu_s = time.process_time() - cpu_s
            self._control.recv()  # the receiver has it all
            self._control.send(b"")
        return {"cpu_s": cpu_s}

    def close(self) -> None:
        self._control.close(0)
        self._context.term()


class Receiver:
    """Asks the sender behind ``port``."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.REQ)
        self._control.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)

    def connect(self, port: int) -> None:
        self._control.connect(f"tcp://{HOST}:{port}")

    def fetch(self, total_bytes: int) -> dict[str, object]:
        cpu_s, started = time.process_time(), time.perf_counter()
        self._control.send(b"")
        port = self._control.recv().decode()
        left = total_bytes
        with self._context.socket(zmq.PULL) as pull:
            pull.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            pull.connect(f"tcp://{HOST}:{port}")
            while left > 0:
                left -= len(pull.recv(copy=False).buffer)
        wall_s = time.perf_counter() - started
        cpu_s = time.process_time() - cpu_s
        self._control.send(b"")
        self._control.recv()
        return {"wall_s": wall_s, "cpu_s": cpu_s}

    def close(self) -> None:
        self._control.close(0)
        self._context.term()


def main() -> None:
    tune_heap()
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
