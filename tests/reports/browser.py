"""Headless Chromium through chromedriver: what a page looks like, logs and loads."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


class Browser:
    """One session of a driver, by the WebDriver protocol."""

    def __init__(self, address: str) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options = {"binary": CHROMIUM, "args": arguments}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        self.session = ""
        self.address = address
        made = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{made['sessionId']}"

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self.address + (path if path == "/session" else self.session + path),
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def tool(self, command: str, **parameters: Any) -> Any:
        """A command of the developer tools."""
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Screen and colour scheme of what is opened from now on."""
        self.tool("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 500)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tool("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        self.ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.ask("POST", "/execute/sync", {"script": script, "args": [*arguments]})

    def wait(self, script: str) -> Any:
        """What the script gives to its last argument, a function."""
        return self.ask("POST", "/execute/async", {"script": script, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("POST", "/se/log", {"type": kind})
        return found

    def loads(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        messages = [json.loads(each["message"])["message"] for each in self.log("performance")]
        sent = [m for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [m["params"]["request"]["url"] for m in sent]

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.tool("Page.captureScreenshot", captureBeyondViewport=True, format="png",
                          clip={"x": 0, "y": 0, "scale": 1, "width": self.run("return innerWidth"),
                                "height": self.run("return document.body.scrollHeight")},
                          )  # fmt: skip
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, ended at the end."""
    assert DRIVER is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        said = next(line for line in driver.stdout if "successfully on port" in line)
        port = said.rsplit(" ", 1)[1].strip(". \n")
        opened = None
        for _ in range(50):
            try:
                opened = Browser(f"http://127.0.0.1:{port}")
                break
            except OSError:
                time.sleep(0.1)
        assert opened is not None, "no session of chromedriver"
        try:
            yield opened
        finally:
            opened.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(10)
        driver.stdout.close() if driver.stdout else None
