"""Random outputs under a grammar, over a small vocabulary of bytes, words and control tokens.

Owns: nothing; functions of their arguments. Runs in: tests. Every output ends, because it is steered
towards what closes strings and brackets once it has become long.
"""

import functools
from typing import Final

import numpy as np

from ds4.grammar_library import GrammarVocabulary

END: Final = 256
# Markers that are one control token in this vocabulary.
CONTROLS: Final = (
    "[TOOL_CALLS]",
    "<|tool_call_begin|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
)
CONTROL_IDS: Final = {text: 257 + index for index, text in enumerate(CONTROLS)}
_WORDS: Final = (b'{"name"', b'"arguments":', b"<tool_call>", b"</tool_call>", b"</think>", b"\xc3\xa9")
TOKENS: Final = [bytes([byte]) for byte in range(256)] + [b"</s>", *map(str.encode, CONTROLS), *_WORDS]
_LONG: Final = 150  # tokens
_CLOSING: Final = [ord(each) for each in '"}]) \n,:'] + [TOKENS.index(b"</think>")]


@functools.cache
def vocabulary() -> GrammarVocabulary:
    """The vocabulary, made once."""
    special = [END, *CONTROL_IDS.values()]
    return GrammarVocabulary(TOKENS, special_ids=special, end_ids=[END], vocab_size=len(TOKENS))


def random_output(grammar: str, seed: int) -> str:
    """A text that the grammar allows to end. Fails where it does not come to an end."""
    matcher = vocabulary().compile(grammar)
    random = np.random.default_rng(seed)
    output: list[int] = []
    for _ in range(4000):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        closing = np.intersect1d(allowed, [END, *_CLOSING]) if len(output) > _LONG else allowed[:0]
        token_id = int(random.choice(closing if len(closing) else allowed))
        if token_id == END:
            return b"".join(TOKENS[each] for each in output).decode()
        output.append(token_id)
        assert matcher.consume_token(token_id)
    raise AssertionError("no end")
