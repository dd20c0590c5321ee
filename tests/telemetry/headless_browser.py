"""A real browser for tests, driven over its debugging pipe: no port, no driver, nothing but the standard library."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    "--remote-debugging-pipe",
)
# The browser reads commands from descriptor 3 and answers on 4.
LAUNCH = "import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); os.execv(c[0], c)"


class Browser:
    """One page in a headless Chromium; `profile` is an empty folder."""

    def __init__(self, profile, deadline=60):
        self.deadline, self._count, self._rest, self.errors = deadline, 0, b"", []
        commands, self._send = os.pipe()
        self._receive, answers = os.pipe()
        # Away from 3 and 4, where the browser wants them.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (commands, answers)]
        command = [EXECUTABLE, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, ends), *command],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (commands, answers, *ends):
            os.close(fd)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """A command of the DevTools protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + self.deadline
        while True:
            answer = self._next(ends)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"])[:500])
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self, ends):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(0, ends - time.monotonic()))
            assert ready, f"the browser gave no answer within {self.deadline} s"
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def look(self, width, height, dark=False):
        """The size of the window, and which colours the system asks for."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url):
        """Loads a page and its scripts."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script):
        """Waits for an expression to become true."""
        ends = time.monotonic() + self.deadline
        while not (found := self.run(script)):
            assert time.monotonic() < ends, f"{script} did not become true within {self.deadline} s"
            time.sleep(0.05)
        return found

    def press(self, key, text=""):
        """One key, pressed and let go."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **extra)

    def picture(self, file, whole=False):
        """A screenshot."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        with open(file, "wb") as out:
            out.write(base64.b64decode(data))

    def close(self):
        """Ends the browser and all its processes."""
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(20)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait(20)
        os.close(self._send)
        os.close(self._receive)
