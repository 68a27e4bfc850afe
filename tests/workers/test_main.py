"""The worker as a process: exit codes, signals, device faults, death. Only the device is fake."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from ds4.errors import ErrorCode, RingUnavailableError
from ds4.generation import FinishReason, GenerationRequest, SamplingParams, decode_model_info, encode_request
from ds4.ring.front_end import FrontEndRing
from ds4.ring.states import WorkerState
from tests.support.engine_rig import Client
from tests.support.fake_device import generate
from tests.support.tiny_model import vocabulary, write_tiny_model

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0


def run(test: object) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, DEADLINE_S)  # type: ignore[arg-type]

    asyncio.run(bounded())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path)
    return path


class Workers:
    """Starts worker processes on one shared directory and ends those it started."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self.model = model
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *flags: str, first: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tests.support.fake_worker",
            *first,
            "--shared-dir",
            str(self.directory),
        ]
        command += ["--model", str(self.model), *flags]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DS4_SERVER_")}  # noqa: TID251
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


@pytest.fixture
def workers(tmp_path: Path, model: Path) -> Iterator[Workers]:
    started = Workers(tmp_path / "shared", model)
    yield started
    started.close()


@contextlib.asynccontextmanager
async def front_end(directory: Path) -> AsyncIterator[FrontEndRing]:
    ring = FrontEndRing(directory)
    await ring.start()
    try:
        yield ring
    finally:
        await ring.close()


def submit(ring: FrontEndRing, prompt: list[int], max_tokens: int, **fields: int) -> Client:
    request = GenerationRequest(
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
        **fields,  # type: ignore[arg-type]
    )
    return Client(ring.submit(encode_request(request), np.array(prompt, np.uint32)))


def expected(prompt: list[int], count: int) -> list[int]:
    return generate(prompt, count, len(vocabulary()))


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error."""
    _, text = await asyncio.to_thread(process.communicate)
    return process.returncode, text


async def reach(client: Client, num_tokens: int) -> None:
    while len(client.tokens) < num_tokens:
        assert client.end is None
        await asyncio.sleep(0.001)


def test_a_worker_serves_and_sigterm_drains_it(workers: Workers) -> None:
    async def test() -> None:
        process = workers.start(first=("--step-ms", "5"))
        async with front_end(workers.directory) as ring:
            await ring.wait_attached()
            assert ring.model_info is not None
            info = decode_model_info(ring.model_info)
            assert (info.vocab_size, info.max_context_tokens, info.num_pages) == (len(vocabulary()), 512, 256)
            client = submit(ring, [1, 2, 3], 60)
            await reach(client, 3)
            process.send_signal(signal.SIGTERM)
            await client.task
            assert client.tokens == expected([1, 2, 3], 60)
            code, text = await ended(process)
            assert (code, "Traceback" in text) == (0, False), text
        assert [
            path for path in workers.directory.rglob("*") if path.name not in ("metrics", "control")
        ] == []

    run(test())


def test_a_successor_with_less_memory_has_the_context_of_the_worker_before(workers: Workers) -> None:
    async def test() -> None:
        first = workers.start(first=("--step-ms", "50"))
        async with front_end(workers.directory) as ring:
            await ring.wait_attached()
            client = submit(ring, [1, 2, 3], 400)
            await reach(client, 3)
            first.kill()
            with pytest.raises(RingUnavailableError):
                await client.task
            second = workers.start(first=("--room", "64"))
            await ring.wait_attached()
            assert ring.model_info is not None
            assert decode_model_info(ring.model_info).max_context_tokens == 512
            second.send_signal(signal.SIGTERM)
            await ended(second)
            assert (workers.directory / "limits").exists()
        third = workers.start(first=("--room", "64"))
        async with front_end(workers.directory) as ring:
            await ring.wait_attached()
            assert ring.model_info is not None
            assert decode_model_info(ring.model_info).max_context_tokens == 64, "all had left"
            third.kill()

    run(test())


def test_what_is_left_at_the_deadline_is_told_so(workers: Workers) -> None:
    async def test() -> None:
        process = workers.start("--drain-timeout-s", "0", first=("--step-ms", "50"))
        async with front_end(workers.directory) as ring:
            await ring.wait_attached()
            client = submit(ring, [1], 400)
            await reach(client, 2)
            process.send_signal(signal.SIGTERM)
            await client.task
            assert client.end is not None
            assert client.end.error_code == ErrorCode.SHUTTING_DOWN
            assert (await ended(process))[0] == 0

    run(test())


def test_a_second_signal_ends_it_at_once(workers: Workers) -> None:
    async def test() -> None:
        process = workers.start(first=("--step-ms", "50"))
        async with front_end(workers.directory) as ring:
            await ring.wait_attached()
            client = submit(ring, [1], 400)
            await reach(client, 2)
            process.send_signal(signal.SIGTERM)
            while ring.worker_state is not WorkerState.DRAINING:  # noqa: ASYNC110 - the worker brings it about
                await asyncio.sleep(0.001)
            process.send_signal(signal.SIGTERM)
            assert (await ended(process))[0] == 128 + signal.SIGTERM
            with pytest.raises(RingUnavailableError):
                await client.task

    run(test())


@pytest.mark.parametrize("how", ["device fault", "killed"])
def test_a_lost_worker_is_followed_by_one_that_continues_with_the_same_tokens(
    workers: Workers, how: str
) -> None:
    async def test() -> None:
        fault = ("--fault-at-step", "20") if how == "device fault" else ()
        process = workers.start(first=(*fault, "--step-ms", "50"))
        async with front_end(workers.directory) as ring:
            await ring.wait_attached()
            client = submit(ring, [4, 5], 100)
            await reach(client, 5)
            if how == "killed":
                process.kill()
            with pytest.raises(RingUnavailableError):
                await client.task
            code, _ = await ended(process)
            assert code == (70 if how == "device fault" else -signal.SIGKILL)
            delivered = client.tokens
            assert delivered == expected([4, 5], len(delivered))
            workers.start()
            await ring.wait_attached()
            again = submit(ring, [4, 5, *delivered], 100, num_resumed_tokens=len(delivered))
            await again.task
            assert delivered + again.tokens == expected([4, 5], 100)
            assert again.end is not None
            assert again.end.reason is FinishReason.LENGTH

    run(test())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--batched-sesions", "3"], "--batched-sessions"),
        (["--max-batch-tokens", "x"], "--max-batch-tokens"),
        (["--model", "missing.gguf"], "missing.gguf"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(workers: Workers, flags: list[str], named: str) -> None:
    async def test() -> None:
        code, text = await ended(workers.start(*flags))
        assert code == 2
        (line,) = text.splitlines()
        assert named in line

    run(test())


def test_a_second_worker_on_one_directory_is_refused(workers: Workers) -> None:
    async def test() -> None:
        workers.start()
        async with front_end(workers.directory) as ring:
            await ring.wait_attached()
            code, text = await ended(workers.start())
            assert code == 2
            assert len(text.splitlines()) == 1
            client = submit(ring, [1], 5)
            await client.task
            assert client.tokens == expected([1], 5)

    run(test())
