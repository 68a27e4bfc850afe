"""ds4/api/dialects.py: an error speaks of the fields that the client sent."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.front_rig import Front, with_front

_BAD_SCHEMA: dict[str, Any] = {"type": "array", "uniqueItems": True}
_INPUT = {"input": "hello"}
_MESSAGES = {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
_FORMAT = {"type": "json_schema", "name": "x", "schema": _BAD_SCHEMA}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {**_INPUT, "text": {"format": _FORMAT}}, "text.format.schema"),
        ("/responses", {**_INPUT, "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ("/v1/responses", {**_INPUT, "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/responses", {**_INPUT, "max_output_tokens": 0}, "max_output_tokens"),
        (
            "/v1/responses",
            {**_INPUT, "tools": [{"type": "function", "name": "f", "parameters": 5}]},
            "tools[0].parameters",
        ),
        ("/v1/messages", {**_MESSAGES, "output_config": {"format": _FORMAT}}, "output_config.format.schema"),
        ("/v1/messages", {**_MESSAGES, "output_config": {"effort": "low"}}, "output_config.effort"),
        ("/v1/chat/completions", {**_MESSAGES, "reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_an_error_names_the_field_of_its_dialect(
    tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.post(path, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error.get("param", param) == param
        assert param in error["message"]
        assert "response_format" not in error["message"]

    with_front(tmp_path, scenario)
