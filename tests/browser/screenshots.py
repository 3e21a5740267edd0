"""Pictures for the README, of the page over a real fleet: ``python -m tests.browser.screenshots [FOLDER]``.

A primary, two workers and a cache peer run the demo model and answer prompts; nothing on the pictures is made up.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kakeya_zmq.demo.prepare import demo_model_folder, is_prepared
from tests.browser.browser_kit import Browser, open_browser
from tests.dashboard.test_dashboard_process import Process, dashboard
from tests.fleet_rig import PROJECT, Fleet, ask, prompt, wait_until
from wire.keys import write_secret_file

KEY: Final = b"pictures " * 4
FLAGS: Final = ("--telemetry-interval-s", "0.5", "--ttl-seconds", "60", "--cache-gb", "1")
PRIMARY_FLAGS: Final = (*FLAGS, "--prefill-worker-timeout-s", "120", "--primary-prefill-penalty-ms", "20000")
REGIONS: Final = {
    "primary": ("head", "Studio"),
    "worker": ("hybrid", "Office"),
    "worker-2": ("hybrid", "Attic"),
    "cache": ("cache", "Cellar"),
}
TIMEOUT_S: Final = 240.0
SETTLE_S: Final = 6.0
"""Prompts earlier than this after a node was first heard are taken for told again, and are in no chart."""
WIDE: Final = (1280, 900)
NARROW: Final = (390, 844)


@contextlib.contextmanager
def running_fleet(folder: Path) -> Iterator[tuple[Fleet, Process]]:
    model = demo_model_folder()
    if not is_prepared(model):
        raise SystemExit("the demo model is missing: run .venv/bin/python -m kakeya_zmq.demo.prepare")
    home = folder / "home"
    home.mkdir(mode=0o700)
    write_secret_file(home / "network_api_key", KEY)
    with Fleet(model, home) as fleet:
        fleet.start("primary", "worker", "cache", primary=PRIMARY_FLAGS, worker=FLAGS, cache=FLAGS)
        second = fleet.add("worker", *FLAGS, name="worker-2")
        second.launch(fleet["primary"].address)
        second.wait_ready()
        fleet.wait_joined()
        with dashboard(fleet.environment, folder / "dashboard") as web:
            wait_until(lambda: list(web.node_states().values()) == ["online"] * 4, "all nodes are online")
            yield fleet, web


def describe_nodes(web: Process) -> None:
    """Regions, and a group."""
    key = KEY.decode().strip()
    for alias, (role, region) in REGIONS.items():
        body = {"alias": alias, "address": "192.0.2.1:51051", "role": role, "region": region}
        assert web.call("POST", "/v1/network/nodes/register", body, key=key).status == 200
    body = {"name": "Thunderbolt Pair", "node_ids": ["primary", "worker"]}
    assert web.call("POST", "/v1/network/groups", body, key=key).status == 200


def answer(fleet: Fleet, tokens: list[int], count: int = 24) -> None:
    with fleet["primary"].client() as client, client.create_session() as session:
        ask(session, tokens, count, TIMEOUT_S)


def work(fleet: Fleet) -> None:
    """Prompts of all kinds: new ones, the same again, and longer ones that begin alike."""
    for seed in range(1, 4):
        first = prompt(900, seed)
        answer(fleet, first)
        answer(fleet, first)
        answer(fleet, first + prompt(400, seed + 100))
        answer(fleet, first[:640] + prompt(200, seed + 200))


def take_pictures(browser: Browser, fleet: Fleet, folder: Path) -> None:
    browser.scheme("light")
    browser.open("overview", WIDE)
    browser.wait_text("tokens reused")
    job = threading.Thread(target=answer, args=(fleet, prompt(2600, 77)))
    job.start()
    try:
        wait_until(lambda: progress(browser) >= 20, "a job is under way", TIMEOUT_S)
        browser.screenshot(folder / "dashboard-overview.png", whole=True)
    finally:
        job.join()
    browser.scheme("dark")
    browser.resize(WIDE)
    browser.go("requests")
    browser.give_key(KEY.decode().strip())
    browser.wait_text("append", "#view-requests")
    browser.click("#view-requests tr:has(.stretches) button")
    browser.wait_text("Where it came from", "#view-requests")
    browser.run("scrollTo(0, 0); document.activeElement.blur()")
    browser.screenshot(folder / "dashboard-requests.png")
    browser.resize(NARROW)
    browser.go("overview")
    browser.run("scrollTo(0, 0); document.activeElement.blur()")
    browser.screenshot(folder / "dashboard-phone.png")
    assert browser.complaints() == []


def progress(browser: Browser) -> int:
    script = "return Number(document.querySelector('.job .progress')?.getAttribute('aria-valuenow') ?? 0)"
    return int(browser.run(script))


def main() -> None:
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else PROJECT / "docs" / "images"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_fleet(folder) as (fleet, web):
            describe_nodes(web)
            settled = threading.Event()
            settled.wait(SETTLE_S)
            work(fleet)
            with open_browser(web.address, folder) as browser:
                take_pictures(browser, fleet, pictures)
    print(f"pictures are in {pictures}")


if __name__ == "__main__":
    main()
