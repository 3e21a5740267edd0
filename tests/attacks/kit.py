"""What an attacker has: raw sockets and the second implementation of the wire. And what is measured around every attack."""

from __future__ import annotations

import contextlib
import json
import socket as os_socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil
import pytest
import zmq

from tests.fleet_rig import Fleet, Node, kept_fleet, resident_bytes, wait_until
from tests.vectors import independent as wire
from wire.messages import Status

MEMORY_MAX: Final = 32 * 2**20
ANSWER_S: Final = 10.0
ZMTP_NULL_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
ZMTP_CURVE_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)
ZMTP_PLAIN_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00PLAIN" + bytes(15) + bytes(32)
GET_STATUS: Final = [12]
GOODBYE: Final = 9
"""Tag of the envelope that ends a session."""


class RawClient:
    """A DEALER with the fleet's CURVE keys (or others), and nothing of the project behind it.

    Args:
        deaf: takes in next to nothing that is not asked for by :meth:`receive`.
    """

    def __init__(
        self, address: str, psk: bytes, *, curve_psk: bytes | None = None, reconnects: bool = True, deaf: bool = False
    ) -> None:
        self.psk = psk
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if not reconnects:
            self.socket.reconnect_ivl = -1
        if deaf:
            self.socket.rcvhwm = 2
            self.socket.setsockopt(zmq.RCVBUF, 4096)
        curve_psk = psk if curve_psk is None else curve_psk
        server_public, _ = wire.curve_pair(wire.purpose_key(curve_psk, "kz curve server"))
        own_public, own_secret = wire.curve_pair(wire.purpose_key(curve_psk, "kz curve client"))
        self.socket.curve_serverkey = server_public
        self.socket.curve_publickey, self.socket.curve_secretkey = own_public, own_secret
        self.socket.connect(f"tcp://{address}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # What was sent last still has to get out; a server that does not let us in never takes it.
        self.socket.close(linger=1000)
        self._context.term()

    def send(self, *frames: bytes) -> None:
        assert self.socket.poll(int(ANSWER_S * 1000), zmq.POLLOUT)
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = ANSWER_S) -> list[bytes] | None:
        return self.socket.recv_multipart() if self.socket.poll(int(timeout_s * 1000)) else None

    def hello(self, who: wire.Identity, **options: Any) -> tuple[tuple[bytes, bytes], bytes]:
        """A HELLO, not sent, and the secret that belongs to it."""
        secret = wire.os.urandom(32)
        return wire.make_hello(self.psk, who, wire.curve_pair(secret)[0], **options), secret

    def join(self, who: wire.Identity | None = None, **options: Any) -> wire.Session:
        """A proper session."""
        hello, secret = self.hello(who or wire.Identity.new(f"raw-{wire.os.urandom(4).hex()}"), **options)
        self.send(*hello)
        answer = self.receive()
        assert answer is not None, "no WELCOME"
        return wire.start_session(self.psk, secret, hello, answer[0], answer[1])

    def ask(self, session: wire.Session, body: list[Any], number: int = 1, deadline_ms: int = 10_000) -> list[Any]:
        """One request; the first envelope that answers it."""
        self.send(*session.seal([1, number, deadline_ms, body]))
        return self.answer_to(session, number)

    def await_goodbye(self, session: wire.Session) -> None:
        """The server says that the session is over; whatever else of it comes before."""
        deadline = time.monotonic() + ANSWER_S
        while (left := deadline - time.monotonic()) > 0 and (frames := self.receive(left)) is not None:
            if wire.unpack_header(frames[0])[0] == wire.SEALED and session.open(frames[0], frames[1])[0] == GOODBYE:
                return
        raise AssertionError("the session goes on")

    def assert_unknown(self, session: wire.Session, number: int) -> None:
        """A request in a session that is over: that it is not known is all that comes."""
        self.send(*session.seal([1, number, 2_000, GET_STATUS]))
        frames = self.receive()
        assert frames is not None, "no answer"
        assert wire.unpack_header(frames[0])[0] == wire.UNKNOWN_SESSION, "the session is served"
        assert self.receive(0.2) is None, "more than that comes"

    def answer_to(self, session: wire.Session, number: int, timeout_s: float = ANSWER_S) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            frames = self.receive(left)
            if frames is None:
                break
            if wire.unpack_header(frames[0])[0] != wire.SEALED:
                continue
            envelope: list[Any] = session.open(frames[0], frames[1])
            if len(envelope) > 1 and envelope[1] == number:
                return envelope
        raise AssertionError("no answer")


def tcp(address: str) -> os_socket.socket:
    host, _, port = address.rpartition(":")
    return os_socket.create_connection((host, int(port)), timeout=10)


