"""Tokens per second, time to first token and inter-token time of a running server at several loads.

    python -m tests.benchmarks.streams http://127.0.0.1:8080
    python -m tests.benchmarks.streams http://127.0.0.1:8080 http://127.0.0.1:8081 --rounds 3

Talks to any server with an OpenAI chat endpoint that streams; a second URL (llama-server, say) is
measured in turns with the first, so that both see the same machine. Every stream has its own prompt,
so that prefix caches help with the shared beginning only, as they do in life. Counts are the
server's own `usage` where it sends one, else the events with text. Use as many sessions on each
server as the largest load.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import time
from typing import Final

import httpx
import msgspec

LOADS: Final = (1, 8, 32, 64)
DEADLINE_S: Final = 600.0
_TOPICS: Final = ("rivers", "compilers", "bread", "satellites", "violins", "glaciers", "markets", "bees")


class Stream(msgspec.Struct, frozen=True):
    """What one stream did. Times in seconds."""

    num_tokens: int
    first_s: float
    gaps_s: list[float]


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


async def _stream(client: httpx.AsyncClient, url: str, number: int, max_tokens: int) -> Stream:
    started = time.perf_counter()
    arrivals: list[float] = []
    num_reported = 0
    async with client.stream(
        "POST", f"{url}/v1/chat/completions", json=_body(number, max_tokens)
    ) as response:
        if response.status_code != 200:
            raise SystemExit(f"{url}: {response.status_code} {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"{url}: {event['error']}")
            num_reported = (event.get("usage") or {}).get("completion_tokens", num_reported)
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
                arrivals.append(time.perf_counter())
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    return Stream(
        num_reported or len(arrivals), (arrivals[0] if arrivals else time.perf_counter()) - started, gaps
    )


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def measure(url: str, num_streams: int, max_tokens: int) -> Result:
    """Run one load on one server."""
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(timeout=DEADLINE_S, limits=limits) as client:
        started = time.perf_counter()
        streams = await asyncio.gather(
            *(_stream(client, url, number, max_tokens) for number in range(num_streams))
        )
        elapsed_s = time.perf_counter() - started
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
        asyncio.run(measure(url, 1, 8))  # compile, page in, connect
    for num_streams in arguments.streams:
        taken: dict[str, list[Result]] = {url: [] for url in arguments.urls}
        for _ in range(arguments.rounds):
            for url in arguments.urls:
                taken[url].append(asyncio.run(measure(url, num_streams, arguments.max_tokens)))
        for results in taken.values():
            row = _median(results)
            print(
                f"| {row.url} | {row.num_streams} | {row.tokens_per_s:.1f} | {row.first_p50_ms:.0f} | "
                f"{row.first_p99_ms:.0f} | {row.gap_p50_ms:.1f} | {row.gap_p99_ms:.1f} |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
