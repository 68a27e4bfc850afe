"""What one client must not learn of another, and what must not be written down anywhere."""

import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support.server import DEADLINE_S, Running, Server, chat_request, serving, wait_until
from tests.support.struck import POISON

pytestmark = pytest.mark.e2e

ALICE: Final = "alice-key-0123456789"
BOB: Final = "bob-key-0123456789"
SECRET: Final = "the-launch-code-is-73519"  # of a prompt
TYPO: Final = "alice-key-0123456780"  # a wrong key is mostly nearly a right one


def ask(
    server: Server, body: dict[str, Any], key: str = ALICE, path: str = "/v1/chat/completions"
) -> httpx.Response:
    """One request with a key."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=DEADLINE_S)


def num_cached(answer: httpx.Response) -> int:
    """Tokens of the prompt that were not computed for this request, as its usage says."""
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("mode", ["key", "none"])
def test_another_keys_prompts_are_not_found_in_the_cache(tiny_model: Path, mode: str) -> None:
    flags = ("--device", "reference", "--front-ends", "2", "--api-key", f"{ALICE},{BOB}")
    with serving(tiny_model, *flags, "--cache-isolation", mode) as server:
        body = chat_request(f"{SECRET} " * 8, 2, logprobs=True, top_logprobs=3)
        first = ask(server, body)
        assert num_cached(first) == 0
        found = num_cached(ask(server, body))
        assert found > 100
        stranger = ask(server, body, BOB)
        assert num_cached(stranger) == (0 if mode == "key" else found)
        timings = stranger.json().get("timings")
        if timings is not None:
            assert timings["cache_n"] == num_cached(stranger)
        # What was computed and what was found gives the same numbers to the last bit.
        assert stranger.json()["choices"] == first.json()["choices"]
        # A prompt of one's own is found again, also after a restart of the front end that took it.
        os.kill(server.front_ends()[0], signal.SIGKILL)
        wait_until(lambda: len(server.front_ends()) == 2, "both front ends")
        wait_until(lambda: ask(server, body, BOB).status_code == 200, "a front end that answers")
        assert num_cached(ask(server, body, BOB)) == found


def everything_in(directory: Path) -> bytes:
    """The bytes of every regular file below."""
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


def test_keys_and_prompts_are_not_written_down(tiny_model: Path, tmp_path: Path) -> None:
    shared, key_file = tmp_path / "shared", tmp_path / "keys"
    key_file.write_text(f"{ALICE} name=alice\n{BOB}\n")
    flags = ("--device", "reference", "--front-ends", "2", "--api-key-file", str(key_file))
    more = ("--log-level", "debug", "--shared-dir", str(shared), "--cache-isolation", "key")
    with serving(
        tiny_model, *flags, *more, environment={"DS4_SERVER_BATCH_LOG": "1"}, module="tests.support.struck"
    ) as server:
        body = chat_request(SECRET, 30)
        assert ask(server, body).status_code == 200
        assert ask(server, body, TYPO).status_code == 401
        assert ask(server, body, path=f"/v1/chat/completions?api_key={BOB}&text={SECRET}").status_code == 200
        # Answers that refuse: each quotes, or might quote, what it refuses.
        for wrong in (
            {"temperature": SECRET},
            {"messages": [{"role": SECRET, "content": BOB}]},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": SECRET}},
                }
            },
            {"guided_regex": f"({SECRET}"},
            {"grammar": f'root ::= "{SECRET}'},
            {"chat_template_kwargs": {"messages": SECRET}},
        ):
            assert ask(server, body | wrong).status_code in (400, 404), wrong
        ask(server, body | {SECRET: 1})
        for raw in (
            f"GET /{SECRET} HTTP/1.1\r\nauthorization: Bearer {ALICE}\r\nbroken header {BOB}\r\n\r\n",
            f"{SECRET}\r\n\r\n",
            f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {ALICE}\r\ncontent-length: x\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
                connection.sendall(raw.encode())
                connection.recv(4096)
        # A worker that crashes on the request, the hunt for it, and its quarantine.
        poisoned = ask(server, chat_request(f"{POISON} {SECRET}", 5))
        assert poisoned.status_code == 500, poisoned.text
        ring = Running(["ds4", "ring", "--shared-dir", str(shared)])
        assert ring.wait() == 0
        settings = Running(["ds4", "config", "--api-key", ALICE])
        assert settings.wait() == 0
        told = server.log + ring.log + settings.log
        told += ask(server, {}, path="/tokenize").text
        for path in ("/props", "/slots", "/metrics", "/v1/models"):
            told += httpx.get(
                f"{server.url}{path}", headers={"Authorization": f"Bearer {BOB}"}, timeout=DEADLINE_S
            ).text
        kept = everything_in(shared)
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        told += server.log
    for secret in (ALICE, BOB, TYPO):
        assert secret not in told
        assert secret.encode() not in kept
    assert SECRET not in told


def test_only_the_owner_may_look_into_the_shared_directory(tiny_model: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    umask = os.umask(0)
    try:
        with serving(
            tiny_model, "--device", "reference", "--shared-dir", str(shared), "--api-key", ALICE
        ) as server:
            assert ask(server, chat_request("hello " * 2000, 2)).status_code == 200
            ask(server, {"input": "hello", "max_output_tokens": 20, "store": True}, path="/v1/responses")
            control = Running(["ds4", "control", "batch_log", "1", "--shared-dir", str(shared)])
            assert control.wait() == 0, control.log
            wrong = {
                str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.lstat().st_mode))
                for path in (shared, *shared.rglob("*"))
                if stat.S_IMODE(path.lstat().st_mode) != (0o700 if path.is_dir() else 0o600)
            }
            assert wrong == {}
            assert len(list(shared.rglob("*"))) > 6
    finally:
        os.umask(umask)
