"""The real nginx in front of real front ends, with the server block that is deployed.

Runs in: tests. Only the listening address of configs/nginx/ds4-server.conf is replaced, and the
upstream that Docker's DNS would fill is written out.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.server import ROOT, wait_until

_CONFIG: Final = ROOT / "configs/nginx/ds4-server.conf"
_FRAME: Final = """\
daemon off;
pid {directory}/nginx.pid;
error_log stderr warn;
{user}
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    upstream ds4_front {{
        zone ds4_front 256k;
        least_conn;
{servers}
        keepalive 64;
        keepalive_timeout 60s;
    }}
    include {directory}/server.conf;
}}
"""


def free_port() -> int:
    """A port that nobody is given in passing until this process ends.

    It stays bound here, and nobody listens: who sets SO_REUSEADDR, as servers do, may bind it as well.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = int(holder.getsockname()[1])
    holder.detach()
    return port


def find_nginx() -> str:
    """The program; skips the calling test where it is not installed."""
    found = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/nginx/sbin")
    if found is None:
        pytest.skip("nginx is not installed (Debian and Ubuntu: apt-get install nginx-light)")
    return found


@contextlib.contextmanager
def proxying(directory: Path, ports: Sequence[int]) -> Iterator[str]:
    """A running nginx in front of the front ends on `ports`; its URL."""
    program, port = find_nginx(), free_port()
    server, count = re.subn(r"listen 8080;", f"listen 127.0.0.1:{port};", _CONFIG.read_text())
    assert count == 1
    (directory / "server.conf").write_text(server)
    lines = [f"        server 127.0.0.1:{upstream} max_fails=1 fail_timeout=2s;" for upstream in ports]
    user = "user root;" if os.geteuid() == 0 else ""
    path = directory / "nginx.conf"
    path.write_text(_FRAME.format(directory=directory, servers="\n".join(lines), user=user))
    log = directory / "nginx.log"
    with log.open("w") as stderr:
        process = subprocess.Popen([program, "-c", str(path), "-e", "stderr"], stderr=stderr)
    try:

        def listening() -> bool:
            assert process.poll() is None, log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listening, "nginx")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
