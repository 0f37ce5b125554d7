"""A headless Chromium for tests of pages. Nothing is downloaded: the driver is Debian's (package chromium-driver)."""

from __future__ import annotations

import base64
import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DESK, PHONE = (1280, 900), (390, 844)


class Browser:
    """One window. `open` a page, then look at it through `driver`."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
        """Load a page for a screen of `size` CSS pixels. Loading it stays recorded (`complaints`)."""
        width, height = size
        self._do("Performance.enable")
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._do("Emulation.setFocusEmulationEnabled", enabled=True)  # a window in the background gets no focus events
        self._do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get(page.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def seconds(self) -> float:
        """Time that the page's own work took since it was loaded: reading, scripts, layout."""
        metrics = self._do("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))

    def complaints(self) -> list[str]:
        """Messages of the console since the last call: errors of scripts, blocked resources, violated policies."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def complains_of(self, text: str, seconds: float = 30.0) -> bool:
        """Wait until a message of the console holds `text`, since messages arrive after the page has loaded; return
        False if none does within `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(text in message for message in self.complaints()):
                return True
            time.sleep(0.1)
        return False

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """The visible part, or the whole page."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return innerWidth")
        clip = {"clip": {"x": 0, "y": 0, "width": width, "height": min(height, 12_000), "scale": 1}} if whole else {}
        taken = self._do("Page.captureScreenshot", captureBeyondViewport=whole, **clip)
        file.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._do("Page.printToPDF", printBackground=True)["data"]))

    def _do(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A new browser with an empty profile and no network. Skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium with its driver here (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.set_capability("unhandledPromptBehavior", "ignore")
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(session)
    finally:
        session.quit()
