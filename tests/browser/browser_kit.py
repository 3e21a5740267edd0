"""A real Chromium on the dashboard's page: what it shows, what it complains about, what it fetches, how accessible it is."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from kakeya_zmq.io.addresses import Address
from tests.fleet_rig import wait_until

FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-dev-shm-usage"),
    *("--force-color-profile=srgb", "--hide-scrollbars", "--lang=en"),
)
DESKTOP: Final = (1280, 900)
PHONE: Final = (390, 844)
AXE: Final = Path(__file__).parent / "vendor" / "axe.min.js"
SERIOUS: Final = frozenset(("serious", "critical"))
VIEWS: Final = ("overview", "nodes", "groups", "prefill", "kv", "requests", "benchmarks", "register")

# Runs before any script of each document: what the security policy stops is remembered.
_WATCH: Final = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""
_AXE_RUN: Final = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then(
  (found) => done(found.violations.map((rule) => ({
    id: rule.id, impact: rule.impact, nodes: rule.nodes.map((node) => node.html + " " + node.failureSummary)
  }))),
  (error) => done([{id: "axe itself", impact: "critical", nodes: [String(error)]}]));
"""
_OVERFLOW: Final = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll("main *, header *")].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.width > 0 && box.right + scrollX > wide + 1 && !element.closest("svg, .u-over, .unseen, .tabs");
}).map((element) => element.outerHTML.slice(0, 160));
"""


def chromium() -> tuple[str, str]:
    """Paths of the browser and its driver; the test is skipped, with the reason, where one is missing."""
    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium with its chromedriver: install chromium and chromium-driver (deploy/test.sh does, as root)")
    return browser, driver


class Browser:
    """One window. ``address``: of the dashboard."""

    def __init__(self, driver: webdriver.Chrome, address: Address) -> None:
        self.driver = driver
        self.address = address

    @property
    def origin(self) -> str:
        return f"http://{self.address}"

    def open(self, view: str, size: tuple[int, int] = DESKTOP) -> None:
        """The page on a view; returns when its first live data is shown."""
        self.resize(size)
        self.driver.get(f"{self.origin}/#{view}")
        wait_until(lambda: self.state not in ("", "connecting"), f"the page is connected on {view}")

    def go(self, view: str) -> None:
        """To another view, as a click on its tab."""
        self.one(f"nav a[href='#{view}']").click()
        wait_until(lambda: self.one(f"#view-{view}").is_displayed(), f"{view} is shown")

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}, {"name": "prefers-reduced-motion", "value": "reduce"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    @property
    def state(self) -> str:
        """What the page says about the connection: live, waiting, silent, lost."""
        return str(self.driver.execute_script("return document.body.dataset.state ?? ''"))

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "main") -> str:
        """The visible text of everything that fits."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText).join('\\n')"
        return str(self.driver.execute_script(script, selector))

    def wait_text(self, text: str, selector: str = "main", timeout_s: float = 30.0) -> None:
        wait_until(lambda: text in self.text(selector), f"{selector} shows {text!r}", timeout_s)

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def type(self, selector: str, text: str) -> None:
        """Put text into a field as one input event, since the driver's keys know no emoji."""
        script = (
            "const field = arguments[0]; field.focus(); field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}));"
        )
        self.driver.execute_script(script, self.one(selector), text)

    def offer_key(self, key: str) -> None:
        """Type an API key into its dialog."""
        self.click("#key-button")
        self.type("#api-key", key)
        self.click("#key-dialog button[type=submit]")

    def give_key(self, key: str) -> None:
        """Give the right API key."""
        self.offer_key(key)
        wait_until(lambda: self.text("#key-button") == "Key given", "the key is taken")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        if whole:
            height = int(self.run("return document.documentElement.scrollHeight"))
            width = int(self.run("return innerWidth"))
            self.resize((width, height))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.driver.get_screenshot_as_png())

    # --- what must not be ---------------------------------------------------------------------------------------------

    def complaints(self) -> list[str]:
        """Console errors and warnings, and what the security policy stopped, since the last time it was asked."""
        logged = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        return [*logged, *self.run("return window.violations ?? ['not watched']")]

    def foreign_requests(self) -> list[str]:
        """What was fetched from anywhere else than the dashboard, by the browser's own record of this document."""
        urls = self.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert any(url.endswith("/assets/app.js") for url in urls), urls
        return [url for url in urls if urlsplit(url).netloc != str(self.address)]

    def serious_issues(self) -> list[dict[str, Any]]:
        """What axe-core finds, of serious and critical impact."""
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text("utf-8")})
        found = self.driver.execute_async_script(_AXE_RUN)
        return [rule for rule in found if rule["impact"] in SERIOUS]

    def overflowing(self) -> list[str]:
        """Elements that reach beyond the right edge of the window."""
        return list(self.run(_OVERFLOW))


@contextlib.contextmanager
def open_browser(address: Address, folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; it and its driver are gone when this ends."""
    browser, driver_path = chromium()
    options = Options()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
        driver.set_script_timeout(60)
        yield Browser(driver, address)
    finally:
        driver.quit()
