"""A headless Chromium by its driver's own protocol (WebDriver): no package is needed."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> tuple[str, str] | None:
    """The driver and the browser, where both are on this machine."""
    driver, browser = shutil.which("chromedriver"), next(filter(None, map(shutil.which, BROWSERS)), None)
    return None if driver is None or browser is None else (driver, browser)


class Browser:
    """A window."""

    def __init__(self, address: str, session: str) -> None:
        self._session = f"{address}/session/{session}"

    def open(self, address: str) -> None:
        """Go there, and wait until it is loaded."""
        self._post("/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, keys: str) -> None:
        """Type into what has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector: str) -> None:
        """The element of a CSS selector, as a person would: what is hidden or covered cannot be."""
        element = self._post("/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._post(f"/element/{element}/click", {})

    def text(self, selector: str) -> str:
        """What is written in an element."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def resize(self, width: int, height: int) -> None:
        """The page, as on a phone of that many pixels, which is narrower than a window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self._post("/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def picture(self, file: Path) -> None:
        """As PNG."""
        with urllib.request.urlopen(f"{self._session}/screenshot", timeout=20) as response:
            file.write_bytes(base64.b64decode(json.load(response)["value"]))

    def wait(self, condition: Callable[[], Any]) -> Any:
        """What is true within seconds."""
        deadline = time.monotonic() + 60
        while not (value := condition()):
            assert time.monotonic() < deadline, "nothing came"
            time.sleep(0.02)
        return value

    def _post(self, path: str, body: dict) -> Any:
        return post(self._session + path, body)


def post(address: str, body: dict) -> Any:
    """What the driver answers; its error where it refuses."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from None


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser without a window, whose files are in a folder of the test."""
    driver, binary = found()
    process = subprocess.Popen(
        [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        line = next(line for line in process.stdout if "started successfully on port" in line)
        address = f"http://127.0.0.1:{line.rstrip().rstrip('.').split()[-1]}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
        options = {"binary": binary, "args": [*arguments, f"--user-data-dir={profile}", "--window-size=1000,760"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = post(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            quit_ = urllib.request.Request(f"{address}/session/{session}", method="DELETE")
            urllib.request.urlopen(quit_, timeout=20).close()
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
