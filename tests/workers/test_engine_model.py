"""The engine with a real model on the reference device: what happens around a request changes no token.

Chunks, batch mates, shared prefixes, preemption and resumption all end in the device's seat state
(history, penalties, seeds): a mistake in what it is told changes sampled tokens here.
"""

from pathlib import Path
from typing import Any

import pytest

from ds4.model_file import ModelFile
from tests.support.engine_rig import Client, EngineRig, run
from tests.support.request_mix import VOCAB_SIZE, prompt_of, sampling_of
from tests.support.tiny_model import write_tiny_model
from workers.devices.reference.device import ReferenceDevice
from workers.model.program import Program
from workers.model.registry import load_program

NUM_REQUESTS = 32
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path)
    return load_program(ModelFile.open(path))


def rig_of(directory: Path, program: Program, **sizes: Any) -> EngineRig:
    return EngineRig(
        directory,
        make_device=lambda limits: ReferenceDevice(program, limits),
        vocab_size=VOCAB_SIZE,
        slots=NUM_REQUESTS,
        **{"seats": NUM_REQUESTS, "rows": 64, "pages": 512, **sizes},
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


def test_the_model_says_different_things(alone: list[Client]) -> None:
    assert len({tuple(client.tokens) for client in alone}) > NUM_REQUESTS // 2


def test_a_request_is_the_same_alone_and_among_31_others(
    program: Program, alone: list[Client], tmp_path: Path
) -> None:
    async def test() -> None:
        async with rig_of(tmp_path, program).serving() as rig:
            clients = []
            for number in range(NUM_REQUESTS):
                clients.append(submit(rig, number))
                await rig.turn(number % 3)
            await rig.finish(*clients)
            for client, reference in zip(clients, alone, strict=True):
                assert client.events == reference.events  # bit for bit

    run(test())


def test_preemption_changes_no_sampled_token(program: Program, alone: list[Client], tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_of(tmp_path, program, pages=24, seats=8, context=128).serving() as rig:
            clients = [submit(rig, number) for number in range(NUM_REQUESTS)]
            await rig.finish(*clients)
            assert rig.metrics.value("ds4_num_preemptions_total") > 0
            for client, reference in zip(clients, alone, strict=True):
                # Not the events: a device of another size may sum in another order.
                assert client.tokens == reference.tokens

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
            for client, reference, cut in zip(clients, alone, cuts, strict=True):
                assert client.events == reference.events[cut:]

    run(test())
