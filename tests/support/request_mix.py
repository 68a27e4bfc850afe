"""A mix of requests to the tiny model that uses everything a device keeps for a seat."""

from typing import Final

from ds4.generation import SamplingParams
from tests.support.tiny_model import vocabulary

VOCAB_SIZE: Final = len(vocabulary())


def prompt_of(number: int) -> list[int]:
    """Many lengths; odd numbers share their first 33 tokens."""
    shared = [5, 9, 13] * 11 if number % 2 else []
    return shared + [(7 * number + 3 * index) % VOCAB_SIZE for index in range(1 + 5 * number % 37)]


def sampling_of(number: int) -> SamplingParams:
    """Greedy, or drawn with every penalty and a seed; some with log-probabilities."""
    if number % 4 == 0:
        return SamplingParams(temperature=0.0)
    return SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        seed=number,
        num_logprobs=2 if number % 3 == 0 else -1,
    )
