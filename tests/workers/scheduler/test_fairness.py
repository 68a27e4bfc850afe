"""The queue of those without a seat."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.sequences import make_sequence
from workers.scheduler.fairness import WaitingQueue
from workers.sequence import Sequence


def test_preempted_sequences_come_first_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    early, late, new = make_sequence([1]), make_sequence([1]), make_sequence([1])
    early.num_preemptions = late.num_preemptions = 1
    for sequence in (new, late, early):
        queue.push(sequence)
    assert list(queue) == [early, late, new]


def test_a_served_front_end_goes_to_the_end_of_the_turn() -> None:
    queue = WaitingQueue()
    a, b, c = (make_sequence([1], front_end=front_end) for front_end in (0, 0, 1))
    for sequence in (a, b, c):
        queue.push(sequence)
    queue.remove(a, served=True)
    assert list(queue) == [c, b]


def test_a_cancelled_request_does_not_cost_its_front_end_a_turn() -> None:
    queue = WaitingQueue()
    a, b, c = (make_sequence([1], front_end=front_end) for front_end in (0, 0, 1))
    for sequence in (a, b, c):
        queue.push(sequence)
    queue.remove(a, served=False)
    assert list(queue) == [b, c]


def test_without_turns_the_order_is_that_of_arrival() -> None:
    queue = WaitingQueue(in_turn=False)
    sequences = [make_sequence([1], front_end=number // 3) for number in range(6)]
    for sequence in sequences:
        queue.push(sequence)
    queue.remove(sequences[0], served=True)
    assert list(queue) == sequences[1:]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40))
def test_everybody_is_listed_once_and_nobody_waits_longer_than_a_round(steps: list[tuple[bool, int]]) -> None:
    queue = WaitingQueue()
    inside: list[Sequence] = []
    served: list[int] = []
    for add, front_end in steps:
        if add:
            sequence = make_sequence([1], front_end=front_end)
            queue.push(sequence)
            inside.append(sequence)
        elif inside:
            chosen = next(iter(queue))
            queue.remove(chosen, served=True)
            inside.remove(chosen)
            served.append(chosen.front_end)
        assert sorted(one.arrival for one in queue) == [one.arrival for one in inside]
        assert len(queue) == len(inside)
        own = [[one.arrival for one in queue if one.front_end == each] for each in range(4)]
        assert all(arrivals == sorted(arrivals) for arrivals in own)
        heads = [one.front_end for one in queue][: len({one.front_end for one in inside})]
        assert len(set(heads)) == len(heads), "a front end comes twice before another had its turn"
