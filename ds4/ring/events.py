"""Event records: what the worker tells a front end, four words each.

Owns: the record format. Runs in: worker (encode), front ends (decode). Source: ours.

    word 0  request id
    word 1  kind << 32 | slot, and from bit 40    TOKEN: number of top pairs    FINAL: time in the queue in ms
    word 2  TOKEN: token id << 32 | index of the token      FINAL: cached tokens << 32 | number of tokens
    word 3  TOKEN: bits of the float32 log-probability      FINAL: reason | error code << 8 | text bytes << 32

A token with top log-probabilities is a chain: its record, then ceil(pairs / 4) records of four pairs,
each pair a word: token id << 32 | float32 bits. A FINAL is always one record, so that room for every
ending can be held back; its error text lies in the slot's text area (see segment.py).
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

import numpy as np

from ds4.errors import RingError
from ds4.generation import FinishReason, GenerationEnd, TokenEvent
from ds4.ring import layout
from ds4.ring.segment import Words

KIND_SHIFT: Final = 32
PAIRS_SHIFT: Final = 40
TOKEN_WORD: Final = layout.EVENT_TOKEN << KIND_SHIFT
FINAL_WORD: Final = layout.EVENT_FINAL << KIND_SHIFT
# The same record as eight 32-bit columns (little-endian).
KIND_COLUMN: Final = 3  # kind and number of pairs
INDEX_COLUMN: Final = 4
TOKEN_COLUMN: Final = 5
LOGPROB_COLUMN: Final = 6

_LOW: Final = 0xFFFFFFFF
_MAX_ERROR_CODE: Final = 0xFFFFFF
_QUEUE_SHIFT: Final = 40
_MAX_QUEUE_MS: Final = 0xFFFFFF  # more than four hours


class CorruptEventError(RingError):
    """The worker's records do not follow the protocol; the attachment is dropped."""


# request id, index, the token or None, words 1 to 3 of an ending or None
Decoded = tuple[int, int, TokenEvent | None, tuple[int, int, int] | None]


def num_chain_records(num_pairs: int) -> int:
    """Records that follow a token's own for its top pairs."""
    return -(-num_pairs // layout.PAIRS_PER_RECORD)


def encode_pairs(pairs: Sequence[tuple[int, float]]) -> Words:
    """Top pairs as chain records [num_chain_records(len(pairs)), 4] uint64."""
    records = np.zeros((num_chain_records(len(pairs)), layout.EVENT_WORDS), np.uint64)
    halves = records.reshape(-1).view(np.uint32)
    halves[1 : 2 * len(pairs) : 2] = [token_id for token_id, _ in pairs]
    halves.view(np.float32)[0 : 2 * len(pairs) : 2] = [logprob for _, logprob in pairs]
    return records


def final_record(
    request_id: int, slot: int, num_tokens: int, end: GenerationEnd, text_bytes: int
) -> list[int]:
    """The four words of an ending."""
    return [
        request_id,
        FINAL_WORD | slot | min(max(0, end.queue_ms), _MAX_QUEUE_MS) << _QUEUE_SHIFT,
        (end.num_cached_tokens & _LOW) << 32 | (num_tokens & _LOW),
        int(end.reason) | (end.error_code & _MAX_ERROR_CODE) << 8 | text_bytes << 32,
    ]


def decode_final(word_1: int, word_2: int, word_3: int, text: str) -> GenerationEnd:
    """An ending from its words. Raises CorruptEventError for a reason that does not exist."""
    try:
        reason = FinishReason(word_3 & 0xFF)
    except ValueError:
        raise CorruptEventError(f"unknown finish reason {word_3 & 0xFF}") from None
    return GenerationEnd(reason, word_3 >> 8 & _MAX_ERROR_CODE, text, word_2 >> 32, word_1 >> _QUEUE_SHIFT)


def decode_records(records: Words) -> Iterable[Decoded]:
    """Every event in `records` [n, 4] uint64, in order. Raises CorruptEventError."""
    halves = records.view(np.uint32)
    logprobs = records.view(np.float32)[:, LOGPROB_COLUMN].tolist()
    if (halves[:, KIND_COLUMN] == layout.EVENT_TOKEN).all():  # the usual case: tokens without chains
        tokens = map(TokenEvent, halves[:, TOKEN_COLUMN].tolist(), logprobs)
        return zip(records[:, 0].tolist(), halves[:, INDEX_COLUMN].tolist(), tokens, repeat(None))
    return _decode_mixed(records, logprobs)


def _decode_mixed(records: Words, logprobs: list[float]) -> list[Decoded]:
    request_ids, words_1, words_2, words_3 = records.T.tolist()
    decoded: list[Decoded] = []
    at, num_records = 0, len(request_ids)
    while at < num_records:
        word_1, word_2 = words_1[at], words_2[at]
        kind = word_1 >> KIND_SHIFT & 0xFF
        if kind == layout.EVENT_TOKEN:
            num_pairs = word_1 >> PAIRS_SHIFT & 0xFF
            top: tuple[tuple[int, float], ...] = ()
            chain = 0
            if num_pairs:
                chain = num_chain_records(num_pairs)
                if at + chain >= num_records or num_pairs > layout.MAX_TOP_PAIRS:
                    raise CorruptEventError("a chain of records is cut off")
                halves = records[at + 1 : at + 1 + chain].reshape(-1).view(np.uint32)
                ids = halves[1 : 2 * num_pairs : 2].tolist()
                top = tuple(zip(ids, halves.view(np.float32)[0 : 2 * num_pairs : 2].tolist(), strict=True))
            token = TokenEvent(word_2 >> 32, logprobs[at], top)
            decoded.append((request_ids[at], word_2 & _LOW, token, None))
            at += 1 + chain
        elif kind == layout.EVENT_FINAL:
            decoded.append((request_ids[at], word_2 & _LOW, None, (word_1, word_2, words_3[at])))
            at += 1
        else:
            raise CorruptEventError(f"unknown kind of event {kind}")
    return decoded
