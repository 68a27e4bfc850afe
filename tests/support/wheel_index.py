"""A package index on the loopback interface that serves one wheel, and can misbehave on purpose.

Owns: its own server thread. Runs in: tests of downloads; pip itself asks it, by its usual variables.
"""

import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

PACKAGE: Final = "tiny-model"
VERSION: Final = "1.0"
WHEEL_NAME: Final = "tiny_model-1.0-py3-none-any.whl"
MEMBER: Final = "tiny_model/Tiny.gguf"


def make_wheel(content: bytes, member: str = MEMBER) -> bytes:
    """A wheel that pip accepts, with `content` inside."""
    info = f"tiny_model-{VERSION}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
    files = {
        member: content,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        for name, raw in files.items():
            wheel.writestr(name, raw)
    return buffer.getvalue()


class WheelIndex:
    """What the server serves and what it was asked. Mutated by the test and by the server's threads."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.promised_sha256 = hashlib.sha256(wheel).hexdigest()
        self.url = ""
        self.ranges: list[str | None] = []  # the Range header of each request for the wheel
        self.honours_ranges = True
        self.cut_after: list[int] = []  # the next answers stop after so many bytes
        self.status = 0  # answer the wheel with this error instead
        self.gate = threading.Event()  # the wheel's body waits for it
        self.gate.set()

    @property
    def wheel_url(self) -> str:
        """Where the wheel is."""
        return f"{self.url}/files/{WHEEL_NAME}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One GET request."""
        if handler.path == f"/simple/{PACKAGE}/":
            page = f'<a href="/files/{WHEEL_NAME}#sha256={self.promised_sha256}">{WHEEL_NAME}</a>'
            _send(handler, 200, page.encode(), {"Content-Type": "text/html"})
        elif handler.path != f"/files/{WHEEL_NAME}":
            _send(handler, 404, b"")
        elif handler.headers["User-Agent"].startswith("pip"):
            _send(handler, 200, self.wheel)  # pip wants the metadata and reads the whole wheel for it
        else:
            self._send_wheel(handler)

    def _send_wheel(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers["Range"]
        self.ranges.append(asked)
        self.gate.wait(60)
        start = 0
        if asked and self.honours_ranges:
            found = re.fullmatch(r"bytes=(\d+)-", asked)
            assert found is not None
            start = int(found.group(1))
        if self.status:
            _send(handler, self.status, b"")
        elif start >= len(self.wheel):
            _send(handler, 416, b"", {"Content-Range": f"bytes */{len(self.wheel)}"})
        else:
            body = self.wheel[start:]
            shown = body[: self.cut_after.pop(0)] if self.cut_after else body
            headers = {"Content-Length": str(len(body))}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(self.wheel) - 1}/{len(self.wheel)}"
            _send(handler, 206 if start else 200, shown, headers)


def _send(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
    handler.close_connection = True


@contextmanager
def serving(wheel: bytes) -> Iterator[WheelIndex]:
    """The index, running until the block ends."""
    index = WheelIndex(wheel)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield index
    finally:
        index.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
