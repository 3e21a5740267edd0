"""The page by itself: hostile names, silence and loss, the API key, the keyboard, what survives an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from dashboard.server import WebServer
from kakeya_zmq.io.addresses import Address
from tests.browser.browser_kit import DESKTOP, PHONE, VIEWS, Browser
from tests.dashboard.fixtures_fleet import tell_fleet
from tests.dashboard.kit import snapshot, worker_snapshot
from tests.dashboard.web_kit import API_KEY, Web
from tests.fleet_rig import wait_until
from wire.events import JobEvent, RequestEvent, SourceView

Browse = Callable[[Address], Browser]
HOSTILE = (
    "<script>window.harmed = 1</script>",
    '<img src=x onerror="window.harmed = 2">',
    "n" * 100,
    "\u202eevil\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "👩‍👩‍👧‍👦🏴‍☠️ é̂́",
    "constructor",
    "__proto__",
    "two\nlines\x1b[2J\u200b\U000e0041\u00ad",
)


SHOWN = {
    HOSTILE[3]: HOSTILE[3].replace("\u202e", r"\u202e").replace("\u202c", r"\u202c"),
    HOSTILE[7]: r"two\u000alines\u001b[2J\u200b\u{e0041}\u00ad",
}
"""What cannot be seen, or turns the direction, is shown as an escape; emoji stay whole."""


def tell_hostile(web: Web) -> None:
    """Hostile text wherever a node, or somebody with the API key, can put some."""
    for index, text in enumerate(HOSTILE):
        body = {"alias": text, "address": "192.0.2.1:5", "region": text[::-1], "role": "cache"}
        assert web.post("/v1/network/nodes/register", body).status == 200
        assert web.post("/v1/network/groups", {"name": text, "node_ids": [text, "primary"]}).status == 200
        model = snapshot().models[0].__class__(model_id=text, cache_format_version=text, fingerprint="ab" * 32)
        web.tell(worker_snapshot(models=(model,)), f"node-{index}")
        job = JobEvent(job_id=text, state="running", asker=text, tokens_total=10, tokens_done=index, reason=text)
        web.tell(job, f"node-{index}")
        source = SourceView(kind=text, start=0, end=5, node_id=text)
        web.tell(
            RequestEvent(
                request_id=text, operation="append", outcome="ready", source="worker", sources=(source,), reasons=(text,)
            ),
            f"node-{index}",
        )
    tell_fleet(web)
    run = web.post("/v1/network/benchmarks", {"kind": HOSTILE[0]}).json["id"]
    stage = {"name": "remote_compute", "agent": HOSTILE[1], "stop_reason": HOSTILE[2], "prefix_tokens": 1}
    assert web.call("PATCH", f"/v1/network/benchmarks/{run}", {"stages": [stage]}, key=API_KEY).status == 200


def let_events_go(web: Web) -> None:
    """The dashboard's clock stands still unless it is moved, and live events go by it; so does a node's growing stale."""
    web.clocks.pass_time(2.1)


def wait_content(browser: Browser, view: str, text: str) -> None:
    """Wait until a view holds a text, shown in full or cut off."""
    script = "return document.getElementById('view-' + arguments[0]).textContent"
    wait_until(lambda: text in browser.run(script, view), f"{text!r} is on {view}")


def test_hostile_names_are_text_and_break_nothing(web: Web, browse: Browse) -> None:
    tell_hostile(web)
    browser = browse(web.server.address)
    browser.open("overview")
    browser.give_key(API_KEY)
    for view in VIEWS:
        browser.resize(DESKTOP)
        browser.go(view)
        if view in ("overview", "nodes", "groups", "register"):
            for text in HOSTILE:
                wait_content(browser, view, SHOWN.get(text, text))
        browser.run("document.querySelectorAll('main button[aria-expanded=false]').forEach((button) => button.click())")
        wait_until(lambda view=view: not browser.all(f"#view-{view} button[aria-expanded=false]"), f"{view} is open")
        assert browser.overflowing() == [], view
        if view == "requests":
            assert browser.serious_issues() == [], "requests with their details"
        browser.resize(PHONE)
        assert browser.overflowing() == [], f"{view} on a phone"
        assert browser.run("return document.querySelectorAll('main script, main img, main iframe').length") == 0
        assert browser.run("return window.harmed ?? null") is None
        assert browser.complaints() == [], view
    assert browser.foreign_requests() == []


def test_a_node_that_no_stretch_is_named_after_is_no_stretch_of_the_bar(web: Web, browse: Browse) -> None:
    sources = (
        SourceView(kind="hot", start=0, end=64),
        SourceView(kind="remote_cache", start=64, end=64, node_id="far-away", transfer_bytes=4096),
    )
    told = RequestEvent(
        request_id="r", operation="append", outcome="ready", source="hot", prompt_tokens=64, boundary=64, sources=sources
    )
    web.tell(snapshot(), "primary")
    web.tell(told, "primary")
    browser = browse(web.server.address)
    browser.open("requests")
    label = "return document.querySelector('#view-requests .stretches')?.getAttribute('aria-label') ?? ''"
    wait_until(lambda: "0 to 64" in browser.run(label), "the bar has its label")
    assert "64 to 64" not in browser.run(label)
    assert browser.run("return document.querySelectorAll('#view-requests .stretches .fill').length") == 1


def test_silence_loss_and_return_are_told(web: Web, browse: Browse) -> None:
    browser = browse(web.server.address)
    browser.open("nodes")
    wait_until(lambda: browser.state == "waiting", "no node was heard")
    browser.wait_text("No node has been heard yet", "#banner")
    web.tell(snapshot(), "primary")
    let_events_go(web)
    wait_until(lambda: browser.state == "live", "a node was heard")
    assert browser.text("#banner") == ""
    web.clocks.pass_time(5.0)
    web.tell(snapshot(), "other")
    web.fleet.tick()
    browser.wait_text("Stale: primary", "#banner")
    browser.wait_text("silent for 7 s", "#view-nodes")
    web.clocks.pass_time(60.0)
    web.fleet.tick()
    wait_until(lambda: browser.state == "silent", "the bus is silent")
    browser.wait_text("The bus is silent", "#banner")
    assert browser.text("#state-text") == "Bus silent"
    assert browser.complaints() == []


def test_a_lost_dashboard_is_told_and_found_again(tmp_path: Path, browse: Browse) -> None:
    web = Web(tmp_path / "first")
    place = web.server.address
    try:
        web.tell(snapshot(), "primary")
        browser = browse(place)
        browser.open("nodes")
        browser.wait_text("primary")
    finally:
        web.close()
    wait_until(lambda: browser.state == "lost", "the dashboard is away")
    browser.wait_text("No connection", "#banner")
    assert "primary" in browser.text("#view-nodes"), "what was known stays"
    again = Web(tmp_path / "second")
    server = WebServer(again.app, place)
    server.start()
    try:
        again.tell(snapshot(), "newcomer")
        wait_until(lambda: browser.state == "live", "the page is connected again")
        browser.wait_text("newcomer")
    finally:
        again.close()
        assert server.close()


def test_the_api_key_shows_more_and_is_kept_nowhere(web: Web, browse: Browse) -> None:
    tell_fleet(web)
    browser = browse(web.server.address)
    browser.open("nodes")
    browser.wait_text("primary")
    everything = (
        "return document.documentElement.outerHTML + location.href + JSON.stringify({...localStorage, ...sessionStorage})"
    )
    assert "192.0.2." not in browser.run(everything)
    browser.offer_key("wrong")
    browser.wait_text("the API key is missing or wrong", "#key-dialog")
    browser.complaints()  # The browser logs the refusal that was wanted here.
    browser.type("#api-key", API_KEY)
    browser.click("#key-dialog button[type=submit]")
    wait_until(lambda: browser.text("#key-button") == "Key given", "the key is taken")
    browser.wait_text("primary")
    browser.click("#view-nodes tr:has(bdi[title=primary]) button")
    browser.wait_text("192.0.2.7:51051")
    assert API_KEY not in browser.run(everything)
    browser.click("#key-button")
    browser.click("#key-dialog button")
    wait_until(lambda: "192.0.2." not in browser.run(everything), "addresses are gone with the key")
    assert browser.complaints() == []


def test_the_keyboard_is_enough_and_an_update_takes_nothing_away(web: Web, browse: Browse) -> None:
    tell_fleet(web)
    browser = browse(web.server.address)
    browser.open("overview")
    focused = "return document.activeElement.outerHTML"
    press(browser, Keys.TAB)
    assert 'id="skip"' in browser.run(focused)
    press(browser, *[Keys.TAB] * 4)
    assert 'href="#nodes"' in browser.run(focused)
    press(browser, Keys.ENTER)
    browser.wait_text("cache-1", "#view-nodes")
    assert browser.run("return document.activeElement.textContent") == "Nodes"
    press(browser, Keys.TAB)
    assert "node-filter" in browser.run(focused)
    press(browser, *"worker")
    wait_until(lambda: "cache-1" not in browser.text("#view-nodes table"), "the filter works")
    press(browser, Keys.TAB, Keys.ENTER)
    browser.wait_text("Worker load", "#view-nodes")
    assert 'aria-expanded="true"' in browser.run(focused)
    element = browser.run("return window.before = document.activeElement")
    web.tell(worker_snapshot(uptime_s=777.0), "a-worker-before-it")
    let_events_go(web)
    browser.wait_text("a-worker-before-it", "#view-nodes")
    assert browser.run("return document.activeElement === window.before"), "the focus stays"
    assert element.get_attribute("aria-expanded") == "true"
    assert browser.run("return document.getElementById('node-filter').value") == "worker"
    assert browser.complaints() == []


def press(browser: Browser, *keys: str) -> None:
    actions = ActionChains(browser.driver)
    for key in keys:
        actions.send_keys(key)
    actions.perform()


def test_light_and_dark(web: Web, browse: Browse) -> None:
    tell_fleet(web)
    browser = browse(web.server.address)
    background = "return getComputedStyle(document.body).backgroundColor"
    browser.scheme("light")
    browser.open("overview")
    light = browser.run(background)
    browser.scheme("dark")
    wait_until(lambda: browser.run(background) != light, "the page follows the system")
    dark = browser.run(background)
    browser.click("#theme-button")
    assert (browser.text("#theme-button"), browser.run(background)) == ("Theme: light", light)
    browser.open("overview")
    assert browser.run(background) == light, "the choice is kept"
    browser.click("#theme-button")
    assert (browser.text("#theme-button"), browser.run(background)) == ("Theme: dark", dark)
    assert browser.complaints() == []


def test_groups_are_made_on_the_page(web: Web, browse: Browse) -> None:
    tell_fleet(web)
    browser = browse(web.server.address)
    browser.open("groups")
    browser.wait_text("No group yet")
    browser.type("#group-name", "Pair")
    for alias in ("primary", "worker-1"):
        browser.click(f"#view-groups button[aria-label='Add {alias}']")
    browser.click("#view-groups button[type=submit]")
    browser.wait_text("the API key is missing or wrong", "[role=alert]")
    browser.complaints()  # The browser logs the refusal that was wanted here.
    browser.give_key(API_KEY)
    browser.wait_text("primary", "#view-groups .chips")
    browser.click("#view-groups button[type=submit]")
    browser.wait_text("Created Pair", "#view-groups")
    let_events_go(web)
    browser.wait_text("2 of 2", "#view-groups")
    (group,) = web.get("/v1/network/groups")
    assert (group["name"], group["node_ids"]) == ("Pair", ["primary", "worker-1"])
    assert browser.complaints() == []


def test_events_may_be_cut_anywhere(web: Web, browse: Browse) -> None:
    browser = browse(web.server.address)
    browser.open("overview")
    script = """
    const done = arguments[arguments.length - 1];
    import("/assets/live.js").then(({EventParser}) => {
      const event = (topic) => `event: ${topic}\\ndata: {"type":"${topic}","data":1}\\n\\n`;
      const text = "retry: 3000\\n\\n" + event("a") + ": still here\\n\\n" + event("b");
      const found = [];
      for (let cut = 0; cut <= text.length; cut += 1) {
        const seen = [];
        const parser = new EventParser((topic, data) => seen.push(topic + data));
        parser.take(text.slice(0, cut));
        parser.take(text.slice(cut));
        found.push(seen.join());
      }
      done([...new Set(found)]);
    });
    """
    assert browser.driver.execute_async_script(script) == ["a1,b1"]


def test_the_checks_see_what_they_look_for(web: Web, browse: Browse) -> None:
    """A check that cannot fail shows nothing: each one is given what it must find."""
    browser = browse(web.server.address)
    browser.open("groups")
    assert (browser.complaints(), browser.serious_issues(), browser.overflowing()) == ([], [], [])
    browser.run(
        "const script = document.createElement('script'); script.textContent = 'window.harmed = 3';"
        "document.body.append(script);"
        "const image = new Image(); image.src = 'http://127.0.0.1:9/x.png';"
        "const wide = document.createElement('div'); wide.style.width = '3000px'; wide.style.height = '9px';"
        "document.querySelector('main').append(image, wide);"
    )
    wait_until(lambda: len(browser.run("return window.violations")) >= 2, "both are stopped")
    found = " ".join(browser.complaints())
    assert "script-src" in found
    assert "img-src" in found
    assert browser.run("return window.harmed ?? null") is None
    assert any(issue["id"] == "image-alt" for issue in browser.serious_issues())
    assert browser.overflowing()
    browser.run("fetch('/no-such-route')")
    wait_until(lambda: any("404" in each for each in browser.complaints()), "a failed request is in the console")


@pytest.mark.slow
def test_two_hundred_nodes_stay_usable(web: Web, browse: Browse) -> None:
    for number in range(200):
        web.tell(worker_snapshot(), f"worker-{number:03}")
    browser = browse(web.server.address)
    browser.open("nodes")
    browser.wait_text("worker-199")
    web.tell(worker_snapshot(uptime_s=1.0), "newcomer")
    let_events_go(web)
    browser.wait_text("newcomer")
    for view in VIEWS:
        browser.go(view)
        for size in (DESKTOP, PHONE):
            browser.resize(size)
            assert browser.overflowing() == [], view
    assert browser.complaints() == []
