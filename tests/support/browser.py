"""A real browser for tests of pages: headless Chromium, driven over WebDriver's plain HTTP.

Debian's packages chromium and chromium-driver have both programs; .ci/run installs them.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.programs import needed
from tests.support.systems import free_port, wait_until

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's key for a reference to one


class Browser:
    """One window; what goes wrong in the page's own code is in :meth:`errors`."""

    def __init__(self, profile: Path) -> None:
        driver = needed("chromedriver", "chromium-driver")
        chromium = needed("chromium")
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL)
        wait_until(self._is_ready, 10, "chromedriver answers")
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": chromium}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/session/{made['sessionId']}"

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def show(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the page and the colours that the user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        asked = {"cmd": command, "params": parameters}
        return self._ask("POST", "/goog/cdp/execute", asked)

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script in the page returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def text(self, selector: str = "body") -> str:
        found: str = self.run("return document.querySelector(arguments[0])?.innerText", selector)
        return found or ""

    def click(self, selector: str) -> None:
        self._act(selector, "click", {})

    def type(self, selector: str, text: str) -> None:
        self._act(selector, "value", {"text": text})

    def wait(self, text: str, selector: str = "body", within_s: float = 10) -> None:
        wait_until(
            lambda: text in self.text(selector),
            within_s,
            f"{text!r} is in {selector}",
        )

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        wait_until(condition, 10, what)

    def errors(self) -> list[str]:
        """Return what the page's console has had since the last call, but for HTTP's statuses."""
        entries = self._ask("POST", "/se/log", {"type": "browser"})
        found = [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
        return [each for each in found if "responded with a status of" not in each]

    def _act(self, selector: str, action: str, how: dict[str, Any]) -> None:
        """Do something with an element, once it is there: a page may make it anew at any time."""
        deadline = time.monotonic() + 10
        while True:
            try:
                wanted = {"using": "css selector", "value": selector}
                found = self._ask("POST", "/element", wanted)[ELEMENT]
                self._ask("POST", f"/element/{found}/{action}", how)
            except LookupError as error:
                is_missing = str(error).startswith(("no such element", "stale element"))
                if not is_missing or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def _is_ready(self) -> bool:
        try:
            return bool(self._ask("GET", "/status")["ready"])
        except urllib.error.URLError:
            return False

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, content, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            report = json.load(error)["value"]
            raise LookupError(f"{report['error']}: {report['message'].splitlines()[0]}") from None
