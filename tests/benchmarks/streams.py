"""Tokens per second, time to first token and inter-token time of a running server at several loads.

    python -m tests.benchmarks.streams http://127.0.0.1:8080
    python -m tests.benchmarks.streams http://127.0.0.1:8080 http://127.0.0.1:8081 --rounds 3

Talks to any server with an OpenAI chat endpoint that streams; a second URL (llama-server, say) is
measured in turns with the first, so that both see the same machine. Every stream has its own prompt,
so that prefix caches help with the shared beginning only, as they do in life. Counts are the
server's own `usage` where it sends one, else the events with text. Use as many sessions on each
server as the largest load.

The client shares the machine with the servers, so it only notes what arrived and when, and reads the
events after the last stream has ended.
"""

import argparse
import itertools
import json
import os
import platform
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import h11
import msgspec

LOADS: Final = (1, 8, 32, 64)
DEADLINE_S: Final = 600.0
_READ_BYTES: Final = 1 << 16
_TOPICS: Final = ("rivers", "compilers", "bread", "satellites", "violins", "glaciers", "markets", "bees")


class Stream(msgspec.Struct, frozen=True):
    """What one stream did. Times in seconds."""

    num_tokens: int
    first_s: float
    gaps_s: list[float]


class _Arrivals(msgspec.Struct):
    """What one connection brought, as it came."""

    started_s: float
    pieces: list[tuple[float, bytes]]


class Result(msgspec.Struct, frozen=True):
    """One load on one server."""

    url: str
    num_streams: int
    tokens_per_s: float
    first_p50_ms: float
    first_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


def _body(number: int, max_tokens: int) -> dict[str, object]:
    topic = _TOPICS[number % len(_TOPICS)]
    return {
        "model": "default",
        "messages": [{"role": "user", "content": f"Write a long text, part {number}, about {topic}."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _request(host: str, number: int, max_tokens: int) -> bytes:
    body = json.dumps(_body(number, max_tokens)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _read_streams(url: str, num_streams: int, max_tokens: int) -> list[_Arrivals]:
    """Open all streams at once and read them to their ends."""
    place = urlsplit(url)
    if place.scheme != "http" or place.hostname is None:
        raise SystemExit(f"{url}: give it as http://host:port")
    found = []
    with selectors.DefaultSelector() as selector:
        for number in range(num_streams):
            connection = socket.create_connection((place.hostname, place.port or 80), DEADLINE_S)
            arrivals = _Arrivals(time.perf_counter(), [])
            connection.sendall(_request(place.netloc, number, max_tokens))
            selector.register(connection, selectors.EVENT_READ, arrivals)
            found.append(arrivals)
        while selector.get_map():
            ready = selector.select(DEADLINE_S)
            if not ready:
                raise SystemExit(f"{url}: nothing came for {DEADLINE_S:g} s")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                piece = key.fileobj.recv(_READ_BYTES)
                key.data.pieces.append((time.perf_counter(), piece))
                if not piece:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    return found


def _events(url: str, arrivals: _Arrivals) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of one answer, and when the last byte of each came."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    rest = b""
    for arrived_s, piece in arrivals.pieces:
        connection.receive_data(piece)
        while (event := connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response) and event.status_code != 200:
                raise SystemExit(f"{url}: {piece.decode(errors='replace')}")
            if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                break
            if isinstance(event, h11.Data):
                *lines, rest = (rest + bytes(event.data)).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield arrived_s, json.loads(line[6:])


def _stream(url: str, arrivals: _Arrivals) -> Stream:
    times: list[float] = []
    num_reported = 0
    for arrived_s, event in _events(url, arrivals):
        if "error" in event:
            raise SystemExit(f"{url}: {event['error']}")
        num_reported = (event.get("usage") or {}).get("completion_tokens", num_reported)
        if any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
            times.append(arrived_s)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    last_s = arrivals.pieces[-1][0]
    return Stream(num_reported or len(times), (times[0] if times else last_s) - arrivals.started_s, gaps)


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def measure(url: str, num_streams: int, max_tokens: int) -> Result:
    """Run one load on one server."""
    started_s = time.perf_counter()
    arrivals = _read_streams(url, num_streams, max_tokens)
    elapsed_s = time.perf_counter() - started_s
    streams = [_stream(url, one) for one in arrivals]
    firsts = [stream.first_s for stream in streams]
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    return Result(
        url,
        num_streams,
        sum(stream.num_tokens for stream in streams) / elapsed_s,
        _percentile(firsts, 0.5) * 1000,
        _percentile(firsts, 0.99) * 1000,
        _percentile(gaps, 0.5) * 1000,
        _percentile(gaps, 0.99) * 1000,
    )


def _median(results: list[Result]) -> Result:
    def middle(field: str) -> float:
        return float(statistics.median(getattr(result, field) for result in results))

    fields = [middle(name) for name in Result.__struct_fields__[2:]]
    return Result(results[0].url, results[0].num_streams, *fields)


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("urls", nargs="+", help="one or two servers")
    parser.add_argument("--streams", type=int, nargs="+", default=list(LOADS))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="the median over this many is shown")
    arguments = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}, "
        f"{arguments.max_tokens} tokens a stream, median of {arguments.rounds}\n"
    )
    print("| server | streams | tokens/s | first token p50 ms | p99 ms | between tokens p50 ms | p99 ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for url in arguments.urls:
        measure(url, 1, 8)  # compile, page in, connect
    for num_streams in arguments.streams:
        taken: dict[str, list[Result]] = {url: [] for url in arguments.urls}
        for _ in range(arguments.rounds):
            for url in arguments.urls:
                taken[url].append(measure(url, num_streams, arguments.max_tokens))
        for results in taken.values():
            row = _median(results)
            print(
                f"| {row.url} | {row.num_streams} | {row.tokens_per_s:.1f} | {row.first_p50_ms:.0f} | "
                f"{row.first_p99_ms:.0f} | {row.gap_p50_ms:.1f} | {row.gap_p99_ms:.1f} |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
