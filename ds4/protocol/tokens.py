"""`/tokenize`, `/detokenize`, `/tokenizer_info`, `/apply-template` and token counts on the wire.

Owns: the names and shapes of these routes. Runs in: front ends. Source: llama-server's routes of the
same names; `prompt` for `content`, `add_special_tokens` and `/tokenizer_info` are vLLM's.
"""

from typing import Any, Final

import msgspec

from ds4.protocol.common import decode_body


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/tokenize`: llama-server's `content`, or vLLM's `prompt` or `messages`.

    `messages` come with all that shapes a chat's prompt; see ds4/protocol/openai_chat.py.
    """

    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class TokenCount(msgspec.Struct, frozen=True):
    """How long a prompt is: the answer of `/v1/messages/count_tokens` and `/v1/chat/completions/input_tokens`."""

    input_tokens: int


class TokenPiece(msgspec.Struct, frozen=True):
    """A token with what it stands for: text, or its bytes where they are no text of their own."""

    id: int
    piece: str | list[int]


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenize`."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/detokenize`."""

    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`, under both names that clients read."""

    content: str
    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenizer_info`: what clients need that count and cut prompts by our ids."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None


class TemplateAnswer(msgspec.Struct, frozen=True):
    """The answer of `/apply-template`."""

    prompt: str


_tokenize: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize: Final = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """The body of `/tokenize`. Raises RequestError."""
    return decode_body(_tokenize, body)


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """The body of `/detokenize`. Raises RequestError."""
    return decode_body(_detokenize, body)
