"""Fields that clients of other servers send, that would change the answer, and that nobody honours here.

Owns: their names, and the values at which each changes nothing. Runs in: front ends. Source: the OpenAI
API reference, and the documentation of llama-server, vLLM, SGLang and TGI.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from ds4.errors import RequestError
from ds4.protocol.structured import StructureFields

# Declared fields that would change the output, and the values at which they do not. None never does.
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "adaptive_target": (-1, -1.0),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "ebnf": ("",),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": ("",),
    "image_data": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora": ([],),
    "max_new_tokens": (),
    "min_keep": (0, 1),
    "min_length": (0,),
    "mirostat": (0,),
    "modalities": (["text"], []),
    "n_indent": (0,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "prompt_logprobs": (),
    "reasoning_budget_message": ("",),
    "reasoning_format": ("auto", "deepseek"),
    "regex": ("",),
    "repetition_detection": (),
    "return_logprob": (False,),
    "return_progress": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "samplers": ([],),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "stop_regex": ("", []),
    "suffix": ("",),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1, 1.0),
    "thinking": (False, {"type": "disabled"}),
    "thinking_forced_open": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "xtc_probability": (0, 0.0),
}


class RefusedFields(StructureFields, frozen=True, kw_only=True):
    """The body fields. A route that takes one itself declares it again. Built by decoding only."""

    adaptive_target: Any = None
    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    detokenize: Any = None
    documents: Any = None
    dry_multiplier: Any = None
    dynatemp_range: Any = None
    ebnf: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    guided_whitespace_pattern: Any = None
    image_data: Any = None
    include_reasoning: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    lora: Any = None
    max_new_tokens: Any = None
    min_keep: Any = None
    min_length: Any = None
    mirostat: Any = None
    modalities: Any = None
    n_indent: Any = None
    n_probs: Any = None
    no_stop_trim: Any = None
    num_beams: Any = None
    parse_tool_calls: Any = None
    post_sampling_probs: Any = None
    prompt_logprobs: Any = None
    reasoning_budget_message: Any = None
    reasoning_format: Any = None
    regex: Any = None
    repetition_detection: Any = None
    return_logprob: Any = None
    return_progress: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    samplers: Any = None
    separate_reasoning: Any = None
    skip_special_tokens: Any = None
    stop_regex: Any = None
    suffix: Any = None
    t_max_predict_ms: Any = None
    tfs_z: Any = None
    thinking: Any = None
    thinking_forced_open: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_a: Any = None
    top_n_sigma: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    xtc_probability: Any = None


def refuse_unsupported(fields: RefusedFields, honoured: Collection[str] = ()) -> None:
    """Raises RequestError for a field that would change the output and has no effect here.

    `honoured`: those that the route takes itself.
    """
    for name, neutral in _REFUSED.items():
        value = getattr(fields, name) if name not in honoured else None
        # The type too: False must not pass where 0 is neutral.
        if value is not None and not any(value == each and type(value) is type(each) for each in neutral):
            raise RequestError(
                f"{name} is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )
