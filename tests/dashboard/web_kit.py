"""A dashboard without a process of its own: real database, real web server on a free port, a view that tests fill."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flask import Flask

from dashboard.app import create_app
from dashboard.benchmark_store import BenchmarkStore
from dashboard.database import Database
from dashboard.hosts import host_rule
from dashboard.http import KEY_HEADER, Route
from dashboard.hub import LiveFleet
from dashboard.server import WebServer
from dashboard.services import Services
from dashboard.state import NetworkState
from kakeya_zmq.io.addresses import Address
from tests.dashboard.kit import message
from wire.events import Event

API_KEY: Final = "correct horse battery staple"


@dataclass
class Clocks:
    """Time that tests move."""

    monotonic: float = 1000.0
    wall: float = 1_800_000_000.0

    def pass_time(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


class Web:
    """One served application. Closing is the owner's part."""

    def __init__(self, folder: Path, *, api_key: str = API_KEY) -> None:
        self.clocks = Clocks()
        self.database = Database(folder / "state" / "network.sqlite3")
        self.fleet = LiveFleet(clock=lambda: self.clocks.monotonic, wall_clock=lambda: self.clocks.wall)
        self.feed_figures: dict[str, int] = {}
        self.services = Services(
            fleet=self.fleet,
            state=NetworkState(self.database),
            benchmarks=BenchmarkStore(self.database),
            api_key=api_key.encode(),
            feed_figures=lambda: self.feed_figures,
            wall_clock=lambda: self.clocks.wall,
        )
        self.app: Flask = create_app(self.services, host_rule("127.0.0.1"))
        self.server = WebServer(self.app, Address("127.0.0.1", 0))
        self.server.start()

    @property
    def routes(self) -> tuple[Route, ...]:
        found: tuple[Route, ...] = self.app.extensions["routes"]
        return found

    def tell(self, event: Event, node_id: str = "primary", incarnation: int = 1) -> None:
        """An event arrives now."""
        self.fleet.apply([(message(event, node_id, incarnation), self.clocks.monotonic)])

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = None,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        return call(self.server.address, method, path, body, key=key, raw=raw, headers=headers)

    def get(self, path: str, *, key: str | None = None) -> Any:
        """The JSON of a read that must succeed."""
        answer = self.call("GET", path, key=key)
        assert answer.status == 200, (path, answer.status, answer.body)
        return answer.json

    def post(self, path: str, body: object, *, key: str | None = API_KEY) -> Answer:
        return self.call("POST", path, body, key=key)

    def close(self) -> None:
        self.fleet.close()
        assert self.server.close()
        self.database.close()


def call(
    address: Address,
    method: str,
    path: str,
    body: object = None,
    *,
    key: str | None = None,
    raw: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request over a connection of its own."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=20)
    sent = {**({KEY_HEADER: key} if key is not None else {}), **(headers or {})}
    data = raw if raw is not None else (json.dumps(body).encode() if body is not None else None)
    if data is not None:
        sent.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        return Answer(response.status, response.read(), dict(response.headers))
    finally:
        connection.close()


@dataclass
class EventStream:
    """An open stream of server-sent events."""

    address: Address
    path: str
    key: str | None = None
    status: int = 0
    _connection: http.client.HTTPConnection = field(init=False)
    _response: http.client.HTTPResponse = field(init=False)

    def __enter__(self) -> EventStream:
        self._connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=20)
        self._connection.request("GET", self.path, headers={KEY_HEADER: self.key} if self.key else {})
        self._response = self._connection.getresponse()
        self.status = self._response.status
        return self

    def __exit__(self, *exception: object) -> None:
        self._response.close()
        self._connection.close()

    def next(self, topic: str) -> Any:
        """The data of the next event of a topic."""
        name = ""
        while line := self._response.readline():
            text = line.decode().rstrip("\n")
            if text.startswith("event: "):
                name = text.removeprefix("event: ")
            elif text.startswith("data: ") and name == topic:
                data = json.loads(text.removeprefix("data: "))
                assert data["type"] == topic
                return data["data"]
        raise AssertionError(f"the stream ended without {topic}")

    def rest(self) -> bytes:
        return self._response.read()
