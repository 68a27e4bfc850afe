"""Event records: what is encoded is decoded, and a record that cannot be is noticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.generation import FinishReason, GenerationEnd
from ds4.ring import events, layout
from ds4.ring.segment import Words

float32 = st.floats(width=32, allow_nan=False)
token_ids = st.integers(0, 0x7FFFFFFF)
pair_lists = st.lists(st.tuples(token_ids, float32), max_size=layout.MAX_TOP_PAIRS)


def token_records(token_id: int, index: int, logprob: float, pairs: list[tuple[int, float]]) -> Words:
    head = np.zeros((1, 4), np.uint64)
    head[0, 0] = 9
    head[0, 1] = events.TOKEN_WORD | len(pairs) << events.PAIRS_SHIFT | 3
    head.view(np.uint32)[0, events.INDEX_COLUMN] = index
    head.view(np.uint32)[0, events.TOKEN_COLUMN] = token_id
    head.view(np.float32)[0, events.LOGPROB_COLUMN] = logprob
    return np.concatenate((head, events.encode_pairs(pairs)))


@given(st.lists(st.tuples(token_ids, float32, pair_lists), max_size=6))
def test_chains_of_any_length_come_back_in_order(
    tokens: list[tuple[int, float, list[tuple[int, float]]]],
) -> None:
    records = np.concatenate(
        [np.zeros((0, 4), np.uint64)]
        + [token_records(one[0], index, one[1], one[2]) for index, one in enumerate(tokens)]
    )
    decoded = list(events.decode_records(records))
    assert len(decoded) == len(tokens)
    for index, (found, (token_id, logprob, pairs)) in enumerate(zip(decoded, tokens, strict=True)):
        request_id, found_index, token, end_words = found
        assert (request_id, found_index, end_words) == (9, index, None)
        assert token is not None
        assert (token.token_id, token.logprob, list(token.top)) == (token_id, logprob, pairs)


@given(
    st.sampled_from(FinishReason),
    st.integers(0, 0xFFFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 1024),
    st.integers(0, 0xFFFFFF),
)
def test_an_ending_comes_back(
    reason: FinishReason, code: int, cached: int, num_tokens: int, text: int, queue_ms: int
) -> None:
    end = GenerationEnd(reason, code, "text", cached, queue_ms)
    record = np.array([events.final_record(1 << 63, 5, num_tokens, end, text)], np.uint64)
    [(request_id, found_tokens, token, words)] = events.decode_records(record)
    assert (request_id, found_tokens, token) == (1 << 63, num_tokens, None)
    assert words is not None
    assert words[0] & 0xFFFFFFFF == 5
    assert words[2] >> 32 == text
    assert events.decode_final(*words, "text") == end


def test_a_chain_that_is_cut_off_is_noticed() -> None:
    records = token_records(1, 0, 0.0, [(1, -1.0)] * 9)
    with pytest.raises(events.CorruptEventError, match="cut off"):
        events.decode_records(records[:-1])


def test_unknown_kinds_and_reasons_are_noticed() -> None:
    record = np.array([[1, 4 << events.KIND_SHIFT, 0, 0]], np.uint64)
    with pytest.raises(events.CorruptEventError, match="kind"):
        events.decode_records(record)
    with pytest.raises(events.CorruptEventError, match="reason"):
        events.decode_final(0, 0, 99, "")


def test_more_pairs_than_allowed_are_noticed() -> None:
    records = token_records(1, 0, 0.0, [(1, -1.0)] * 24)
    with pytest.raises(events.CorruptEventError):
        events.decode_records(records)
