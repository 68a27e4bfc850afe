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


def test_the_heavier_tenant_gets_more_turns_and_its_front_ends_share_them() -> None:
    queue = WaitingQueue()
    heavy = [make_sequence([1], front_end=number % 2, tenant=1, weight=2) for number in range(4)]
    light = [make_sequence([1], front_end=number, tenant=2) for number in range(2)]
    for sequence in (*light, *heavy):
        queue.push(sequence)
    order = [light[0], heavy[0], heavy[1], light[1], heavy[2], heavy[3]]
    assert list(queue) == order
    assert _serve_all(queue) == order


def test_output_counts_against_its_tenant() -> None:
    queue = WaitingQueue()
    talker, other = make_sequence([1], tenant=1), make_sequence([1], tenant=2)
    for sequence in (talker, other):
        queue.push(sequence)
        queue.remove(sequence, served=True)
    for _ in range(50):
        queue.charge(talker)
    waiting = [*(make_sequence([1], tenant=2) for _ in range(60)), make_sequence([1], tenant=1)]
    for sequence in waiting:
        queue.push(sequence)
    assert 49 <= _serve_all(queue).index(waiting[-1]) <= 51


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    queue = WaitingQueue()
    for _ in range(100):
        queue.push(make_sequence([1] * 10, tenant=1))
    for _ in range(50):
        queue.remove(next(iter(queue)), served=True)
    for _ in range(50):
        queue.push(make_sequence([1] * 10, tenant=2))
    tenants = [sequence.request.tenant for sequence in _serve_all(queue)[:20]]
    assert tenants.count(1) == tenants.count(2)


def test_a_newcomer_does_not_profit_from_what_a_lone_tenant_was_given_before() -> None:
    queue = WaitingQueue()
    queue.push(make_sequence([1], tenant=2))
    queue.remove(next(iter(queue)), served=True)
    lone = make_sequence([1] * 10, tenant=1)
    queue.push(lone)
    queue.remove(lone, served=True)
    for _ in range(1000):
        queue.charge(lone)
    for _ in range(50):
        queue.push(make_sequence([1] * 10, tenant=2))
    for _ in range(50):
        queue.push(make_sequence([1] * 10, tenant=1))
    tenants = [sequence.request.tenant for sequence in _serve_all(queue)[:20]]
    assert abs(tenants.count(1) - tenants.count(2)) <= 2


def test_many_tenants_come_and_go() -> None:
    queue = WaitingQueue()
    stays = make_sequence([1] * 9, tenant=7)
    queue.push(stays)
    for number in range(3000):
        visitor = make_sequence([1], tenant=100 + number)
        queue.push(visitor)
        queue.remove(visitor, served=False)
        assert list(queue) == [stays]


def _serve_all(queue: WaitingQueue) -> list[Sequence]:
    """Everybody, each taken as the next; what was listed before has to agree."""
    listed, served = list(queue), []
    while len(queue):
        served.append(next(iter(queue)))
        queue.remove(served[-1], served=True)
    assert [one.arrival for one in served] == [one.arrival for one in listed]
    return served


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.booleans()), min_size=1, max_size=80),
)
def test_while_two_tenants_wait_their_shares_follow_their_weights(
    weights: list[int], steps: list[tuple[int, int, bool]]
) -> None:
    """The bound of virtual token counters, over every span of steps in which both have somebody waiting;
    the order of service is therefore never more than that away from the weights, and nobody starves.
    """
    queue = WaitingQueue()
    num_tenants, largest = len(weights), 12
    waiting = [0] * num_tenants
    work = [0] * num_tenants
    since: dict[tuple[int, int], tuple[int, int]] = {}  # pair → the work of both when both began to wait
    for number, cost, add in steps:
        if add or not len(queue):
            tenant = number % num_tenants
            queue.push(make_sequence([1] * cost, front_end=cost % 3, tenant=tenant, weight=weights[tenant]))
            waiting[tenant] += 1
        else:
            chosen = next(iter(queue))
            queue.remove(chosen, served=True)
            waiting[chosen.request.tenant] -= 1
            work[chosen.request.tenant] += len(chosen.tokens)
        for one in range(num_tenants):
            for other in range(one):
                if not (waiting[one] and waiting[other]):
                    since.pop((one, other), None)
                    continue
                before = since.setdefault((one, other), (work[one], work[other]))
                got = [
                    (work[each] - then) / weights[each]
                    for each, then in zip((one, other), before, strict=True)
                ]
                bound = largest / weights[one] + largest / weights[other]
                assert abs(got[0] - got[1]) <= bound + 1e-9
