"""What the operator got wrong: one line that names the cure, exit code 2, nothing left behind."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ds4.ring import layout
from tests.support.server import Running, Server, serving
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e


def refused(*flags: str, environment: Mapping[str, str] | None = None) -> str:
    """Start the server, which must refuse; the one line it says."""
    server = Server(["ds4", "--port", "0", "--device", "reference", *flags], environment)
    try:
        code = server.wait()
    finally:
        server.kill()
    assert code == 2, server.log
    assert server.output == [], server.log
    said = [line for line in server.errors if not line.startswith("ts=")]
    assert len(said) == 1, server.log
    assert "Traceback" not in server.log
    return said[0]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory for the ring that must be empty afterwards."""
    path = tmp_path / "shared"
    yield path
    if path.exists():
        assert list(path.iterdir()) == []


def test_a_missing_model(shared: Path, tmp_path: Path) -> None:
    path = tmp_path / "absent.gguf"
    line = refused("--model", str(path), "--shared-dir", str(shared))
    assert str(path) in line


def test_a_model_that_is_no_gguf(shared: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model")
    line = refused("--model", str(path), "--shared-dir", str(shared))
    assert str(path) in line


def test_a_model_cut_short(shared: Path, tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny_model.read_bytes()[:-1000])
    line = refused("--model", str(path), "--shared-dir", str(shared))
    assert str(path) in line


def test_an_unknown_architecture(shared: Path, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "odd.gguf", architecture="abacus")
    assert "abacus" in refused("--model", str(path), "--shared-dir", str(shared))


def test_an_unknown_pre_tokenizer(shared: Path, tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "odd.gguf"
    known = tiny_model.read_bytes()
    assert known.count(b"gpt-2") == 1
    path.write_bytes(known.replace(b"gpt-2", b"gpx-2"))
    line = refused("--model", str(path), "--shared-dir", str(shared), "--front-ends", "2")
    assert "gpx-2" in line


def test_an_unknown_variable() -> None:
    line = refused(environment={"DS4_SERVER_BATCHED_SESION": "8"})
    assert "DS4_SERVER_BATCHED_SESION" in line
    assert "did you mean DS4_SERVER_BATCHED_SESSIONS?" in line


def test_a_malformed_value() -> None:
    line = refused(environment={"DS4_SERVER_DECODE_COALESCE_US": "2ms"})
    assert "DS4_SERVER_DECODE_COALESCE_US" in line
    assert "2ms" in line


def test_a_port_in_use(tiny_model: Path, shared: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = refused("--model", str(tiny_model), "--port", str(port), "--shared-dir", str(shared))
    assert f"127.0.0.1:{port}" in line
    assert "--port" in line


def test_a_second_server_on_the_port_of_a_first(tiny_model: Path, shared: Path) -> None:
    with serving(tiny_model, "--device", "reference") as first:
        line = refused("--model", str(tiny_model), "--port", str(first.port), "--shared-dir", str(shared))
    assert str(first.port) in line


def test_a_shared_directory_that_another_server_uses(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--device", "reference", "--shared-dir", str(tmp_path))
    with serving(tiny_model, *flags):
        before = sorted(entry.name for entry in tmp_path.iterdir())
        assert str(tmp_path) in refused("--model", str(tiny_model), *flags)
        after = sorted(entry.name for entry in tmp_path.iterdir())
        assert set(before) <= set(after), "the refused server took files of the running one"


def test_an_unwritable_shared_directory(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "locked"
    path.mkdir(mode=0o500)
    assert str(path) in refused("--model", str(tiny_model), "--shared-dir", str(path))


def test_a_shared_directory_that_others_may_enter(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    line = refused("--model", str(tiny_model), "--shared-dir", str(path))
    assert f"chmod 700 {path}" in line


def test_a_shared_directory_of_another_user(tiny_model: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)
    line = refused("--model", str(tiny_model), "--shared-dir", str(path))
    assert "12345" in line


def test_a_shared_directory_that_is_a_file(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert str(path) in refused("--model", str(tiny_model), "--shared-dir", str(path))


def test_a_shared_directory_that_is_too_small(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a tmpfs")
    try:
        line = refused("--model", str(tiny_model), "--shared-dir", str(path))
        assert str(path) in line
        assert list(path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_ring_of_another_version(tiny_model: Path, tmp_path: Path) -> None:
    environment = {"DS4_SERVER_SHARED_DIR": str(tmp_path), "DS4_SERVER_MODEL": str(tiny_model)}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            serving(tiny_model, "--device", "reference", "--shared-dir", str(tmp_path))
        )
        assert server.url
        other = (layout.VERSION + 1).to_bytes(8, "little")
        descriptor = os.open(tmp_path / "ring", os.O_RDWR)
        os.pwrite(descriptor, other, 8 * layout.HEADER_VERSION)
        os.close(descriptor)
        front = Running(["ds4", "front", "--port", "0"], environment)
        stack.callback(front.kill)
        assert front.wait() == 2, front.log
        said = [line for line in front.errors if not line.startswith("ts=")]
        assert len(said) == 1, front.log
        assert "version" in said[0]
