"""A sequence's counters."""

import pytest

from ds4.generation import FinishReason
from tests.support.sequences import make_sequence
from workers.sequence import Sequence, Status


def seated(prompt: list[int], num_cached: int = 0, **fields: int) -> Sequence:
    sequence = make_sequence(prompt, **fields)
    sequence.take_seat(0, [0], num_cached)
    return sequence


def test_prefill_in_chunks_samples_with_the_last_one() -> None:
    sequence = seated([1, 2, 3, 4, 5])
    assert not sequence.schedule(3)
    assert sequence.num_unscheduled == 2
    assert sequence.schedule(2)
    assert sequence.num_total == 6


def test_a_sequence_decodes_while_its_newest_token_is_still_unknown() -> None:
    sequence = seated([1, 2])
    sequence.schedule(2)
    assert sequence.is_decoding
    assert sequence.schedule(1)
    sequence.collect(2, sampled=True)
    assert sequence.accept(7) is None
    assert sequence.is_decoding
    assert (sequence.num_computed, sequence.num_scheduled, sequence.num_total) == (2, 3, 4)


def test_the_last_prompt_token_alone_is_prefill() -> None:
    sequence = seated([1, 2], num_cached=1)
    assert sequence.num_unscheduled == 1
    assert not sequence.is_decoding


def test_a_sequence_is_full_as_soon_as_its_last_token_is_in_flight() -> None:
    sequence = seated([1, 2], max_tokens=2)
    sequence.schedule(2)
    assert not sequence.is_full
    sequence.schedule(1)
    assert sequence.is_full


def test_the_ending_rides_on_the_last_token() -> None:
    sequence = seated([1], max_tokens=2)
    sequence.schedule(1)
    sequence.collect(1, sampled=True)
    assert sequence.accept(5) is None
    sequence.schedule(1)
    sequence.collect(1, sampled=True)
    end = sequence.accept(6)
    assert end is not None
    assert end.reason is FinishReason.LENGTH
    assert sequence.tokens.tolist() == [1, 5, 6]


def test_resumed_tokens_count_as_output() -> None:
    sequence = make_sequence([1, 2, 3, 4], max_tokens=5, num_resumed_tokens=3)
    assert (sequence.num_origin, sequence.num_output, sequence.num_generated) == (1, 3, 0)
    assert sequence.max_total == 6


def test_an_ending_is_final() -> None:
    sequence = make_sequence([1])
    sequence.finish(FinishReason.CANCELLED)
    with pytest.raises(AssertionError, match="FINISHED to FINISHED"):
        sequence.finish(FinishReason.STOP)
    with pytest.raises(AssertionError):
        sequence.move(Status.RUNNING)


def test_a_sequence_in_flight_keeps_its_seat() -> None:
    sequence = seated([1])
    sequence.schedule(1)
    with pytest.raises(AssertionError):
        sequence.unseat()
