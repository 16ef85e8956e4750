"""A headless Chromium, driven over WebDriver's HTTP protocol without a client library.

Needs the programs chromium and chromedriver (Debian: chromium and chromium-driver).
"""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

PROGRAMS = ("chromium", "chromedriver")
PATIENCE_SECONDS = 60
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


def there() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


class Chromium:
    def __init__(self, driver: httpx.Client, width: int, height: int) -> None:
        self.driver = driver
        profile = tempfile.mkdtemp(prefix="chromium")
        arguments = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        options = {"binary": shutil.which(PROGRAMS[0]), "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.profile = profile
        self.path = ""
        session = self.post("/session", capabilities={"alwaysMatch": wanted})
        self.path = f"/session/{session['sessionId']}"

    def post(self, path: str, **body: Any) -> Any:
        """Returns the value of a command. Raises RuntimeError."""
        answer = self.driver.post(self.path + path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["message"])
        return answer

    def open(self, url: str) -> None:
        self.post("/url", url=url)

    def run(self, script: str) -> Any:
        return self.post("/execute/sync", script=script, args=[])

    def until(self, condition: str, seconds: float = PATIENCE_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"never became true: {condition}\n{self.text()}"
            time.sleep(0.1)

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def complaints(self) -> list[str]:
        """Console errors and warnings since the last call, without Chromium's own."""
        entries = [str(entry["message"]) for entry in self.post("/se/log", type="browser")]
        return [entry for entry in entries if not entry.startswith("chrome://")]

    def scheme(self, name: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": name}
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}}
        self.post("/goog/cdp/execute", **command)

    def screenshot(self) -> bytes:
        command = {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": True}}
        return base64.b64decode(self.post("/goog/cdp/execute", **command)["data"])

    def close(self) -> None:
        self.driver.delete(self.path)
        shutil.rmtree(self.profile, ignore_errors=True)


@contextmanager
def chromium(width: int = 1200, height: int = 900) -> Iterator[Chromium]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [PROGRAMS[1], f"--port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        transport = httpx.HTTPTransport(retries=8)  # until it listens: 0.5 s, doubling each time
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, transport=transport, timeout=PATIENCE_SECONDS) as driver:
            window = Chromium(driver, width, height)
            try:
                yield window
            finally:
                window.close()
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
