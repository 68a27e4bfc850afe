"""`ds4-server reload` under load and with another key file: nobody is refused, no stream breaks."""

import asyncio
import sys
from pathlib import Path

import httpx
import pytest
import uvloop

from tests.support.flood import Caller, Tally, http_post
from tests.support.server import DEADLINE_S, Running, Server, chat_request, serving

_PATH = "/v1/chat/completions"


def _reload(server: Server, *what: str) -> tuple[int, str]:
    """Run it beside the server: its exit code and its one line."""
    command = Running(["ds4", "reload", *what, "--port", str(server.port)])
    return command.wait(), command.log


async def _reload_beside_callers(server: Server, num_callers: int, whats: list[list[str]]) -> Tally:
    """Reload so often while so many ask, half of them on a new connection for each request."""
    tally = Tally()
    callers = []
    for seed in range(num_callers):
        body = chat_request(f"hello {seed}", 24, seed=seed, stream=True)
        headers = {"connection": "close"} if seed % 2 else {}
        callers.append(Caller(server.port, http_post(_PATH, body, **headers), tally))
    await asyncio.gather(*(caller.connect() for caller in callers))
    for what in whats:
        before = tally.counts["whole"]
        code, said = await asyncio.to_thread(_reload, server, *what)
        assert code == 0, said + server.log
        async with asyncio.timeout(DEADLINE_S):
            while tally.counts["whole"] < before + num_callers and not tally.faults:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    tally.stopping = True
    for caller in callers:
        caller.hang_up()
    return tally


def reload_under_load(model: Path, num_callers: int, whats: list[list[str]], *flags: str) -> Tally:
    """A server of its own, with a slot for every caller at either of two front ends."""
    room = ["--front-ends", "2", "--slots-per-front-end", str(num_callers), "--device", "mock"]
    with serving(model, *room, "--mock-tokens-per-s", "40", *flags) as server:
        tally: Tally = uvloop.run(_reload_beside_callers(server, num_callers, whats))
        return tally


@pytest.mark.e2e
def test_nobody_is_refused_and_no_stream_breaks_while_processes_are_replaced(tiny_model: Path) -> None:
    tally = reload_under_load(tiny_model, 32, [[], ["worker"], []])
    assert tally.faults == []
    assert tally.counts["429"] == 0
    assert tally.counts["whole"] > 3 * 32


@pytest.mark.e2e
def test_reload_takes_a_changed_key_file_and_keeps_the_old_keys_where_it_is_wrong(
    tiny_model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-old name=alice\n")

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        # On connections of their own, often enough to meet both front ends.
        url = f"{server.url}/v1/models"
        found = {httpx.get(url, headers=headers, timeout=DEADLINE_S).status_code for _ in range(8)}
        (one,) = found
        return one

    flags = ["--front-ends", "2", "--device", "mock", "--api-key-file", str(keys)]
    with serving(tiny_model, *flags) as server:
        assert (status("sk-old"), status("sk-new")) == (200, 401)
        keys.write_text("sk-new name=alice max_concurrent=2\n")
        assert status("sk-new") == 401, "not before it is asked for"
        assert _reload(server)[0] == 0, server.log
        assert (status("sk-old"), status("sk-new")) == (401, 200)
        keys.write_text("sk-new max_concurrent=many\n")
        code, said = _reload(server)
        assert code == 1
        assert "the old one stays" in said
        server.says("line 1")  # the reason
        assert status("sk-new") == 200


if __name__ == "__main__":  # a longer run: python -m tests.e2e.test_reload MODEL
    found = reload_under_load(Path(sys.argv[1]), 200, 5 * [[], ["worker"]])
    print(dict(found.counts), found.faults)
