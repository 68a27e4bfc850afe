"""Grammars in the engine, with a real model on the reference device: what is constrained, and what is not."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ds4.errors import ErrorCode
from ds4.generation import MAX_GRAMMAR_BYTES, FinishReason, SamplingParams
from ds4.grammar_library import GrammarVocabulary
from ds4.model_file import ModelFile
from ds4.text.grammar import GrammarSource, grammar_of
from ds4.text.tokenizer import Tokenizer
from tests.support import schemas
from tests.support.engine_rig import Client, EngineRig, fields_of, run
from tests.support.tiny_model import vocabulary, write_tiny_model
from workers.devices.reference.device import ReferenceDevice
from workers.model.registry import load_program
from workers.sampling.grammar import Grammars

VOCAB_SIZE = len(vocabulary())
NUM_REQUESTS = 12
MAX_TOKENS = 200


class Model:
    """The tiny model's parts, made once."""

    def __init__(self, path: Path) -> None:
        write_tiny_model(path)
        file = ModelFile.open(path)
        self.program = load_program(file)
        self.tokenizer = Tokenizer.from_model(file)
        self.grammars = Grammars(GrammarVocabulary.of_model(file))
        self.ends = tuple(sorted(self.tokenizer.end_ids))

    def rig(self, directory: Path, **sizes: Any) -> EngineRig:
        return EngineRig(
            directory,
            make_device=lambda limits: ReferenceDevice(self.program, limits),
            vocab_size=VOCAB_SIZE,
            slots=2 * NUM_REQUESTS,
            **{"seats": 2 * NUM_REQUESTS, "rows": 64, "pages": 512, "grammars": self.grammars, **sizes},
        )

    def text(self, client: Client) -> str:
        return self.tokenizer.decode(client.tokens, special=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def sampling_of(number: int) -> SamplingParams:
    if number % 4 == 0:
        return SamplingParams(temperature=0.0)
    return SamplingParams(
        temperature=1.0,
        top_k=50 if number % 4 == 1 else 0,
        top_p=0.9 if number % 4 == 2 else 1.0,
        repetition_penalty=1.1,
        logit_bias=((50, -100.0), (51, 5.0)) if number % 4 == 3 else (),
        seed=number,
        num_logprobs=2 if number % 3 == 0 else -1,
    )


def constrained(rig: EngineRig, model: Model, number: int, delivered: tuple[int, ...] = ()) -> Client:
    fields: dict[str, Any] = {
        "grammar": schemas.grammar(schemas.ALL[number % len(schemas.ALL)]),
        "stop_token_ids": model.ends,
        "sampling": sampling_of(number),
        "min_tokens": 30 if number % 5 == 4 else 0,
    }
    prompt = [5 + number, 9, 13 + 2 * number, *delivered]
    return rig.submit(prompt, MAX_TOKENS, num_resumed_tokens=len(delivered), **fields)


def free(rig: EngineRig, number: int) -> Client:
    return rig.submit([7, 11 + number, 30], 24, sampling=sampling_of(number))


@pytest.fixture(scope="module")
def alone(model: Model, tmp_path_factory: pytest.TempPathFactory) -> list[Client]:
    """Every constrained request by itself."""
    clients: list[Client] = []

    async def test() -> None:
        async with model.rig(tmp_path_factory.mktemp("alone")).serving() as rig:
            for number in range(NUM_REQUESTS):
                await rig.finish(client := constrained(rig, model, number))
                clients.append(client)

    run(test())
    return clients


def test_every_output_ends_and_is_valid_under_its_schema(model: Model, alone: list[Client]) -> None:
    for number, client in enumerate(alone):
        assert fields_of(client.end)["reason"] == FinishReason.STOP
        schemas.check(model.text(client), schemas.ALL[number % len(schemas.ALL)])
    assert len({model.text(client) for client in alone}) > NUM_REQUESTS // 2


def test_constrained_and_free_requests_do_not_change_each_other(
    model: Model, alone: list[Client], tmp_path: Path
) -> None:
    async def test() -> None:
        async with model.rig(tmp_path).serving() as rig:
            reference = []
            for number in range(NUM_REQUESTS):
                await rig.finish(client := free(rig, number))
                reference.append(client)
            mixed = []
            for number in range(NUM_REQUESTS):
                mixed.append((constrained(rig, model, number), free(rig, number)))
                await rig.turn(number % 3)
            await rig.finish(*(client for pair in mixed for client in pair))
            for number, (bound, unbound) in enumerate(mixed):
                assert bound.events == alone[number].events
                assert unbound.events == reference[number].events

    run(test())


def test_a_resumed_request_goes_on_in_the_middle_of_its_grammar(
    model: Model, alone: list[Client], tmp_path: Path
) -> None:
    async def test() -> None:
        async with model.rig(tmp_path).serving() as rig:
            cuts = [1 + number * 5 % len(client.tokens) for number, client in enumerate(alone)]
            clients = [
                constrained(rig, model, number, tuple(alone[number].tokens[:cut]))
                for number, cut in enumerate(cuts)
            ]
            await rig.finish(*clients)
            for client, reference, cut in zip(clients, alone, cuts, strict=True):
                assert client.tokens == reference.tokens[cut:]

    run(test())


def test_preemption_keeps_the_place_in_the_grammar(model: Model, alone: list[Client], tmp_path: Path) -> None:
    async def test() -> None:
        async with model.rig(tmp_path, pages=16, seats=8, context=256).serving() as rig:
            clients = [constrained(rig, model, number) for number in range(NUM_REQUESTS)]
            await rig.finish(*clients)
            assert rig.metrics.value("ds4_num_preemptions_total") > 0
            for client, reference in zip(clients, alone, strict=True):
                assert client.tokens == reference.tokens

    run(test())


LONG_NAMES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a_property_of_a_rather_long_name": {"type": "boolean"},
        "another_of_them": {"enum": ["with one long value", "or maybe this one, which is longer"]},
    },
    "required": ["a_property_of_a_rather_long_name", "another_of_them"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("max_tokens", "window"), [(MAX_TOKENS, 512), (MAX_TOKENS, 3), (10, 512), (30, 3)])
