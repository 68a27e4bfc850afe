"""What the server tells of itself: health, slots, properties, version.

Owns: the names and shapes of these answers. Runs in: front ends. Source: llama-server's routes of the
same names.
"""

from typing import Any, Literal

import msgspec

from ds4.generation import ModelInfo
from ds4.protocol.common import SamplingDefaults


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """All is well; whatever else is an error."""

    status: Literal["ok"] = "ok"


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of the ring."""

    id: int
    front_end: int
    state: str
    is_processing: bool
    n_prompt_tokens: int
    n_cached_tokens: int
    n_decoded: int


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/slots`."""

    decode_pending: int
    num_running: int
    slots: list[SlotView]


class WorkerProps(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker says of the model and itself."""

    architecture: str
    vocab_size: int
    max_context_tokens: int
    tokenizer_hash: str
    device: str
    batched_sessions: int
    num_pages: int
    page_tokens: int


def worker_props(info: ModelInfo) -> WorkerProps:
    """The same, as it goes out."""
    return WorkerProps(**{name: getattr(info, name) for name in WorkerProps.__struct_fields__})


class DefaultSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that names nothing gets, where llama-server's clients look for it."""

    n_ctx: int
    params: SamplingDefaults


class Modalities(msgspec.Struct, frozen=True, kw_only=True):
    """What the model takes beside text."""

    vision: Literal[False] = False
    audio: Literal[False] = False


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/props`: the settings in force, secrets left out, and the model."""

    model_alias: str
    model_path: str
    n_ctx: int
    total_slots: int
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities = Modalities()
    build_info: str
    default_generation_settings: DefaultSettings
    settings: dict[str, Any]
    worker: WorkerProps | None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/version`."""

    version: str
    name: Literal["ds4-server"] = "ds4-server"
