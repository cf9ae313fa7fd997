"""Headless Chromium, driven over its debugging pipe: no package but Debian's own browser is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """One page of a browser of its own."""

    def __init__(
        self, url: str, width: int = 1200, height: int = 860, *, phone: bool = False, dark: bool = False
    ) -> None:
        assert BROWSER is not None
        self._profile = tempfile.TemporaryDirectory(prefix="mega-chromium-", ignore_cleanup_errors=True)
        (hears, self._writes), (self._reads, says) = os.pipe(), os.pipe()
        flags = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
            *("--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-extensions", "--disable-sync", "about:blank"),
        ]
        shell = f'exec "$@" 3<&{hears} 4>&{says}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", BROWSER, *flags],
            pass_fds=(hears, says),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(hears), os.close(says)
        self._held, self._number, self._session = b"", 0, None
        target = next(each for each in self("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=phone)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self("Emulation.setEmulatedMedia", features=features)
        self("Page.enable")
        self("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def __call__(self, method: str, **params: Any) -> Any:
        """One command's result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                part = os.read(self._reads, 1 << 16)
                assert part, "the browser has ended"
                self._held += part
            first, _, self._held = self._held.partition(b"\0")
            found = json.loads(first)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Until it is true."""
        deadline = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < deadline, f"not true within {seconds} s: {expression}"
            time.sleep(0.02)

    def type(self, selector: str, text: str) -> None:
        """Type into a field as a person does."""
        self.js(f"document.querySelector({selector!r}).focus()")
        self("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._writes), os.close(self._reads)
        self._profile.cleanup()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