def test_what_is_forced_takes_no_steps_and_changes_no_token(
    model: Model, tmp_path: Path, max_tokens: int, window: int
) -> None:
    """Log-probabilities need every draw, so who asks for them gets the same in more steps."""

    async def outputs(rig: EngineRig, num_logprobs: int) -> list[Client]:
        clients = [
            rig.submit(
                [5 + number, 9, 31],
                max_tokens,
                grammar=schemas.grammar(LONG_NAMES),
                stop_token_ids=model.ends,
                sampling=msgspec.structs.replace(sampling_of(number), num_logprobs=num_logprobs),
            )
            for number in range(6)
        ]
        await rig.finish(*clients)
        return clients

    async def test() -> None:
        async with model.rig(tmp_path, seats=4, pages=40, context=160, window=window).serving() as rig:
            skipping = await outputs(rig, -1)
            num_skipping, _ = rig.metrics.samples("ds4_step_time_seconds")
            drawing = await outputs(rig, 0)
            assert [client.tokens for client in skipping] == [client.tokens for client in drawing]
            assert [fields_of(client.end)["reason"] for client in skipping] == [
                fields_of(client.end)["reason"] for client in drawing
            ]
            num_steps, _ = rig.metrics.samples("ds4_step_time_seconds")
            assert num_skipping < (num_steps - num_skipping) * 0.7
            if max_tokens == MAX_TOKENS:
                for client in skipping:
                    schemas.check(model.text(client), LONG_NAMES)
            else:
                assert {len(client.tokens) for client in skipping} == {max_tokens}

    run(test())


