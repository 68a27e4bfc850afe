"""What one front-end process on one core streams: SSE over the real ring, no model behind it.

`python -m tests.benchmarks.front_end [--streams 256] [--tokens 512] [--pace-us 0] [--rounds 3] [--bare]`
starts a worker with the mock device, one front end, and a client that does nothing but count. With
`--pace-us` a step takes that long, so that every token is a frame of its own; without, tokens come as fast
as the worker can and those that wait go out together. `--bare` measures a uvicorn app that sends as many
frames of 190 bytes and does nothing else, in turns with the front end: the ceiling.

The front end has the first core for itself; worker and client share the others, as they would be on other
machines. Rates are of wall time from the first request to the last byte, requests and prompts included;
"per CPU second" is what a core that nobody else uses would do.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from tests.support.tiny_model import TinyShape, write_tiny_model

_MARK: Final = b"data: "
_PROMPT: Final = "hello there, "  # with the template around it, 32 tokens
LONG_CONTEXT: Final = 1 << 17
_READY_S: Final = 60.0
_READ_BYTES: Final = 1 << 20


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One round."""

    tokens_per_s: float
    frames_per_s: float
    requests_per_s: float
    tokens_per_cpu_s: float
    frames_per_cpu_s: float
    first_s: float  # until every stream had its first frame


async def _bare(scope: Scope, receive: Receive, send: Send) -> None:
    """The least that streams: a frame for each token, and the loop gets its turn after each."""
    if scope["type"] != "http":
        return
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message.get("more_body"):
            break
    num_frames = json.loads(body)["max_tokens"] if body else 0
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    frame = _MARK + b"x" * 182 + b"\n\n"
    for _ in range(num_frames):
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


def stream_request(num_tokens: int) -> bytes:
    """A chat request that streams so many tokens."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": _PROMPT}],
            "stream": True,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "seed": 1,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}"
    )
    return head.encode() + b"\r\n\r\n" + body


def read_streams(port: int, num_streams: int, num_tokens: int) -> tuple[int, float, float]:
    """Open all streams at once and read them to their ends: frames, seconds until all had begun, seconds.

    Raises AssertionError for an answer other than 200.
    """
    selector = selectors.EpollSelector()
    request = stream_request(num_tokens)
    started_s = time.perf_counter()
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, [b""])
    num_frames, num_open, num_begun, begun_s = 0, num_streams, 0, 0.0
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    while num_open:
        for key, _ in selector.select():
            stream, tail = key.fileobj, key.data
            assert isinstance(stream, socket.socket)
            kept = len(tail[0])  # a mark may lie across two reads
            view[:kept] = tail[0]
            size = stream.recv_into(view[kept:])
            if not size:
                selector.unregister(stream)
                stream.close()
                num_open -= 1
                continue
            if not kept:
                assert buffer.startswith(b"HTTP/1.1 200"), bytes(view[:size])
            found = buffer.count(_MARK, 0, kept + size)
            if found and not tail[1:]:
                num_begun += 1
                tail.append(b"begun")
                begun_s = time.perf_counter() - started_s
            num_frames += found
            tail[0] = bytes(view[max(0, kept + size - len(_MARK) + 1) : kept + size])
    selector.close()
    assert num_begun == num_streams
    return num_frames, begun_s, time.perf_counter() - started_s


def processor_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.recv(64).startswith(b"HTTP/1.1 200")
    return False


def cores() -> tuple[set[int], set[int]]:
    """One for the front end, the others for everybody else."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


@contextlib.contextmanager
def process(command: Sequence[str], where: set[int]) -> Iterator[int]:
    """A Python process on these cores; its id. Stopped with the block."""
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, where)
    child = subprocess.Popen([sys.executable, "-m", *command])
    os.sched_setaffinity(0, here)
    try:
        yield child.pid
    finally:
        child.terminate()
        child.wait(30)


