"""The OpenAI Python client's Responses against a real server with two front ends."""

import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.server import DEADLINE_S, Server, serving

pytestmark = pytest.mark.e2e


@pytest.fixture
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tiny_server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S
    ) as made:
        yield made


def test_a_response_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    extra = {"seed": 5}
    whole = client.responses.create(model="m", input="hello", max_output_tokens=40, extra_body=extra)
    assert whole.output_text
    kinds = []
    with client.responses.stream(model="m", input="hello", max_output_tokens=40, extra_body=extra) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type in ("response.completed", "response.incomplete"):
                last = event.response
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert last.output_text == whole.output_text
    assert last.status == whole.status
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_every_front_end_knows_every_stored_response(client: openai.OpenAI, tiny_server: Server) -> None:
    first = client.responses.create(model="m", input="hello", max_output_tokens=5, metadata={"a": "b"})
    for _ in range(8):  # a connection each, so that both front ends get some
        with openai.OpenAI(
            base_url=f"{tiny_server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S
        ) as other:
            found = other.responses.retrieve(first.id)
            assert found.output_text == first.output_text
            assert found.metadata == {"a": "b"}
            other.responses.create(model="m", input="and", max_output_tokens=2, previous_response_id=first.id)
    (item,) = client.responses.input_items.list(first.id).data
    assert item.type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_conversation_goes_on_after_the_server_was_started_again(tiny_model: Path, tmp_path: Path) -> None:
    def client_of(server: Server) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S)

    arguments = ("--shared-dir", str(tmp_path / "shared"), "--front-ends", "1", "--device", "reference")
    with serving(tiny_model, *arguments) as server, client_of(server) as client:
        first = client.responses.create(model="m", input="hello", max_output_tokens=5)
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    assert [entry.name for entry in (tmp_path / "shared").iterdir()] == ["responses.sqlite"]
    with serving(tiny_model, *arguments) as server, client_of(server) as client:
        assert client.responses.retrieve(first.id).output_text == first.output_text
        onward = client.responses.create(
            model="m", input="and", max_output_tokens=2, previous_response_id=first.id
        )
        assert onward.usage is not None
        assert first.usage is not None
        assert onward.usage.input_tokens > first.usage.input_tokens


def test_errors_are_the_exceptions_that_programs_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="word " * 30_000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model="m", input="x", previous_response_id="resp_none")
    assert unknown.value.code == "previous_response_not_found"
