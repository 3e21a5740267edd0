"""The production server of the dashboard: waitress on a thread, started and stopped cleanly."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
import time
from collections import Counter
from typing import Any, Final

from flask import Flask
from waitress import create_server, wasyncore

from dashboard.channel import WebChannel
from dashboard.connections import ConnectionRules, Reason
from dashboard.live_events import READERS_MAX
from kakeya_zmq.io.addresses import Address
from wire.errors import ConfigError, PortInUseError

_log = logging.getLogger(__name__)

THREADS: Final = READERS_MAX + 8
"""Every live reader holds a thread; the others answer requests."""
CONNECTIONS_MAX: Final = 256
CONNECTIONS_OF_ADDRESS_MAX: Final = 192
"""A proxy is one address for all of its readers."""
CONNECTIONS_SPARE: Final = 16
"""Taken beyond the bound until others have gone for them: who waits to be taken is not told from who should go."""
HEADER_BYTES_MAX: Final = 32 * 1024
REQUEST_BYTES_MAX: Final = 2 * 1024 * 1024
"""Cut here before anything is kept; each route has a smaller bound of its own."""
IDLE_S: Final = 60
TURN_S: Final = 1.0
BACKLOG: Final = 128
OUTPUT_BYTES_MAX: Final = 512 * 1024
"""Of live events, what waits for a reader that is slow: then its thread waits, and its events are made less often."""
OUTPUT_OF_ALL_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all other answers that wait for their readers."""
SEND_BUFFER_BYTES: Final = 64 * 1024
"""Of the system, for each connection. Left to itself it grows to megabytes, and then takes more of a slow reader in a minute
than it hands on, at once: nothing would seem to leave for as long."""
TOLD_EVERY_S: Final = 10.0
DEFAULT_ADDRESS: Final = Address("127.0.0.1", 8090)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class WebServer:
    """Serves an application until :meth:`close`.

    Raises:
        PortInUseError: the address is taken.
        ConfigError: the address cannot be bound on this machine.
    """

    def __init__(self, app: Flask, address: Address) -> None:
        listener = _listen(address)
        self.address = Address(address.host, int(listener.getsockname()[1]))
        self._sockets: dict[int, Any] = {}
        self._server: Any = create_server(
            app,
            map=self._sockets,
            sockets=[listener],
            threads=THREADS,
            connection_limit=CONNECTIONS_MAX + CONNECTIONS_SPARE + 2,  # the listening socket and the waker are counted
            channel_timeout=IDLE_S,
            cleanup_interval=10,
            max_request_header_size=HEADER_BYTES_MAX,
            max_request_body_size=REQUEST_BYTES_MAX,
            outbuf_high_watermark=OUTPUT_BYTES_MAX,
            asyncore_use_poll=True,  # select() cannot take the descriptors that the bus of a large fleet leaves us
            ident="",
        )
        self._server.channel_class = WebChannel
        self._rules = ConnectionRules(CONNECTIONS_MAX, CONNECTIONS_OF_ADDRESS_MAX, OUTPUT_OF_ALL_BYTES_MAX)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kakeya-network-http", daemon=True)

    @property
    def closed(self) -> Counter[Reason]:
        """Connections by why they were closed before their time."""
        return self._rules.closed

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop; open streams must have been told to end. Whether everything ended in time. Idempotent."""
        if self._stopping.is_set():
            return not self._thread.is_alive()
        self._stopping.set()
        if self._thread.is_alive():
            self._server.pull_trigger()
            self._thread.join(timeout_s)
        ended: bool = self._server.task_dispatcher.shutdown(cancel_pending=True, timeout=timeout_s)
        if not self._thread.is_alive():
            wasyncore.close_all(self._sockets)
        return ended and not self._thread.is_alive()

    def _run(self) -> None:
        # One turn at a time, so that sockets are closed when no turn is using them.
        channels = self._server.active_channels
        look_at = 0.0
        report = _Report()
        while not self._stopping.is_set():
            wasyncore.loop(timeout=TURN_S, use_poll=True, map=self._sockets, count=1)
            now = time.monotonic()
            self._rules.make_room(channels.values())
            if now >= look_at:
                look_at = now + TURN_S
                self._rules.enforce(channels.values(), now)
                report.tell(self.closed, now)


class _Report:
    """A line about connections that were closed, now and then, however many they are."""

    def __init__(self) -> None:
        self._told: Counter[Reason] = Counter()
        self._next_at = 0.0

    def tell(self, closed: Counter[Reason], now: float) -> None:
        fresh = closed - self._told
        if fresh and now >= self._next_at:
            self._next_at = now + TOLD_EVERY_S
            self._told = closed.copy()
            _log.warning("closed connections: %s", ", ".join(f"{count} for {reason}" for reason, count in fresh.items()))


def _listen(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # The name of the loopback interface has two addresses; browsers and curl try both.
        family, kind, protocol, _, place = min(found, key=lambda each: each[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(address, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # handed on to all it accepts
        listener.bind(place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            remedy = "stop what listens there, or choose another with --bind"
            raise PortInUseError(f"{address} is already in use", remedy=remedy) from None
        raise _unusable(address, error) from None
    return listener


def _unusable(address: Address, error: OSError) -> ConfigError:
    text = f"cannot listen on {address}: {error.strerror or 'unknown error'}"
    return ConfigError(text, remedy="write an address of this machine, for example 127.0.0.1:8090")
