"""What large requests cost the streams of others: how much later a token comes while they are prepared.

`python -m tests.benchmarks.large_bodies [--streams 32] [--pace-us 10000] [--seconds 5] [--mib 1] [--context 131072]`
runs paced streams on one front end with the mock device, and meanwhile sends bodies of this size one after
another, one kind at a time. A stall is the time between two reads of one stream beyond the pace. The first
row, without large bodies, is what machine, worker and client cost themselves. A prompt that is longer than
the model's context (128 Ki tokens of about a byte, if neither `--context` nor `--model` says otherwise) is
refused with 400 once it is tokenized, so that the worker has no part in it. With `--context 2097152` all are
taken: the worker computes the first of a kind and finds the others in its prefix cache.
"""

import argparse
import contextlib
import json
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from tests.benchmarks.front_end import LONG_CONTEXT, cores, front_and_worker, stream_request

_WORDS: Final = "The quick brown fox jumps over the lazy dog, says hello and runs away again.\n"
_READ_BYTES: Final = 1 << 16


def _text(num_bytes: int) -> str:
    return _WORDS * (num_bytes // len(_WORDS))


def _tools(num_bytes: int) -> list[dict[str, Any]]:
    """Tools with long schemas, as agents send them; no more than are allowed."""
    size = num_bytes // 100
    properties = {f"field_{index}": {"type": "string", "description": _WORDS} for index in range(size // 140)}
    schema = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}} for i in range(100)]


def _body(kind: str, num_bytes: int) -> tuple[str, bytes]:
    text = _text(num_bytes)
    turns = [{"role": role, "content": _WORDS} for role in ("user", "assistant")] * (num_bytes // 250)
    parts = [{"type": "text", "text": "a"}] * (num_bytes // 32)
    inputs = [{"type": "input_text", "text": "a"}] * (num_bytes // 38)
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "chat, many turns": ("/v1/chat/completions", {"messages": turns}),
        "chat, many parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}),
        "chat, tools": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hello"}], "tools": _tools(num_bytes)},
        ),
        "completion": ("/v1/completions", {"prompt": text}),
        "completion, ids": ("/v1/completions", {"prompt": [70] * (num_bytes // 4)}),
        "responses": ("/v1/responses", {"input": text}),
        "responses, many parts": ("/v1/responses", {"input": [{"role": "user", "content": inputs}]}),
        "messages": ("/v1/messages", {"messages": [{"role": "user", "content": text}]}),
        "messages, many parts": ("/v1/messages", {"messages": [{"role": "user", "content": parts}]}),
        "count_tokens": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
        "tokenize": ("/tokenize", {"content": text}),
        "detokenize": ("/detokenize", {"tokens": [70] * (num_bytes // 4)}),
    }
    path, fields = bodies[kind]
    if path.startswith("/v1") and "count" not in path:
        fields["max_output_tokens" if path.endswith("responses") else "max_tokens"] = 1
    body = json.dumps(fields).encode()
    return path, body


KINDS: Final = (
    "chat",
    "chat, many turns",
    "chat, many parts",
    "chat, tools",
    "completion",
    "completion, ids",
    "responses",
    "responses, many parts",
    "messages",
    "messages, many parts",
    "count_tokens",
    "tokenize",
    "detokenize",
)


def send(kind: str, port: int, num_bytes: int, seconds: float) -> None:
    """Post bodies one after another for so long; print how many, the median time and the last status."""
    path, body = _body(kind, num_bytes)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    times_s: list[float] = []
    status = b""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + body)
            answer = connection.recv(_READ_BYTES)
            status = answer[9:12]
            while answer:
                answer = connection.recv(_READ_BYTES)
        times_s.append(time.perf_counter() - began_s)
    print(f"{len(times_s)} | {statistics.median(times_s) * 1000:.0f} | {status.decode()}")


def read_gaps(port: int, num_streams: int, num_tokens: int) -> list[float]:
    """Read all streams to their ends: the seconds between any two reads of one stream."""
    selector = selectors.EpollSelector()
    last_s: dict[int, float] = {}
    for number in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(stream_request(num_tokens))
        selector.register(connection, selectors.EVENT_READ, number)
    gaps_s: list[float] = []
    num_open = num_streams
    while num_open:
        for key, _ in selector.select():
            stream = key.fileobj
            assert isinstance(stream, socket.socket)
            data = stream.recv(_READ_BYTES)
            now_s = time.perf_counter()
            if not data:
                selector.unregister(stream)
                stream.close()
                num_open -= 1
            elif b'"content":"' in data:
                if key.data in last_s:
                    gaps_s.append(now_s - last_s[key.data])
                last_s[key.data] = now_s
    selector.close()
    return gaps_s


def main(arguments: Sequence[str]) -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--pace-us", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--mib", type=float, default=1.0)
    parser.add_argument("--port", type=int, default=18097)
    parser.add_argument("--context", type=int, default=LONG_CONTEXT, help="tokens")
    parser.add_argument("--model", default="", help="in place of the tiny model with its long context")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--send", choices=KINDS)
    options = parser.parse_args(arguments)
    num_bytes = int(options.mib * (1 << 20))
    if options.send:
        send(options.send, options.port, num_bytes, options.seconds)
        return
    num_tokens = int(options.seconds * 1e6 / options.pace_us)
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}, {options.streams} streams, "
        f"a step every {options.pace_us} us, bodies of {options.mib} MiB\n"
    )
    print("| bodies | stall p50 ms | p99 ms | max ms | bodies sent | each, ms | status |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            front_and_worker(
                options.port,
                options.streams + 8,
                options.pace_us,
                model=options.model,
                num_context_tokens=options.context,
            )
        )
        os.sched_setaffinity(0, cores()[1])
        read_gaps(options.port, options.streams, 16)  # warm
        for kind in ("", *options.kinds):
            sent = "0 | - | -"
            command = [sys.executable, "-m", "tests.benchmarks.large_bodies", *arguments, "--send", kind]
            sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if kind else None
            gaps_s = read_gaps(options.port, options.streams, num_tokens)
            if sender is not None:
                sent = sender.communicate()[0].strip()
            stalls = sorted(max(0.0, gap - options.pace_us / 1e6) * 1000 for gap in gaps_s)
            p50, p99 = stalls[len(stalls) // 2], stalls[int(0.99 * len(stalls))]
            print(f"| {kind or 'none'} | {p50:.1f} | {p99:.1f} | {stalls[-1]:.1f} | {sent} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
