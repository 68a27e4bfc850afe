"""The ASGI application: routes, middleware, lifespan.

Owns: which path leads where. Runs in: front ends.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ds4.api.chat import chat_completions, chat_input_tokens
from ds4.api.completions import completions
from ds4.api.dialects import refusal
from ds4.api.door import Door
from ds4.api.errors import failure
from ds4.api.exchange import Endpoint, Exchange
from ds4.api.health import Health
from ds4.api.messages import count_tokens, messages
from ds4.api.middleware import Authenticate, Observe
from ds4.api.models import Models
from ds4.api.native import infill, native_completion
from ds4.api.openapi import OpenApi
from ds4.api.responses import StoredResponses, response_input_tokens, responses
from ds4.api.state import FrontState
from ds4.api.status import Status
from ds4.api.tokenize import TokenizerRoute, apply_template, detokenize, tokenize
from ds4.config import Settings
from ds4.errors import Ds4Error
from ds4.models import resolve_model

_OPENAI: Final = "/v1"

_Posts = tuple[tuple[str, Callable[[Exchange], Awaitable[None]]], ...]
# What takes a slot, and what does not.
_GENERATING: Final[_Posts] = (
    (_OPENAI + "/chat/completions", chat_completions),
    ("/chat/completions", chat_completions),
    (_OPENAI + "/completions", completions),
    ("/completions", completions),
    (_OPENAI + "/messages", messages),
    (_OPENAI + "/responses", responses),
    ("/responses", responses),
    ("/completion", native_completion),
    ("/infill", infill),
)
_OTHER_POSTS: Final[_Posts] = (
    (_OPENAI + "/chat/completions/input_tokens", chat_input_tokens),
    ("/chat/completions/input_tokens", chat_input_tokens),
    (_OPENAI + "/responses/input_tokens", response_input_tokens),
    ("/responses/input_tokens", response_input_tokens),
    (_OPENAI + "/messages/count_tokens", count_tokens),
    ("/tokenize", tokenize),
    ("/detokenize", detokenize),
    ("/apply-template", apply_template),
)


def create_app(settings: Settings, *, state: FrontState | None = None) -> Starlette:
    """The application. Without `state` it is built here and lives as long as the lifespan.

    Raises ConfigError, ModelFileError.
    """
    front = state or FrontState.build(settings, Path(resolve_model(settings.model, progress=False)))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await front.start()
        try:
            yield
        finally:
            await front.close()

    return Starlette(
        routes=_routes(front),
        middleware=_middleware(settings, front),
        exception_handlers={HTTPException: _on_error, Ds4Error: _on_error, Exception: _on_error},
        lifespan=lifespan,
    )


def _routes(state: FrontState) -> list[BaseRoute]:
    health, models, status = Health(state), Models(state), Status(state)
    gets: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", health.ready),
        (_OPENAI + "/health", health.ready),
        ("/health/live", health.live),
        ("/health/ready", health.ready),
        (_OPENAI + "/models", models.list),
        (_OPENAI + "/models/{name:path}", models.retrieve),
        ("/models", models.list),
        ("/models/{name:path}", models.retrieve),
        ("/metrics", status.metrics),
        ("/slots", status.slots),
        ("/props", status.props),
        ("/version", status.version),
        ("/tokenizer_info", TokenizerRoute(state).get),
        ("/openapi.json", OpenApi().get),
    ]
    stored = StoredResponses(state)
    one = _OPENAI + "/responses/{id}"
    return [
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets),
        Route(one + "/input_items", stored.input_items, methods=["GET"]),
        Route(one + "/cancel", stored.cancel, methods=["POST"]),
        Route(one, stored.by_method, methods=["GET", "DELETE"]),
        *(
            Route(path, Endpoint(state, answer), methods=["POST"], name=path)
            for path, answer in _GENERATING + _OTHER_POSTS
        ),
    ]


def _middleware(settings: Settings, state: FrontState) -> list[Middleware]:
    """Outermost first: even a refusal carries the request id and the CORS headers."""
    out = [Middleware(Observe, state=state)]
    if settings.cors:
        origins = [origin.strip() for origin in settings.cors.split(",") if origin.strip()]
        out.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
            )
        )
    if state.keys:
        out.append(Middleware(Authenticate, state=state, keys=state.keys))
    out.append(Middleware(Door, state=state, paths=[path for path, _ in _GENERATING]))
    return out


async def _on_error(request: Request, error: Exception) -> Response:
    return refusal(failure(error, request.scope.get("ds4.request_id", "")), request.scope)
