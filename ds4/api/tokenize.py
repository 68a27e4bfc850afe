"""`POST /tokenize`, `/detokenize`, `/apply-template`, `GET /tokenizer_info`.

Owns: these routes; they never reach the worker. Runs in: front ends. Source: llama-server;
vLLM for `/tokenizer_info`, by which evaluation harnesses find that they may tokenize here.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ds4.api.documents import document
from ds4.api.exchange import Exchange
from ds4.api.rendering import render
from ds4.api.state import FrontState, ServedModel
from ds4.errors import RequestError
from ds4.protocol.common import check_token_ids
from ds4.protocol.openai_chat import conversation, decode_chat
from ds4.protocol.tokens import (
    DetokenizeAnswer,
    TemplateAnswer,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
    TokenPiece,
    decode_detokenize,
    decode_tokenize,
)


class TokenizerRoute:
    """`GET /tokenizer_info`."""

    def __init__(self, state: FrontState) -> None:
        self._state = state

    async def get(self, request: Request) -> Response:
        """The special tokens and the template."""
        model = self._state.model
        tokenizer = model.tokenizer
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
        return document(
            TokenizerInfo(
                tokenizer_class="GGUF",
                bos_token=None if bos_id is None else tokenizer.token_text(bos_id),
                eos_token=None if eos_id is None else tokenizer.token_text(eos_id),
                add_bos_token=tokenizer.add_bos,
                model_max_length=self._state.max_context_tokens,
                chat_template=model.file.chat_template,
            )
        )


async def tokenize(exchange: Exchange) -> None:
    """Text to ids."""
    state = exchange.state
    await exchange.answer(lambda body: _tokenize(state.model, body, state.max_context_tokens))


async def detokenize(exchange: Exchange) -> None:
    """Ids to text."""
    model = exchange.state.model
    await exchange.answer(lambda body: _detokenize(model, body))


async def apply_template(exchange: Exchange) -> None:
    """Messages to the text that the model would see."""
    model = exchange.state.model
    await exchange.answer(lambda body: _apply_template(model, body))


def _tokenize(model: ServedModel, body: bytes, max_context_tokens: int) -> TokenizeAnswer:
    request = decode_tokenize(body)
    ids = _ids(model, request, body)
    tokens: list[int | TokenPiece] = [*ids]
    if request.with_pieces:
        tokens = [TokenPiece(token_id, _piece(model, token_id)) for token_id in ids]
    texts = [model.tokenizer.token_text(token_id) for token_id in ids] if request.return_token_strs else None
    return TokenizeAnswer(
        tokens=tokens,
        count=len(ids),
        max_model_len=max_context_tokens,
        token_strs=msgspec.UNSET if texts is None else texts,
    )


def _ids(model: ServedModel, request: TokenizeRequest, body: bytes) -> list[int]:
    tokenizer = model.tokenizer
    if request.messages is not None:
        return tokenizer.encode_rendered(render(model, conversation(decode_chat(body))))
    text = request.content if request.content is not None else request.prompt
    if text is None:
        raise RequestError("content is required", param="content", code="missing_required_parameter")
    wishes = (request.add_special, request.add_special_tokens)
    # Who sends nothing else gets what its own server does: llama-server adds none, vLLM does.
    adds = next((wish for wish in wishes if wish is not None), request.content is None)
    return tokenizer.encode(text, add_special=adds, parse_special=request.parse_special is not False)


def _piece(model: ServedModel, token_id: int) -> str | list[int]:
    raw = model.tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


def _detokenize(model: ServedModel, body: bytes) -> DetokenizeAnswer:
    request = decode_detokenize(body)
    check_token_ids("tokens", request.tokens, model.vocabulary.size)
    text = model.tokenizer.decode(request.tokens, special=True)
    return DetokenizeAnswer(content=text, prompt=text)


def _apply_template(model: ServedModel, body: bytes) -> TemplateAnswer:
    request = decode_chat(body)
    return TemplateAnswer(model.template.display(render(model, conversation(request))))
