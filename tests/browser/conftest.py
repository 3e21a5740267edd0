"""Fixtures: a dashboard that tests fill, a real fleet behind a real dashboard process, and browsers on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from kakeya_zmq.io.addresses import Address
from tests.browser.browser_kit import Browser, open_browser
from tests.dashboard.test_dashboard_process import Process, dashboard
from tests.dashboard.web_kit import Web
from tests.fleet_rig import Fleet, ask, kept_fleet, kept_processes, prompt, wait_until
from wire.keys import write_secret_file

KEY: Final = "0123456789abcdef" * 3
FLEET_FLAGS: Final = ("--telemetry-interval-s", "0.3", "--ttl-seconds", "4")


@dataclass(frozen=True)
class WatchedFleet:
    """A primary, a worker and a cache peer, and a ``kakeya dashboard`` that listens to them."""

    fleet: Fleet
    web: Process

    def work(self, seed: int, length: int = 900) -> None:
        """One prompt and an answer."""
        with self.fleet["primary"].client() as client, client.create_session() as session:
            ask(session, prompt(length, seed), 8)

    def post(self, path: str, body: object, method: str = "POST") -> Any:
        answer = self.web.call(method, path, body, key=KEY)
        assert answer.status == 200, answer.body
        return answer.json


@pytest.fixture(scope="module")
def watched(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedFleet]:
    home = tmp_path_factory.mktemp("user") / ".kakeya"
    home.mkdir(mode=0o700)
    with kept_fleet(request, model, home) as fleet:
        fleet.start("primary", "worker", "cache", primary=FLEET_FLAGS, worker=FLEET_FLAGS, cache=FLEET_FLAGS)
        write_secret_file(home / "network_api_key", KEY.encode())
        with dashboard(fleet.environment, tmp_path_factory.mktemp("dashboard")) as web:
            kept_processes(request).add(web.process.pid)
            wait_until(lambda: list(web.node_states().values()) == ["online"] * 3, "all nodes are online")
            yield WatchedFleet(fleet, web)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    """A served dashboard with an API key that knows nothing yet."""
    with closing(Web(tmp_path)) as made:
        yield made


@pytest.fixture
def browse(tmp_path: Path) -> Iterator[Callable[[Address], Browser]]:
    """Opens a browser for a dashboard."""
    with ExitStack() as stack:
        yield lambda address: stack.enter_context(open_browser(address, tmp_path))