def test_an_end_that_is_held_back_comes_where_nothing_else_may(model: Model, tmp_path: Path) -> None:
    async def test() -> None:
        grammar = grammar_of(GrammarSource("choice", '["ab", "abc"]'))
        async with model.rig(tmp_path).serving() as rig:
            short, long = (
                rig.submit(
                    [5], 50, grammar=grammar, stop_token_ids=model.ends, min_tokens=count, sampling=sampling
                )
                for count, sampling in (
                    (
                        0,
                        SamplingParams(temperature=0.0, logit_bias=tuple((end, 100.0) for end in model.ends)),
                    ),
                    (50, SamplingParams(temperature=0.0)),
                )
            )
            await rig.finish(short, long)
            assert (model.text(short), model.text(long)) == ("ab", "abc")
            assert fields_of(long.end)["reason"] == FinishReason.STOP

    run(test())


def test_cancelled_in_every_state_it_leaves_nothing(model: Model, tmp_path: Path) -> None:
    async def test() -> None:
        async with model.rig(tmp_path).serving() as rig:
            for turns in (0, 1, 2, 5, 12):
                client = constrained(rig, model, 2)
                await rig.turn(turns)
                client.stream.cancel()
                await rig.finish(client)
                assert fields_of(client.end)["reason"] == FinishReason.CANCELLED
            assert not rig.engine._compiling

    run(test())


@pytest.mark.parametrize(
    ("grammar", "delivered"),
    [("start: undefined", ()), ("%json {", ()), (grammar_of(GrammarSource("choice", '["ab"]')), (60, 61))],
)
def test_a_grammar_that_cannot_work_ends_its_request_alone(
    model: Model, tmp_path: Path, grammar: str, delivered: tuple[int, ...]
) -> None:
    async def test() -> None:
        async with model.rig(tmp_path).serving() as rig:
            other = free(rig, 1)
            bad = rig.submit(
                [5, *delivered],
                50,
                grammar=grammar,
                stop_token_ids=model.ends,
                num_resumed_tokens=len(delivered),
            )
            await rig.finish(other, bad)
            assert fields_of(bad.end)["error_code"] == ErrorCode.GRAMMAR
            assert fields_of(bad.end)["error_text"]
            assert fields_of(other.end)["reason"] == FinishReason.LENGTH

    run(test())


def test_a_grammar_that_fails_on_the_way_ends_its_row_alone(model: Model, tmp_path: Path) -> None:
    # A vocabulary without a "z": what this grammar wants after its first letter nobody can write.
    tokens = [each.replace(b"z", b"") for each in map(model.tokenizer.token_bytes, range(VOCAB_SIZE))]
    without_z = GrammarVocabulary(tokens, special_ids=[0, 1, 2], end_ids=model.ends, vocab_size=VOCAB_SIZE)

    async def test() -> None:
        async with model.rig(tmp_path, grammars=Grammars(without_z)).serving() as rig:
            prompt = [5 + number for number in range(40)]
            bad = rig.submit(prompt, 50, grammar='start: "az"', stop_token_ids=model.ends)
            good = constrained(rig, model, 3)
            await rig.finish(bad, good)
            assert model.text(bad) == "a"
            await rig.finish(same := rig.submit(prompt, 1))
            assert fields_of(same.end)["num_cached_tokens"] == 32  # its keys and values were in order
            assert fields_of(bad.end)["error_code"] == ErrorCode.GRAMMAR
            schemas.check(model.text(good), schemas.ALL[1])

    run(test())


def test_what_no_front_end_would_send_is_refused(model: Model, tmp_path: Path) -> None:
    grammar = schemas.grammar(schemas.PERSON)

    async def test() -> None:
        async with model.rig(tmp_path / "with").serving() as rig:
            endless = rig.submit([5], grammar=grammar)
            huge = rig.submit([5], grammar="x" * (MAX_GRAMMAR_BYTES + 1), stop_token_ids=model.ends)
            await rig.finish(endless, huge)
            for client in (endless, huge):
                assert fields_of(client.end)["error_code"] == ErrorCode.INVALID_REQUEST
        async with model.rig(tmp_path / "without", grammars=None).serving() as rig:
            lost = rig.submit([5], grammar=grammar, stop_token_ids=model.ends)
            await rig.finish(lost)
            assert fields_of(lost.end)["error_code"] == ErrorCode.INVALID_REQUEST

    for name in ("with", "without"):
        (tmp_path / name).mkdir(mode=0o700)
    run(test())
