"""Debian's chromium, driven through its DevTools protocol over a pair of pipes: no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
    "about:blank",
)
KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Tab:
    """One tab. ``problems``: what the page wrote to the console as an error, and exceptions nobody caught."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        request = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._calls:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Until ``expression`` is true; returns its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} did not become true; {self.problems}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def press(self, key: str) -> None:
        char = {"Enter": "\r", " ": " "}.get(key, "")
        codes = {"key": key, "code": key, "windowsVirtualKeyCode": KEY_CODES[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=char, **codes)
        self.call("Input.dispatchKeyEvent", type="keyUp", **codes)

    def write(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser is gone"
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def running_browser(executable: str) -> Iterator[Tab]:
    """A browser with a new profile. It reads its commands from file descriptor 3 and answers on 4."""
    command_end, requests = os.pipe()
    answers, answer_end = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        actions = [
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, command_end, 3),
            (os.POSIX_SPAWN_DUP2, answer_end, 4),
        ]
        arguments = [executable, *FLAGS[:-1], f"--user-data-dir={profile}", FLAGS[-1]]
        pid = os.posix_spawn(executable, arguments, dict(os.environ), file_actions=actions, setpgroup=0)
        os.close(command_end)
        os.close(answer_end)
        try:
            yield Tab(requests, answers)
        finally:
            os.close(requests)
            os.close(answers)
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
