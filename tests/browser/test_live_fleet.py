"""The page over a running fleet: every view, a job's progress, a node that dies, a node that is registered."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kakeya_zmq.io.addresses import Address
from tests.browser.browser_kit import DESKTOP, PHONE, VIEWS, Browser
from tests.browser.conftest import KEY, WatchedFleet
from tests.fleet_rig import wait_until

Browse = Callable[[Address], Browser]
STAGE = {
    "name": "agent_critic",
    "agent": "critic",
    "round": 2,
    "hit_source": "primary_hot",
    "prefix_tokens": 4096,
    "output_tokens": 128,
    "append_s": 0.5,
    "decode_s": 4.0,
    "e2e_s": 4.5,
    "ttft_s": 0.61,
    "stop_reason": "eos",
    "complete": True,
    "ok": True,
    "review_scope": "full",
    "critic_context_tokens": 321,
}
EXPECTED = {
    "overview": ("Online nodes\n3", "primary", "worker", "cache", "KV-assisted tokens", "tokens reused"),
    "nodes": ("primary", "worker", "cache", "Private", "online", "Model / cache format"),
    "groups": ("Thunderbolt Pair", "2 of 2 online"),
    "prefill": ("Live jobs", "completed", "899", "Remote jobs", "Workers"),
    "kv": ("kv://default/", "Mounts", "hot", "cold", "content-addressed-lookup-fetch-import", "publish"),
    "requests": ("append", "generate", "local cache", "ready", "899 / 900"),
    "benchmarks": ("critic, round 2", "pass", "610 ms", "full", "321 tokens", "remote compute", "br_"),
    "register": ("Alias", "Address", "Region", "Role", "API key", "Pairing token"),
}
"""What each view must show: of the fleet, of the work that it did, and of what was posted."""

_RECORD = """
window.recorded = [];
const read = new Function("return " + arguments[0]);
const note = () => { const value = read(); if (value !== recorded.at(-1)) recorded.push(value); };
new MutationObserver(note).observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
note();
"""


def record(browser: Browser, expression: str) -> None:
    """Keep every value that an expression takes from now on, so that nothing is missed between two looks."""
    # The page's own policy forbids to evaluate text; this is the driver's part, so it is let past it.
    browser.run(_RECORD.replace('new Function("return " + arguments[0])', f"() => {expression}"))


def recorded(browser: Browser) -> list[object]:
    return list(browser.run("return window.recorded"))


def check_clean(browser: Browser, where: str) -> None:
    assert browser.complaints() == [], where
    assert browser.foreign_requests() == [], where


def test_every_view_shows_the_running_fleet(watched: WatchedFleet, browse: Browse) -> None:
    watched.work(1)
    watched.work(1)
    watched.post("/v1/network/groups", {"name": "Thunderbolt Pair", "node_ids": ["primary", "worker"]})
    run = watched.post("/v1/network/benchmarks", {"config": {}})["id"]
    stages = [{**STAGE, "name": "remote_compute", "agent": None}, STAGE]
    watched.post(f"/v1/network/benchmarks/{run}", {"stages": stages}, "PATCH")
    browser = browse(watched.web.address)
    browser.open("overview")
    for view in VIEWS:
        browser.scheme("light")
        browser.resize(DESKTOP)
        browser.go(view)
        for text in EXPECTED[view]:
            browser.wait_text(text, f"#view-{view}")
        assert browser.state == "live"
        assert browser.serious_issues() == [], view
        assert browser.overflowing() == [], view
        keep_picture(browser, f"{view}-1280")
        browser.scheme("dark")
        browser.resize(PHONE)
        assert browser.serious_issues() == [], f"{view}, dark, on a phone"
        assert browser.overflowing() == [], f"{view} on a phone"
        keep_picture(browser, f"{view}-390")
        check_clean(browser, view)
    assert browser.run("return document.querySelectorAll('.u-wrap canvas').length") == 6


def keep_picture(browser: Browser, name: str) -> None:
    """For people who want to look: set KAKEYA_PICTURES to a folder."""
    if folder := os.environ.get("KAKEYA_PICTURES"):
        browser.screenshot(Path(folder) / f"{name}.png", whole=True)


def test_the_progress_of_a_job_moves(watched: WatchedFleet, browse: Browse) -> None:
    browser = browse(watched.web.address)
    browser.open("prefill")
    record(browser, "Number(document.querySelector('#view-prefill .job .progress')?.getAttribute('aria-valuenow') ?? -1)")
    watched.work(2, 7_000)
    browser.wait_text("6,999", "#view-prefill")
    wait_until(lambda: recorded(browser)[-1] == -1, "the job's card goes")
    shown = [value for value in recorded(browser) if value != -1]
    assert len(shown) >= 3, shown
    assert shown == sorted(shown), shown
    assert shown[0] < 100
    check_clean(browser, "prefill")


def test_a_killed_node_turns_stale_and_disappears(watched: WatchedFleet, browse: Browse) -> None:
    browser = browse(watched.web.address)
    browser.open("nodes")
    row = "#view-nodes tr:has(bdi[title=cache])"
    browser.wait_text("online", row)
    record(browser, f"document.querySelector('{row} .badge')?.textContent ?? 'gone'")
    watched.fleet["cache"].kill()
    wait_until(lambda: recorded(browser)[-1] == "gone", "the killed node disappears")
    assert recorded(browser) == ["online", "stale", "gone"]
    assert "worker" in browser.text("#view-nodes")
    watched.fleet["cache"].restart()
    browser.wait_text("online", row)
    check_clean(browser, "nodes")


def test_a_node_registered_on_the_page_appears(watched: WatchedFleet, browse: Browse) -> None:
    browser = browse(watched.web.address)
    browser.open("register", PHONE)
    for name, text in (
        ("alias", "allens-mini"),
        ("address", "192.0.2.44:52051"),
        ("region", "Attic"),
        ("register-key", "wrong"),
    ):
        browser.type(f"#{name}", text)
    browser.click("#view-register button[type=submit]")
    browser.wait_text("the API key is missing or wrong", "[role=alert]")
    browser.complaints()  # The browser logs the refusal that was wanted here.
    browser.type("#register-key", KEY)
    browser.click("#view-register button[type=submit]")
    browser.wait_text("For allens-mini")
    token = browser.text("#pairing-token")
    assert len(token) > 20
    assert f"kakeya pair --dashboard {browser.origin} --node-id allens-mini" in browser.text()
    browser.wait_text("Expires in\n9 min")
    # A form that was sent is emptied, and nothing that was typed is kept anywhere else.
    assert browser.run("return [...document.querySelectorAll('input')].every((input) => input.value === '')")
    assert KEY not in browser.run(
        "return document.documentElement.outerHTML + JSON.stringify({...localStorage, ...sessionStorage})"
    )
    browser.go("nodes")
    browser.wait_text("pending", "#view-nodes tr:has(bdi[title=allens-mini])")
    assert "192.0.2.44" not in browser.run("return document.documentElement.outerHTML")
    browser.go("overview")
    browser.wait_text("allens-mini", "#view-overview .map")
    check_clean(browser, "register")
