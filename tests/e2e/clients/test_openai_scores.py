"""Prompt log-probabilities through the OpenAI client, as evaluation harnesses ask for them."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.server import DEADLINE_S, Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tiny_server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S
    ) as made:
        yield made


def test_what_was_generated_scores_as_it_did_when_it_was(client: openai.OpenAI) -> None:
    prompt = list(range(20, 60))
    made = client.completions.create(
        model="m",
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        logprobs=2,
        logit_bias={"100": 100},
        extra_body={"ignore_eos": True},
    ).choices[0]
    assert made.logprobs is not None
    again = [100] * 8  # the bias draws it every time, and log-probabilities are the model's own
    for max_tokens in (0, 1):
        scored = client.completions.create(
            model="m", prompt=prompt + again, max_tokens=max_tokens, temperature=0, logprobs=2, echo=True
        ).choices[0]
        assert scored.logprobs is not None
        found = scored.logprobs.token_logprobs
        assert found is not None
        assert repr(found[0]) == "None"  # which the client's types do not know of
        rest = found[1 : len(prompt) + 8]
        assert rest[-8:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-4)
        assert len(found) == len(prompt) + 8 + max_tokens
        assert all(value <= 0 for value in rest)
