"""Which dialect a path speaks, and its form of an error.

Owns: the Anthropic error envelope, the choice between it and OpenAI's, and what a field of chat is called
in a dialect that is translated into chat. Runs in: front ends. Source: the
Anthropic API reference. The table from exceptions to statuses is ds4/api/errors.py; here each status
only gets Anthropic's name.
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from ds4.api.errors import Failure
from ds4.protocol.anthropic_messages import ErrorBody, ErrorDetail

_MESSAGES: Final = "/v1/messages"
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}
# Fields of chat, the longest names first, and where their values came from.
_RESPONSES_NAMES: Final[Sequence[tuple[str, str]]] = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("thinking", "reasoning"),
    ("max_tokens", "max_output_tokens"),
)
_MESSAGES_NAMES: Final[Sequence[tuple[str, str]]] = (
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("stop", "stop_sequences"),
)
_FUNCTION: Final = re.compile(r"^(tools\[\d+\])\.function(?=\.|$)")
_OVERLOADED: Final = 529  # Anthropic's own status; its clients know it as "try again"


def is_anthropic(path: str) -> bool:
    """Whether this path is one of Anthropic's."""
    return path == _MESSAGES or path.startswith(_MESSAGES + "/")


def anthropic_error(told: Failure, request_id: str) -> ErrorBody:
    """What Anthropic's clients are told."""
    detail = told.body.error
    return ErrorBody(
        ErrorDetail(
            type=_KINDS.get(_anthropic_status(told), "invalid_request_error"),
            message=detail.message,
            n_prompt_tokens=detail.n_prompt_tokens,
            n_ctx=detail.n_ctx,
        ),
        request_id or None,
    )


def refusal(told: Failure, scope: Scope) -> Response:
    """The HTTP answer, in the dialect of the path that was asked for."""
    told = _renamed(told, scope["path"])
    if not is_anthropic(scope["path"]):
        return told.response()
    body = msgspec.json.encode(anthropic_error(told, scope.get("ds4.request_id", "")))
    return Response(body, _anthropic_status(told), headers=told.headers, media_type="application/json")


def _renamed(told: Failure, path: str) -> Failure:
    """The same, with the client's own name for the field."""
    detail = told.body.error
    if is_anthropic(path):
        names = _MESSAGES_NAMES
    elif path.endswith(("/responses", "/responses/input_tokens")):
        names = _RESPONSES_NAMES
    else:
        return told
    if detail.param is None:
        return told
    param = _FUNCTION.sub(r"\1", detail.param)
    for chats, ours in names:
        if param == chats or param.startswith((chats + ".", chats + "[")):
            param = ours + param[len(chats) :]
            break
    message = detail.message.replace(detail.param, param, 1)
    detail = msgspec.structs.replace(detail, param=param, message=message)
    return msgspec.structs.replace(told, body=msgspec.structs.replace(told.body, error=detail))


def _anthropic_status(told: Failure) -> int:
    return _OVERLOADED if told.status == 503 else told.status