@contextlib.contextmanager
def front_and_worker(
    port: int, num_slots: int, pace_us: int, *, model: str = "", num_context_tokens: int = LONG_CONTEXT
) -> Iterator[int]:
    """One front end that is ready, with the mock device behind it: the front end's process id.

    `model` is a GGUF file, by default a tiny one with room for prompts of so many tokens.
    """
    alone, others = cores()
    rate = str(1e6 / pace_us if pace_us else 0)
    with tempfile.TemporaryDirectory() as scratch:
        shape = TinyShape(max_context_tokens=num_context_tokens)
        common = ["--model", model or str(write_tiny_model(Path(scratch) / "tiny.gguf", shape=shape))]
        common += ["--shared-dir", str(Path(scratch) / "ring"), "--log-level", "error"]
        common += ["--slots-per-front-end", str(num_slots)]
        mock = ["--device", "mock", "--mock-tokens-per-s", rate, "--batched-sessions", str(num_slots)]
        front = ["ds4", "front", *common, "--port", str(port)]
        worker = ["workers.main", *common, *mock, "--max-batch-tokens", "4096"]
        with process(front, alone) as pid, process(worker, others):
            wait_ready(port)
            yield pid


@contextlib.contextmanager
def bare(port: int) -> Iterator[int]:
    """The app that does nothing else: its process id."""
    app = "tests.benchmarks.front_end:_bare"
    command = ["uvicorn", app, "--port", str(port), "--loop", "uvloop", "--log-level", "warning"]
    with process([*command, "--no-access-log"], cores()[0]) as pid:
        wait_ready(port)
        yield pid


def wait_ready(port: int) -> None:
    """Until `/health` says 200."""
    deadline = time.monotonic() + _READY_S
    while not _is_ready(port):
        assert time.monotonic() < deadline, "the server does not become ready"
        time.sleep(0.1)


def measure(pid: int, port: int, num_streams: int, num_tokens: int) -> Result:
    """One round on a server that runs."""
    spent_s = processor_s(pid)
    num_frames, first_s, wall_s = read_streams(port, num_streams, num_tokens)
    front_s = processor_s(pid) - spent_s
    total = num_streams * num_tokens
    return Result(
        tokens_per_s=total / wall_s,
        frames_per_s=num_frames / wall_s,
        requests_per_s=num_streams / wall_s,
        tokens_per_cpu_s=total / front_s,
        frames_per_cpu_s=num_frames / front_s,
        first_s=first_s,
    )


def median(results: Sequence[Result]) -> Result:
    """Field by field."""
    fields = Result.__struct_fields__
    return Result(**{name: statistics.median(getattr(each, name) for each in results) for name in fields})


def main(arguments: Sequence[str]) -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pace-us", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18099)
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args(arguments)
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}, {options.streams} streams "
        f"of {options.tokens} tokens, a step every {options.pace_us} us, median of {options.rounds}\n"
    )
    results: dict[str, list[Result]] = {"front end": []}
    with contextlib.ExitStack() as stack:
        servers = [("front end", options.port)]
        pids = [stack.enter_context(front_and_worker(options.port, options.streams, options.pace_us))]
        if options.bare:
            results["bare uvicorn"] = []
            servers.append(("bare uvicorn", options.port + 1))
            pids.append(stack.enter_context(bare(options.port + 1)))
        os.sched_setaffinity(0, cores()[1])
        for _, port in servers:
            read_streams(port, options.streams, 16)  # warm
        for _ in range(options.rounds):
            for pid, (name, port) in zip(pids, servers, strict=True):
                results[name].append(measure(pid, port, options.streams, options.tokens))
    print(
        "| server | tokens/s | frames/s | requests/s | tokens per CPU s | frames per CPU s | all begun, s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, rounds in results.items():
        row = median(rounds)
        print(
            f"| {name} | {row.tokens_per_s:,.0f} | {row.frames_per_s:,.0f} | {row.requests_per_s:,.0f} | "
            f"{row.tokens_per_cpu_s:,.0f} | {row.frames_per_cpu_s:,.0f} | {row.first_s:.2f} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
