"""A client for headless Chromium over its debugging pipe; no package, no port."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    *["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"],
    *["--disable-sync", "--disable-background-networking", "--disable-component-update"],
    "--remote-debugging-pipe",
]
PATIENCE = 60.0


class Browser:
    """Chromium over its debugging pipe: one page, one command at a time."""

    def __init__(self, profile):
        from_us, self._out = os.pipe()
        self._in, to_us = os.pipe()
        # The browser reads commands on descriptor 3 and answers on 4.
        reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (from_us, to_us))

        def descriptors():
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=descriptors,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (from_us, to_us, reads, writes):
            os.close(fd)
        self._buffer, self._sent, self._session, self.events = b"", 0, None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._sent:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self):
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], PATIENCE)[0], "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, width=1200, height=800, *, scripts=True, dark=False, scale=1):
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self.send("Page.navigate", url=f"file://{path}")
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read())

    def run(self, script):
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self):
        """Wait until what the last step started is drawn."""
        self.run("new Promise((done) => setTimeout(done, 100))")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path):
        data = self.send("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def named(self, method):
        return [e["params"] for e in self.events if e.get("method") == method]

    def close(self):
        self.send("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._out)
        os.close(self._in)
