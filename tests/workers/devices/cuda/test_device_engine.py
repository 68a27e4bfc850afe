"""The engine one step ahead of the CUDA device: what happens around a request changes no token.

Chunks, batch mates, shared prefixes, preemption and resumption all end in what the device keeps for a
seat (page tables, counts, seeds): a mistake in when it is told what changes sampled tokens here.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_rig import Client, EngineRig, run
from tests.support.request_mix import VOCAB_SIZE, prompt_of, sampling_of
from tests.support.tiny_model import TinyShape
from tests.workers.devices.cuda.rig import needs_compiler, new_backend, tiny_program
from workers.devices.cuda.device import CudaDevice
from workers.model.program import Program

pytestmark = needs_compiler

NUM_REQUESTS = 10
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return tiny_program(tmp_path_factory.mktemp("model"), "Q8_0", TinyShape(num_layers=1))


def rig_of(directory: Path, program: Program, **sizes: Any) -> EngineRig:
    return EngineRig(
        directory,
        make_device=lambda limits: CudaDevice(program, limits, new_backend(), batch_invariant=True),
        vocab_size=VOCAB_SIZE,
        **{"seats": NUM_REQUESTS, "rows": 32, "pages": 128, "context": 128, **sizes},
    )


def submit(rig: EngineRig, number: int, delivered: tuple[int, ...] = ()) -> Client:
    return rig.submit(
        [*prompt_of(number), *delivered],
        MAX_TOKENS,
        sampling=sampling_of(number),
        num_resumed_tokens=len(delivered),
    )


@pytest.fixture(scope="module")
def alone(program: Program, tmp_path_factory: pytest.TempPathFactory) -> list[Client]:
    """Every request by itself, one after another."""
    clients: list[Client] = []

    async def test() -> None:
        async with rig_of(tmp_path_factory.mktemp("alone"), program).serving() as rig:
            for number in range(NUM_REQUESTS):
                await rig.finish(client := submit(rig, number))
                clients.append(client)

    run(test())
    return clients


def test_the_engine_runs_one_step_ahead(program: Program, alone: list[Client]) -> None:
    assert CudaDevice.pipeline_depth == 1
    assert all(len(client.tokens) == MAX_TOKENS for client in alone)
    assert len({tuple(client.tokens) for client in alone}) > NUM_REQUESTS // 2


def test_a_request_is_the_same_alone_and_among_others(
    program: Program, alone: list[Client], tmp_path: Path
) -> None:
    async def test() -> None:
        async with rig_of(tmp_path, program).serving() as rig:
            clients = []
            for number in range(NUM_REQUESTS):
                clients.append(submit(rig, number))
                await rig.turn(number % 3)
            await rig.finish(*clients)
            for client, expected in zip(clients, alone, strict=True):
                assert client.events == expected.events  # bit for bit

    run(test())


def test_preemption_changes_no_sampled_token(program: Program, alone: list[Client], tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_of(tmp_path, program, pages=7, seats=6).serving() as rig:
            clients = [submit(rig, number) for number in range(NUM_REQUESTS)]
            await rig.finish(*clients)
            assert rig.metrics.value("ds4_num_preemptions_total") > 0
            for client, expected in zip(clients, alone, strict=True):
                assert client.events == expected.events

    run(test())


def test_a_resumed_request_continues_as_if_nothing_had_happened(
    program: Program, alone: list[Client], tmp_path: Path
) -> None:
    async def test() -> None:
        async with rig_of(tmp_path, program).serving() as rig:
            cuts = [1 + number % (MAX_TOKENS - 1) for number in range(NUM_REQUESTS)]
            clients = [
                submit(rig, number, tuple(alone[number].tokens[:cut])) for number, cut in enumerate(cuts)
            ]
            await rig.finish(*clients)
            for client, expected, cut in zip(clients, alone, cuts, strict=True):
                assert client.events == expected.events[cut:]

    run(test())
