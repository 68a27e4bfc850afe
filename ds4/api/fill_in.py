"""`suffix`: filling in what belongs between two texts.

Owns: which tokens a model has for it, and the prompt they make. Runs in: front ends. Source: the GGUF
keys that llama.cpp's converter writes, the older names among them.
"""

from typing import Final

from ds4.api.state import ServedModel
from ds4.errors import RequestError

_KEYS: Final = (
    ("fim_pre_token_id", "prefix_token_id"),
    ("fim_suf_token_id", "suffix_token_id"),
    ("fim_mid_token_id", "middle_token_id"),
)


def fill_in_ids(model: ServedModel, before: list[int], suffix: str, param: str = "suffix") -> list[int]:
    """The prompt that asks for what is missing between.

    Raises RequestError naming `param` where the model cannot.
    """
    marks = []
    for names in _KEYS:
        found = [model.file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
        marks += [mark for mark in found if isinstance(mark, int)][:1]
    if len(marks) < len(_KEYS) or not all(0 <= mark < model.vocabulary.size for mark in marks):
        raise RequestError(
            f"{param}: this model has no tokens for filling in", param=param, code="unsupported_parameter"
        )
    model.refuse_absurd(suffix, param)
    after = model.tokenizer.encode(suffix, add_special=False, parse_special=False)
    bos = before[:1] if before[:1] == [model.tokenizer.bos_id] else []
    return [*bos, marks[0], *before[len(bos) :], marks[1], *after, marks[2]]
