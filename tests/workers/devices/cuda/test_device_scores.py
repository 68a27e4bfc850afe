"""Scores of prompts on the CUDA device: rows of one sequence, each sampled on a seat that may be nobody's."""

from pathlib import Path

import numpy as np
import pytest

from ds4.generation import NO_LOGPROBS, FinishReason, SamplingParams
from tests.support.engine_rig import Client, EngineRig, run
from tests.support.request_mix import VOCAB_SIZE, prompt_of, sampling_of
from tests.support.tiny_model import TinyShape
from tests.workers.devices.cuda.rig import PROMPT, needs_compiler, new_backend, tiny_program
from workers.devices.cuda.device import CudaDevice
from workers.devices.interface import Device, Limits
from workers.devices.reference.device import ReferenceDevice
from workers.model.program import Program

pytestmark = needs_compiler

SEATS = 4
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return tiny_program(tmp_path_factory.mktemp("model"), "F32", TinyShape(num_layers=1))


def scored(rig: EngineRig, prompt: list[int], num_logprobs: int) -> Client:
    sampling = SamplingParams(temperature=0.0, num_logprobs=num_logprobs)
    return rig.submit(prompt, len(prompt) - 1, sampling=sampling, scores_prompt=True)


def generated(rig: EngineRig, number: int) -> Client:
    """Another request, which asks for no log-probabilities."""
    assert sampling_of(0).num_logprobs == NO_LOGPROBS
    return rig.submit(prompt_of(number), MAX_TOKENS, sampling=sampling_of(0))


def served(
    directory: Path, program: Program, *, on_reference: bool, num_others: int
) -> tuple[list[Client], list[Client]]:
    """Two prompts that are scored, among others that generate meanwhile, on few seats."""

    def make_device(limits: Limits) -> Device:
        if on_reference:
            return ReferenceDevice(program, limits)
        return CudaDevice(program, limits, new_backend(), batch_invariant=True)

    clients: list[Client] = []
    others: list[Client] = []

    async def test() -> None:
        rig = EngineRig(
            directory,
            make_device=make_device,
            vocab_size=VOCAB_SIZE,
            seats=SEATS,
            rows=16,
            pages=64,
            context=64,
        )
        async with rig.serving():
            clients.append(scored(rig, PROMPT, 2))
            for number in range(num_others):
                others.append(generated(rig, number))
                await rig.turn(2)
            clients.append(scored(rig, PROMPT[::-1], 0))
            await rig.finish(*clients, *others)

    run(test())
    return clients, others


@pytest.mark.parametrize("num_others", [0, 5])
def test_every_token_has_the_references_score(tmp_path: Path, program: Program, num_others: int) -> None:
    ours, others = served(tmp_path / "cuda", program, on_reference=False, num_others=num_others)
    expected, _ = served(tmp_path / "reference", program, on_reference=True, num_others=0)
    for client, oracle in zip(ours, expected, strict=True):
        assert client.end is not None
        assert client.end.reason is FinishReason.LENGTH
        assert client.tokens == oracle.tokens
        scores, wanted = ([event.logprob for event in events] for events in (client.events, oracle.events))
        assert max(wanted) < 0
        np.testing.assert_allclose(scores, wanted, atol=2e-2)
        best, wanted_best = (
            [event.top[0][1] if event.top else 0.0 for event in events]
            for events in (client.events, oracle.events)
        )
        np.testing.assert_allclose(best, wanted_best, atol=2e-2)
    assert [len(event.top) for event in ours[0].events] == [2] * (len(PROMPT) - 1)
    assert [len(other.tokens) for other in others] == [MAX_TOKENS] * num_others


def test_who_generates_meanwhile_changes_no_score(tmp_path: Path, program: Program) -> None:
    alone, _ = served(tmp_path / "alone", program, on_reference=False, num_others=0)
    among, _ = served(tmp_path / "among", program, on_reference=False, num_others=5)
    assert [client.events for client in alone] == [client.events for client in among]
