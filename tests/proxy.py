"""A TCP proxy between two nodes that can hold, cut, damage and count what passes, at an exact byte.

One thread, one selector. It stands before one *server* (the node whose ports it forwards); what it is told takes effect
before the next byte passes. A test brings a request to a step by holding bytes, breaks something, and lets them go again.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import random
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

PIECE_BYTES: Final = 64 * 1024
RECEIVE_BUFFER_BYTES: Final = 64 * 1024
"""Small, so that what is held stays with its sender."""
CONNECTING: Final = {errno.EINPROGRESS, errno.EWOULDBLOCK}
FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the ephemeral ports of Linux and macOS."""


class Plane(enum.Enum):
    """What a port of a node is for."""

    CONTROL = "control"
    BULK = "bulk"
    BUS = "bus"


class Way(enum.Enum):
    TO_SERVER = "to the server"
    TO_CLIENT = "to the client"


class Damage(enum.Enum):
    FLIP = "one bit is flipped"
    CLOSE = "the connection ends"


def free_ports(count: int, hosts: Iterable[str]) -> range:
    """``count`` adjacent ports that are free on all the hosts now."""
    hosts = tuple(hosts)
    for _ in range(200):
        first = random.randrange(FIRST_PORT, LAST_PORT - count)
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError):
            for host, port in itertools.product(hosts, range(first, first + count)):
                taken.enter_context(listen(host, port))
            return range(first, first + count)
    raise RuntimeError("no free ports")