def until_closed(connection: os_socket.socket, timeout_s: float = 15.0) -> bytes:
    """Everything the other side still says before it hangs up."""
    connection.settimeout(timeout_s)
    said = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65_536):
            said += data
    return said


class Relay:
    """Stands between one client and a node, so that bytes can be put behind a handshake that the client has made."""

    def __init__(self, address: str) -> None:
        self._listener = os_socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.hung_up = threading.Event()
        """The node has ended the connection."""
        self._server = tcp(address)
        self._thread = threading.Thread(target=self._run, name="relay")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError), tcp(self.address):  # it waits for somebody
            pass
        self._listener.close()
        self._end(self._server)
        self._thread.join()
        self._server.close()

    def say(self, data: bytes) -> None:
        """Send as if the client had; when it is idle, this is where its next frame would begin."""
        self._server.sendall(data)

    def _run(self) -> None:
        client = self._listener.accept()[0]
        with client:
            back = threading.Thread(target=self._forward, args=(self._server, client), name="relay-back")
            back.start()
            self._forward(client, self._server)
            back.join()

    def _forward(self, source: os_socket.socket, sink: os_socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        if source is self._server:
            self.hung_up.set()
        self._end(sink)

    @staticmethod
    def _end(connection: os_socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(os_socket.SHUT_RDWR)


class Honest:
    """A client of the project that works on the daemon all the time; every call must be answered, soon."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honest-client")
        self.answers = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.answers > 0 or bool(self.failures), "the honest client is served")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._node.client() as client:
                while not self._stop.is_set():
                    began = time.monotonic()
                    client.status()
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                    self.answers += 1
                    self._stop.wait(0.02)  # a pace, no synchronisation: a status every 20 ms is plenty
        except Exception as error:
            self.failures.append(repr(error))


class Siege:
    """The daemon under attack: its refusals, its audit log, its memory, and an honest client all the while."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.node = fleet[name]
        self.psk = fleet.psk_file.read_bytes().strip()
        self.folder = fleet.home / "nodes" / name

    @property
    def address(self) -> str:
        return self.node.address

    def client(self, **options: Any) -> RawClient:
        return RawClient(self.address, self.psk, **options)

    def refusals(self) -> dict[str, int]:
        return {name: int(count or 0) for name, count in self.node.status().sections["refusals"].items()}

    def audited(self, kind: str = "refused") -> list[dict[str, Any]]:
        path = self.folder / "audit.jsonl"
        entries = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
        return [entry for entry in entries if entry["kind"] == kind]

    @contextlib.contextmanager
    def expect(self, *reasons: str, count: int = 1, memory_max: int = MEMORY_MAX) -> Iterator[None]:
        """Around an attack: it is refused for one of these reasons, counted and audited, at no cost and to nobody's harm."""
        before, audited = self.refusals(), len(self.audited())
        memory = resident_bytes(self.node.pid)
        with Honest(self.node) as honest:
            yield

            def counted() -> bool:
                now = self.refusals()
                return sum(now.get(reason, 0) - before.get(reason, 0) for reason in reasons) >= count

            wait_until(counted, f"refused: {reasons}; refusals are {self.refusals()}, were {before}")
            grown = resident_bytes(self.node.pid) - memory
            served = honest.answers
            wait_until(lambda: honest.answers > served or bool(honest.failures), "the honest client is still served")
        assert honest.failures == []
        assert grown < memory_max, f"memory grew by {grown / 2**20:.1f} MiB"
        told = self.audited()
        assert {entry["reason"] for entry in told} & set(reasons), f"not in the audit log: {reasons}"
        assert len(told) > audited or any(entry["count"] for entry in told)
        for entry in told:
            assert set(entry) <= {"time", "kind", "reason", "count", "node_id", "suppressed"}

    def status(self) -> Status:
        return self.node.status()


@contextlib.contextmanager
def lone_cache(
    request: pytest.FixtureRequest, home: Path, name: str, *flags: str, open_files: int | None = None
) -> Iterator[Siege]:
    """A cache daemon of its own, with flags (and a limit on open files) of its own, for a module's tests."""
    with kept_fleet(request, home / "no-model", home) as fleet:
        node = fleet.add("cache", *flags, name=name)
        if open_files is not None:
            node.wrapper = ("sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh")
        node.launch()
        node.wait_ready()
        yield Siege(fleet, name)


def repeat(seconds: float, action: Callable[[], None]) -> None:
    """Do something again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        action()


def descriptors(siege: Siege) -> int:
    """Open in the daemon."""
    return psutil.Process(siege.node.pid).num_fds()


def psk_of(path: Path) -> bytes:
    return path.read_bytes().strip()
