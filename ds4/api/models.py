"""`GET /v1/models`, `/v1/models/{id}`.

Owns: these routes. Runs in: front ends. Source: the OpenAI API reference; `context_length`,
`max_completion_tokens` (OpenRouter, the C server), `max_model_len` (vLLM) and `meta` (llama-server) are extensions; `type`,
`display_name`, `created_at` and the list's paging fields make Anthropic's clients read the same answer.
"""

from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ds4.api.documents import document
from ds4.api.errors import NotFoundError
from ds4.api.state import FrontState


class ModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says of itself."""

    architecture: str
    name: str
    n_vocab: int
    n_ctx_train: int


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One name the model answers to."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = "ds4-server"
    context_length: int
    max_model_len: int
    max_completion_tokens: int
    meta: ModelMeta


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class Models:
    """The routes."""

    def __init__(self, state: FrontState) -> None:
        self._state = state

    async def list(self, request: Request) -> Response:
        """Every name."""
        names = self._state.model.names
        cards = [self._card(name) for name in names]
        return document(ModelList(data=cards, first_id=names[0], last_id=names[-1]))

    async def retrieve(self, request: Request) -> Response:
        """One name. Raises NotFoundError."""
        name = str(request.path_params["name"])
        if name not in self._state.model.names:
            raise NotFoundError(
                f"the model {name[:200]!r} does not exist", param="model", code="model_not_found"
            )
        return document(self._card(name))

    def _card(self, name: str) -> ModelCard:
        model, limit = self._state.model, self._state.max_context_tokens
        return ModelCard(
            id=name,
            display_name=model.file.name or name,
            created=model.created,
            created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            context_length=limit,
            max_model_len=limit,
            max_completion_tokens=min(model.defaults.max_tokens or limit, limit),
            meta=ModelMeta(
                architecture=model.file.architecture,
                name=model.file.name,
                n_vocab=model.vocabulary.size,
                n_ctx_train=model.file.max_context_tokens,
            ),
        )