def free_port() -> int:
    """A port of the loopback address that is free now."""
    with listen("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=_family(host))


def other_loopback() -> str:
    """A second address of this machine: where a proxy can have the same ports as the node behind it."""
    for host in ("127.0.0.2", "::1"):
        with contextlib.suppress(OSError), listen(host, 0):
            return host
    raise RuntimeError("this machine has one loopback address only")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@dataclass(frozen=True, slots=True)
class _Order:
    """Damage at an offset of one direction of one connection."""

    damage: Damage
    at: int


@dataclass(slots=True, eq=False)
class _Pipe:
    """One direction of one connection."""

    plane: Plane
    way: Way
    source: socket.socket
    sink: socket.socket
    passed: int = 0
    order: _Order | None = None
    buffer: bytes = b""


@dataclass(slots=True, eq=False)
class _Link:
    """One connection: client to proxy, proxy to server."""

    client: socket.socket
    server: socket.socket
    pipes: tuple[_Pipe, _Pipe]
    connecting: bool = True


@dataclass(slots=True)
class _Rules:
    holds: dict[tuple[Plane, Way], int] = field(default_factory=dict)
    """Bytes of each connection that may pass."""
    orders: dict[tuple[Plane, Way], _Order] = field(default_factory=dict)
    """For the next connection."""


class Proxy:
    """Serves until it is left.

    Args:
        host: where to listen.
        target: host of the server.
        ports: (the same here and there) and what they are for.
        enter: called first on the proxy's thread, for example to move it into a network namespace.
    """

    def __init__(
        self, host: str, target: str, ports: Mapping[int, Plane], enter: Callable[[], object] = lambda: None
    ) -> None:
        self._host = host
        self._target = target
        self._ports = ports
        self._enter = enter
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._lock = threading.Lock()
        self._commands: list[Callable[[], None]] = []
        self._rules = _Rules()
        self._links: list[_Link] = []
        self._listeners: list[socket.socket] = []
        self._totals: dict[tuple[Plane, Way], int] = {}
        self._done = False
        self._failure: BaseException | None = None
        self._started = threading.Event()
        # A daemon thread, because a fixture may keep the proxy for longer than one test; leaving it joins the thread.
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    # --- for the test's thread -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait(10)
        if self._failure is not None:
            self._thread.join(5)
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tell(self._stop)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def hold(self, plane: Plane, *ways: Way, after: int = 0) -> None:
        """Let at most ``after`` bytes of each connection pass in these directions (default: both)."""

        def command() -> None:
            for way in ways or tuple(Way):
                self._rules.holds[plane, way] = after

        self._tell(command)

    def release(self) -> None:
        """Let everything pass again."""
        self._tell(self._rules.holds.clear)

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told: what a pulled cable looks like."""

        def command() -> None:
            for plane, way in itertools.product(Plane, Way):
                self._rules.holds[plane, way] = 0

        self._tell(command)

    def reset(self) -> None:
        """Throw away what is held and reset every connection: what the end of a machine looks like."""

        def command() -> None:
            for link in list(self._links):
                self._close(link, reset=True)

        self._tell(command)

    def damage(self, plane: Plane, way: Way, damage: Damage, *, after: int) -> None:
        """Once for each connection there is, or for the next one if there is none: when ``after`` more bytes have passed."""

        def command() -> None:
            pipes = [pipe for link in self._links for pipe in link.pipes if (pipe.plane, pipe.way) == (plane, way)]
            for pipe in pipes:
                pipe.order = _Order(damage, pipe.passed + after)
            if not pipes:
                self._rules.orders[plane, way] = _Order(damage, after)

        self._tell(command)

    def repair(self) -> None:
        """Forget holds and damage that has not happened."""

        def command() -> None:
            self._rules.holds.clear()
            self._rules.orders.clear()
            for pipe in (pipe for link in self._links for pipe in link.pipes):
                pipe.order = None

        self._tell(command)

    def passed(self, plane: Plane, way: Way) -> int:
        """Bytes so far, over all connections."""
        return self._totals.get((plane, way), 0)

    def held(self, plane: Plane, way: Way) -> int:
        """Connections that have reached their hold."""
        limit = self._rules.holds.get((plane, way))
        if limit is None:
            return 0
        pipes = (pipe for link in tuple(self._links) for pipe in link.pipes)
        return sum((pipe.plane, pipe.way) == (plane, way) and pipe.passed >= limit for pipe in pipes)

    def _tell(self, command: Callable[[], None]) -> None:
        """Have a command carried out on the proxy's thread; returns when it is."""
        done = threading.Event()

        def carry_out() -> None:
            command()
            done.set()

        with self._lock:
            self._commands.append(carry_out)
        self._wake_write.send(b"\0")
        assert done.wait(10), "the proxy does not answer"

    # --- the proxy's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._enter()
            self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
            for port, plane in self._ports.items():
                listener = listen(self._host, port)
                listener.setblocking(False)
                self._listeners.append(listener)
                self._selector.register(listener, selectors.EVENT_READ, (listener, port, plane))
        except BaseException as error:  # told to the test's thread
            self._failure = error
            self._close_all()
            return
        finally:
            self._started.set()
        while not self._done:
            for key, mask in self._selector.select():
                match key.data:
                    case (listener, port, plane):
                        self._accept(listener, port, plane)
                    case _Link() as link if link in self._links:
                        self._move(link, key.fileobj, mask)
                    case _ if key.fileobj is self._wake_read:
                        self._woken()
        self._close_all()

    def _woken(self) -> None:
        self._wake_read.recv(4096)
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        for link in list(self._links):
            self._watch(link)

    def _stop(self) -> None:
        self._done = True

    def _close_all(self) -> None:
        for link in list(self._links):
            self._close(link)
        for one in (*self._listeners, self._wake_read, self._wake_write):
            one.close()
        self._selector.close()

    def _accept(self, listener: socket.socket, port: int, plane: Plane) -> None:
        client, _ = listener.accept()
        server = socket.socket(_family(self._target), socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        for one in (client, server):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipes = (_Pipe(plane, Way.TO_SERVER, client, server), _Pipe(plane, Way.TO_CLIENT, server, client))
        for pipe in pipes:
            pipe.order = self._rules.orders.pop((plane, pipe.way), None)
        link = _Link(client, server, pipes)
        self._links.append(link)
        code = server.connect_ex((self._target, port))
        if code not in (0, *CONNECTING):
            self._close(link, reset=True)
            return
        self._watch(link)

    def _watch(self, link: _Link) -> None:
        masks = {link.client: 0, link.server: 0}
        if link.connecting:
            masks[link.server] = selectors.EVENT_WRITE
        else:
            for pipe in link.pipes:
                if pipe.buffer:
                    masks[pipe.sink] |= selectors.EVENT_WRITE
                elif self._room(pipe) > 0:
                    masks[pipe.source] |= selectors.EVENT_READ
        for one, mask in masks.items():
            known = one in self._selector.get_map()
            if mask and known:
                self._selector.modify(one, mask, link)
            elif mask:
                self._selector.register(one, mask, link)
            elif known:
                self._selector.unregister(one)

    def _room(self, pipe: _Pipe) -> int:
        limit = self._rules.holds.get((pipe.plane, pipe.way))
        return PIECE_BYTES if limit is None else min(PIECE_BYTES, max(0, limit - pipe.passed))

    def _move(self, link: _Link, ready: object, mask: int) -> None:
        try:
            if link.connecting:
                if link.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise ConnectionError
                link.connecting = False
            for pipe in link.pipes:
                if mask & selectors.EVENT_READ and ready is pipe.source and not pipe.buffer:
                    self._read(link, pipe)
                if pipe.buffer and link in self._links:
                    self._write(pipe)
        except BlockingIOError:
            pass
        except OSError:  # one side is gone
            self._close(link, reset=True)
        if link in self._links:
            self._watch(link)

    def _read(self, link: _Link, pipe: _Pipe) -> None:
        room = self._room(pipe)
        if room == 0:
            return
        piece = pipe.source.recv(room)
        if not piece:
            self._close(link)
            return
        order = pipe.order
        at = order.at - pipe.passed if order is not None else len(piece)
        if order is not None and at < len(piece):
            pipe.order = None
            if order.damage is Damage.FLIP:
                piece = piece[:at] + bytes([piece[at] ^ 0x10]) + piece[at + 1 :]
            else:
                pipe.buffer = piece[:at]
                with contextlib.suppress(OSError):
                    self._write(pipe)
                self._close(link)
                return
        pipe.buffer = piece
        pipe.passed += len(piece)
        key = (pipe.plane, pipe.way)
        self._totals[key] = self._totals.get(key, 0) + len(piece)

    def _write(self, pipe: _Pipe) -> None:
        if pipe.buffer:
            sent = pipe.sink.send(pipe.buffer)
            pipe.buffer = pipe.buffer[sent:]

    def _close(self, link: _Link, *, reset: bool = False) -> None:
        self._links.remove(link)
        for one in (link.client, link.server):
            if one in self._selector.get_map():
                self._selector.unregister(one)
            if reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
