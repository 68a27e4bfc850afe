"""What one front-end process costs per token: SSE streams over the real ring, no model behind it.

`python -m tests.benchmarks.front_end [--streams 64] [--tokens 256] [--pace-us 0] [--mock]` starts a worker
that invents tokens, one front end, and reads every stream. With `--mock` it is the real worker with its
mock device, else a loop that does nothing but publish. With `--bare` the front end is uvicorn with an app
that sends as many frames of 190 bytes and does nothing else: the ceiling. The figure that matters is tokens per second
of the front end's processor time: wall time also pays for the worker and the reader.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from starlette.types import Receive, Scope, Send

from ds4.generation import FinishReason, GenerationEnd, ModelInfo, decode_request, encode_model_info
from ds4.model_file import ModelFile
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.worker_end import WorkerRing
from tests.support.tiny_model import write_tiny_model


def _serve_tokens(directory: Path, model: Path, pace_s: float) -> None:
    file = ModelFile.open(model)
    info = ModelInfo(
        architecture="llama",
        vocab_size=file.vocab_size,
        max_context_tokens=file.max_context_tokens,
        tokenizer_hash=file.tokenizer_hash,
        device="bench",
        batched_sessions=1024,
        num_pages=1,
        page_tokens=16,
    )
    ring = WorkerRing(
        directory, RingShape(num_front_ends=2, slots_per_front_end=1024), encode_model_info(info)
    )
    ring.set_state(WorkerState.READY)
    left = np.zeros(2048, np.int64)
    next_step = time.monotonic()
    while True:
        polled = ring.poll()
        for submission in polled.submissions:
            left[submission.slot] = decode_request(submission.params).max_tokens
        ring.admit([submission.slot for submission in polled.submissions])
        left[polled.dropped] = 0
        ring.finish({slot: GenerationEnd(FinishReason.CANCELLED) for slot in polled.cancelled})
        left[polled.cancelled] = 0
        slots = np.flatnonzero(left)
        slots = slots[ring.writable(slots)] if len(slots) else slots
        if not len(slots):
            ring.sleep(0.01)
            continue
        left[slots] -= 1
        ends = {int(row): GenerationEnd(FinishReason.LENGTH) for row in np.flatnonzero(left[slots] == 0)}
        ring.publish(slots, np.random.default_rng(0).integers(70, 90, len(slots)).astype(np.int32), ends=ends)
        next_step = max(time.monotonic(), next_step + pace_s)
        if pace_s:
            time.sleep(max(0.0, next_step - time.monotonic()))


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
    frame = b"data: " + b"x" * 182 + b"\n\n"
    for _ in range(num_frames):
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def _read_stream(port: int, num_tokens: int) -> tuple[int, int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    message = [{"role": "user", "content": "hello there"}]
    body = json.dumps({"messages": message, "stream": True, "max_tokens": num_tokens, "seed": 1}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    num_frames = num_bytes = 0
    while data := await reader.read(1 << 18):
        num_frames += data.count(b"data: ")
        num_bytes += len(data)
    writer.close()
    return num_frames, num_bytes


async def _read_all(port: int, num_streams: int, num_tokens: int) -> list[tuple[int, int]]:
    return await asyncio.gather(*(_read_stream(port, num_tokens) for _ in range(num_streams)))


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_ready(port: int) -> None:
    async def ask() -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.startswith(b"HTTP/1.1 200")

    deadline = time.monotonic() + 60
    while not asyncio.run(ask()):
        assert time.monotonic() < deadline, "the front end does not become ready"
        time.sleep(0.1)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pace-us", type=int, default=0)
    parser.add_argument("--port", type=int, default=18099)
    parser.add_argument("--mock", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args(arguments)
    pace_s = options.pace_us / 1e6
    if options.worker:
        _serve_tokens(Path(options.worker[0]), Path(options.worker[1]), pace_s)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "tiny.gguf")
        directory = Path(scratch) / "ring"
        flags = [
            "--model",
            str(model),
            "--shared-dir",
            str(directory),
            "--port",
            str(options.port),
            "--slots-per-front-end",
            "1024",
            "--log-level",
            "warning",
        ]
        command = ["ds4", "front", *flags]
        if options.bare:
            app, port = "tests.benchmarks.front_end:_bare", str(options.port)
            command = ["uvicorn", app, "--port", port, "--loop", "uvloop", "--log-level", "warning"]
        front = subprocess.Popen([sys.executable, "-m", *command])
        if options.mock:
            rate = str(1e6 / options.pace_us if options.pace_us else 0)
            mock = ["--device", "mock", "--mock-tokens-per-s", rate, "--batched-sessions", "1024"]
            command = ["workers.main", *flags, *mock, "--max-batch-tokens", "4096"]
        else:
            pace = ["--pace-us", str(options.pace_us)]
            command = ["tests.benchmarks.front_end", *pace, "--worker", str(directory), str(model)]
        worker = subprocess.Popen([sys.executable, "-m", *command])
        try:
            _wait_ready(options.port)
            asyncio.run(_read_all(options.port, options.streams, 16))  # warm
            spent, started = _processor_s(front.pid), time.monotonic()
            worker_spent = _processor_s(worker.pid)
            answers = asyncio.run(_read_all(options.port, options.streams, options.tokens))
            wall_s, front_s = time.monotonic() - started, _processor_s(front.pid) - spent
            worker_s = _processor_s(worker.pid) - worker_spent
            total = options.streams * options.tokens
            frames = sum(num for num, _ in answers)
            print(
                f"streams={options.streams} tokens={total} frames={frames} wall={wall_s:.2f}s "
                f"front_cpu={front_s:.2f}s tokens/front_cpu_s={total / front_s:,.0f} "
                f"frames/front_cpu_s={frames / front_s:,.0f} tokens/worker_cpu_s={total / max(worker_s, 0.01):,.0f} "
                f"tokens/s={total / wall_s:,.0f}"
            )
        finally:
            worker.terminate()
            front.terminate()
            worker.wait(30)
            front.wait(30)


if __name__ == "__main__":
    main(sys.argv[1:])
