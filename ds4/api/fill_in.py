"""`suffix` and `/infill`: filling in what belongs between two texts.

Owns: which tokens a model has for it, and the prompt they make. Runs in: front ends. Source: the GGUF
keys that llama.cpp's converter writes, the older names among them; other files as llama-server shows them.
"""

from collections.abc import Sequence
from typing import Final

from ds4.api.state import ServedModel
from ds4.errors import RequestError

_KEYS: Final = (
    ("fim_pre_token_id", "prefix_token_id"),
    ("fim_suf_token_id", "suffix_token_id"),
    ("fim_mid_token_id", "middle_token_id"),
)
_FILE: Final = ("fim_sep_token_id",)
_SNIPPET: Final = "\n\n--- snippet ---\n\n"  # where there is no token for a file


def fill_in_ids(
    model: ServedModel,
    before: list[int],
    suffix: str,
    param: str = "suffix",
    files: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The prompt that asks for what is missing between. `files`: names and texts that are shown first.

    Raises RequestError naming `param` where the model cannot.
    """
    marks = [mark for names in _KEYS if (mark := _mark(model, names)) is not None]
    if len(marks) < len(_KEYS):
        raise RequestError(
            f"{param}: this model has no tokens for filling in", param=param, code="unsupported_parameter"
        )
    model.refuse_absurd(suffix, param)
    bos = before[:1] if before[:1] == [model.tokenizer.bos_id] else []
    shown = [token_id for name, text in files for token_id in _file_ids(model, name, text)]
    return [*bos, *shown, marks[0], *before[len(bos) :], marks[1], *_ids(model, suffix), marks[2]]


def _mark(model: ServedModel, names: Sequence[str]) -> int | None:
    """The first of these tokens that the model has."""
    found = (model.file.metadata.get(f"tokenizer.ggml.{name}") for name in names)
    mark = next((each for each in found if isinstance(each, int)), None)
    return mark if mark is not None and 0 <= mark < model.vocabulary.size else None


def _file_ids(model: ServedModel, name: str, text: str) -> list[int]:
    separator = _mark(model, _FILE)
    if separator is None:
        return _ids(model, _SNIPPET + text)
    return [separator, *_ids(model, name + "\n"), *_ids(model, text)]


def _ids(model: ServedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special=False, parse_special=False)
