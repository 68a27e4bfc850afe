"""Prefix sharing: what is found, what is given up first, and that no page is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sequences import make_sequence
from workers.kvcache.prefix import PrefixCache
from workers.sequence import Sequence, Status

PAGE = 4


def seat(cache: PrefixCache, prompt: list[int]) -> Sequence:
    """Take pages for a sequence, as the scheduler does."""
    sequence = make_sequence(prompt)
    found = cache.find(sequence)
    pages = cache.take(found, cache.pages_for(len(prompt)) - len(found))
    sequence.take_seat(0, pages, len(found) * PAGE)
    return sequence


def compute(cache: PrefixCache, sequence: Sequence) -> None:
    """All of its known tokens are computed now."""
    sequence.num_computed = sequence.num_scheduled = len(sequence.tokens)
    cache.register(sequence)


def give_back(cache: PrefixCache, sequence: Sequence) -> None:
    cache.release(sequence.unseat())


def test_full_computed_pages_are_found_by_the_same_tokens() -> None:
    cache = PrefixCache(16, PAGE)
    first = seat(cache, list(range(10)))
    assert cache.find(make_sequence(range(10))) == [], "nothing is computed yet"
    compute(cache, first)
    assert cache.find(make_sequence(range(10))) == first.pages[:2]
    assert cache.find(make_sequence([*range(8), 99, 100])) == first.pages[:2]
    assert cache.find(make_sequence([*range(7), 99, 100])) == first.pages[:1]


def test_a_page_is_not_found_behind_another_beginning() -> None:
    cache = PrefixCache(16, PAGE)
    compute(cache, seat(cache, [1, 1, 1, 1, 2, 2, 2, 2, 3]))
    assert cache.find(make_sequence([9, 9, 9, 9, 2, 2, 2, 2, 3])) == []
    assert cache.find(make_sequence([2, 2, 2, 2, 3])) == []


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = PrefixCache(16, PAGE)
    first = seat(cache, list(range(8)))
    compute(cache, first)
    assert cache.find(make_sequence(range(8))) == first.pages[:1]
    assert cache.find(make_sequence(range(9))) == first.pages[:2]


def test_a_long_prompt_is_looked_up_some_pages_at_a_time() -> None:
    cache = PrefixCache(16, PAGE)
    first = seat(cache, list(range(21)))
    compute(cache, first)
    same = make_sequence(range(21))
    assert [cache.prepare(same, 2) for _ in range(3)] == [False, False, True]
    assert len(same.page_digests) == 5
    assert cache.find(same) == first.pages[:5]
    assert cache.prepare(make_sequence(range(4)), 0), "there is nothing to look up"


def test_looking_up_ends_at_the_first_page_that_nobody_has() -> None:
    cache = PrefixCache(16, PAGE)
    compute(cache, seat(cache, list(range(20))))
    other = make_sequence([*range(6), *[99] * 30])
    assert cache.prepare(other, 100)
    assert len(other.page_digests) == 2
    assert len(cache.find(other)) == 1


def test_a_half_computed_page_is_not_shared() -> None:
    cache = PrefixCache(16, PAGE)
    first = seat(cache, list(range(8)))
    first.num_computed = 7
    cache.register(first)
    assert cache.find(make_sequence(range(9))) == first.pages[:1]


def test_output_tokens_are_shared_like_prompts() -> None:
    cache = PrefixCache(16, PAGE)
    first = seat(cache, [1, 2, 3])
    first.tokens.extend([4, 5])
    first.num_computed = 4
    cache.register(first)
    assert cache.find(make_sequence([1, 2, 3, 4, 5])) == first.pages[:1]


def test_shared_pages_have_two_holders_and_stay_until_both_leave() -> None:
    cache = PrefixCache(4, PAGE)
    first = seat(cache, list(range(9)))
    compute(cache, first)
    second = seat(cache, list(range(9)))
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert cache.num_held == 4
    give_back(cache, first)
    assert cache.num_held == 3
    assert cache.num_available == 1
    give_back(cache, second)
    assert cache.num_held == 0
    assert cache.num_available == 4
    cache.check()


def test_the_longest_unused_page_goes_first_and_the_end_before_the_beginning() -> None:
    cache = PrefixCache(5, PAGE)
    old, new = seat(cache, [1] * 9), seat(cache, [2] * 5)
    for sequence in (old, new):
        compute(cache, sequence)
    give_back(cache, old)
    give_back(cache, new)
    assert cache.num_parked == 3
    filler = cache.take([], 3)  # two free pages and one parked
    assert len(cache.find(make_sequence([1] * 9))) == 1
    assert len(cache.find(make_sequence([2] * 5))) == 1
    cache.release(filler)
    filler = cache.take([], 4)
    assert cache.find(make_sequence([1] * 9)) == []
    assert len(cache.find(make_sequence([2] * 5))) == 1
    cache.release(filler)
    cache.check()


def test_using_a_page_again_makes_it_the_last_to_go() -> None:
    cache = PrefixCache(4, PAGE)
    for token in (1, 2):
        sequence = seat(cache, [token] * 5)
        compute(cache, sequence)
        give_back(cache, sequence)
    give_back(cache, seat(cache, [1] * 5))
    cache.release(cache.take([], 3))
    assert len(cache.find(make_sequence([1] * 5))) == 1
    assert cache.find(make_sequence([2] * 5)) == []


def test_forgotten_pages_are_not_found_and_not_lost() -> None:
    cache = PrefixCache(4, PAGE)
    sequence = seat(cache, list(range(9)))
    compute(cache, sequence)
    cache.forget(sequence.pages)
    assert cache.find(make_sequence(range(9))) == []
    give_back(cache, sequence)
    cache.check()
    assert (cache.num_parked, cache.num_available) == (0, 4)


def test_equal_prompts_computed_side_by_side_leave_no_page_behind() -> None:
    cache = PrefixCache(8, PAGE)
    first, second = seat(cache, [7] * 9), seat(cache, [7] * 9)
    compute(cache, first)
    compute(cache, second)
    give_back(cache, second)
    assert cache.find(make_sequence([7] * 9)) == first.pages[:2]
    give_back(cache, first)
    cache.check()
    assert cache.num_available == 8


def test_a_sequence_computed_a_second_time_is_found_again() -> None:
    cache = PrefixCache(4, PAGE)
    sequence = seat(cache, [1] * 9)
    compute(cache, sequence)
    sequence.move(Status.WAITING)  # preempted
    give_back(cache, sequence)
    cache.release(cache.take([], 4))  # its pages went to somebody else
    sequence.take_seat(0, cache.take([], 3), 0)
    compute(cache, sequence)
    assert cache.find(make_sequence([1] * 9)) == sequence.pages[:2]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
STEPS = st.lists(st.tuples(st.sampled_from(["seat", "compute", "leave", "forget"]), PROMPTS), max_size=60)


@settings(deadline=None)
@given(STEPS)
def test_whatever_happens_found_pages_hold_what_they_should(steps: list[tuple[str, list[int]]]) -> None:
    cache = PrefixCache(12, PAGE)
    held: list[Sequence] = []
    contents: dict[int, list[int]] = {}  # what each page holds, with everything before it
    for step, prompt in steps:
        if step == "seat":
            sequence = make_sequence(prompt)
            found = cache.find(sequence)
            for index, page in enumerate(found):
                assert contents[page] == prompt[: (index + 1) * PAGE]
            count = cache.pages_for(len(prompt)) - len(found)
            if count + cache.num_parked_of(found) <= cache.num_available:
                pages = cache.take(found, count)
                assert len(set(pages)) == len(pages)
                for page in pages[len(found) :]:
                    assert all(page not in other.pages for other in held), "a page was given out twice"
                sequence.take_seat(0, pages, len(found) * PAGE)
                held.append(sequence)
        elif held:
            sequence = held[len(prompt) % len(held)]
            if step == "compute":
                for index, page in enumerate(sequence.pages):
                    contents[page] = sequence.tokens[: (index + 1) * PAGE].tolist()
                compute(cache, sequence)
            elif step == "forget":
                cache.forget(sequence.pages)
            else:
                held.remove(sequence)
                give_back(cache, sequence)
        cache.check()
        assert cache.num_available + cache.num_held == cache.num_pages
    for sequence in held:
        give_back(cache, sequence)
    cache.check()
    assert cache.num_available == 12


def test_nothing_is_shared_across_cache_salts() -> None:
    cache = PrefixCache(16, PAGE)
    first = make_sequence(range(10), cache_salt=b"one")
    first.take_seat(0, cache.take([], 3), 0)
    compute(cache, first)
    assert cache.find(make_sequence(range(10), cache_salt=b"one")) == first.pages[:2]
    assert cache.find(make_sequence(range(10), cache_salt=b"two")) == []
    assert cache.find(make_sequence(range(10))) == []
