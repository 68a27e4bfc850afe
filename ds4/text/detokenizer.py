"""Ids to text while they arrive, without ever showing half a character.

A character that the end of the output cuts off is not shown either, as in vLLM: clients put answers back into
a conversation, where U+FFFD would be a character that the model never wrote. Who wants the bytes gets them
with the log-probabilities.

Owns: `Detokenizer`. Runs in: front ends, one for each stream. Source: this project; the byte table
is exact for every script and costs a fraction of decoding a window of tokens again for each token.
"""

import codecs
from typing import Final

from ds4.text.tokenizer import Tokenizer

_Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One stream's unfinished character. Single owner: whoever reads that stream."""

    def __init__(
        self, tokenizer: Tokenizer, *, special: bool = False, shown: frozenset[int] = frozenset()
    ) -> None:
        """`special`: control tokens are text too; otherwise only those in `shown` are."""
        self._tokenizer = tokenizer
        self._texts = tokenizer.texts
        self._special = special
        self._shown = shown
        self._decoder = _Decoder("replace")
        self._is_whole = True  # no part of a character is held back

    def push(self, token_id: int) -> str:
        """The text that is complete now. U+FFFD stands only for bytes that no later byte can complete."""
        if self._is_whole and token_id < len(self._texts):
            text = self._texts[token_id]
            if text is not None:
                return text
        if not self._special and self._tokenizer.is_control(token_id) and token_id not in self._shown:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._is_whole = not self._decoder.getstate()[0]
        return text
