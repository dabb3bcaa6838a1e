"""Headless Chromium, driven through its DevTools protocol over a pipe, for the tests of pages."""

import base64
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from queue import Empty, Queue
from time import monotonic, sleep
from typing import Any, Self

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_SECONDS = 60.0


class Chromium:
    """One page of a headless browser. `errors` collects console messages at level error."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        assert PROGRAM is not None
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        command = [
            PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", "--no-first-run", "about:blank",
        ]  # fmt: skip

        def pipes() -> None:  # the protocol uses pipes 3 and 4
            spare = os.dup(writes)  # `reads` may itself be 4
            os.dup2(reads, 3)
            os.dup2(spare, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(writes)
        self.errors: list[str] = []
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._number = 0
        threading.Thread(target=self._listen, daemon=True).start()
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        answer = self._answers[self._number] = Queue()
        message = {"id": self._number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        try:
            found = answer.get(timeout=WAIT_SECONDS)
        except Empty:
            raise TimeoutError(f"{method}: no answer") from None
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    def open(self, address: str) -> None:
        """Load a page and wait until it is complete."""
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = WAIT_SECONDS) -> Any:
        """Wait until an expression is true and return its value."""
        end = monotonic() + seconds
        while not (value := self.run(script)):
            assert monotonic() < end, f"never true: {script}"
            sleep(0.05)
        return value

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """Send mousePressed, mouseMoved or mouseReleased, with the left button for clicks."""
        more = {"button": "left", "buttons": 1, "clickCount": clicks} if clicks else {}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, 1)
        self.mouse("mouseReleased", x, y, 1)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def dark(self, is_dark: bool = True) -> None:
        """Prefer the dark theme, or the light one."""
        value = "dark" if is_dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def screenshot(self, path: Path, whole: bool = False) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _listen(self) -> None:
        rest = b""
        while data := os.read(self._in, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif message["method"] == "Runtime.exceptionThrown":
                    self.errors.append(str(message["params"]["exceptionDetails"]))
                elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                    self.errors.append(str(message["params"]["entry"]))
