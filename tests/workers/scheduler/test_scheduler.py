"""The scheduler: budget, order, fairness, preemption, and that nothing leaks or starves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sequences import make_sequence
from tests.workers.scheduler.simulation import PAGE, Simulation
from workers.sequence import Sequence, Status

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
def test_decode_rows_come_first_and_prompt_chunks_fill_the_rest(depth: int) -> None:
    simulation = Simulation(rows=16, depth=depth)
    decoding = [make_sequence([seed], 50) for seed in range(2)]
    simulation.add(*decoding)
    simulation.turn()
    simulation.turn()
    simulation.add(make_sequence([9] * 60))
    for _ in range(4):
        batch = simulation.turn().batch
        assert batch is not None
        assert [span.sequence for span in batch.spans[:2]] == decoding
        assert batch.num_decode == 2
        assert batch.num_rows == 16


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    simulation = Simulation(rows=16, pages=1000)
    long, short = make_sequence([1] * 1000), make_sequence([2] * 6, 1)
    simulation.add(long)
    simulation.turn()
    simulation.add(short)
    simulation.turn()
    assert simulation.finished == [short]


def test_many_short_prompts_do_not_starve_a_long_one() -> None:
    simulation = Simulation(rows=16, pages=1000, seats=4)
    long = make_sequence([1] * 200, 1)
    simulation.add(long)
    for number in range(60):
        simulation.add(*(make_sequence([number, other] * 8, 1) for other in range(3)))
        simulation.turn()
        if long.status is Status.FINISHED:
            break
    assert long.status is Status.FINISHED
    assert number <= 200 / 8


def test_a_prompt_is_computed_while_streams_decode() -> None:
    simulation = Simulation(rows=4, seats=4)
    simulation.add(*(make_sequence([seed], 200) for seed in range(3)))
    simulation.turn()
    newcomer = make_sequence([9] * 10, 2)
    simulation.add(newcomer)
    for _ in range(15):
        simulation.turn()
    assert newcomer.status is Status.FINISHED


def test_on_a_slow_device_prompts_leave_running_streams_their_pace() -> None:
    simulation = Simulation(rows=512, pages=2000, row_s=0.005)
    stream, prompt = make_sequence([1] * 400, 100), make_sequence([2] * 2000, 1)
    simulation.add(stream)
    simulation.turn()
    simulation.add(prompt)
    sizes = []
    while prompt not in simulation.finished:
        batch = simulation.turn().batch
        assert batch is not None
        assert batch.num_decode == 1
        sizes.append(batch.num_rows)
    assert max(sizes) * 0.005 == pytest.approx(0.2, rel=0.05)
    simulation.add(alone := make_sequence([3] * 600, 1))
    while stream not in simulation.finished:
        simulation.turn()
    assert simulation.turn().batch is None
    assert alone in simulation.finished
    simulation.add(make_sequence([4] * 600, 1))
    batch = simulation.turn().batch
    assert batch is not None
    assert batch.num_rows == 512, "nobody decodes: the whole budget"


def test_front_ends_take_turns() -> None:
    simulation = Simulation(seats=1)
    flood = [make_sequence([1], 1, front_end=0) for _ in range(5)]
    others = [make_sequence([1], 1, front_end=1) for _ in range(2)]
    simulation.add(*flood, *others)
    simulation.run()
    assert simulation.finished == [flood[0], others[0], flood[1], others[1], *flood[2:]]


@DEPTHS
def test_tenants_share_the_device_by_weight_whatever_they_send(depth: int) -> None:
    """One floods with long answers, from every front end; the other, of twice the weight, asks for little."""
    simulation = Simulation(seats=3, pages=300, rows=32, depth=depth)
    greedy = [
        make_sequence([1, number], 30, front_end=number % 4, tenant=1, weight=1) for number in range(100)
    ]
    modest = [make_sequence([2, number], 5, front_end=0, tenant=2, weight=2) for number in range(600)]
    simulation.add(*greedy, *modest)
    for _ in range(600):
        simulation.turn()
    assert {one.request.tenant for one in simulation.scheduler.waiting} == {1, 2}
    work = [sum(len(one.tokens) for one in each if len(one.tokens) > 2) for each in (greedy, modest)]
    assert work[1] / work[0] == pytest.approx(2.0, rel=0.2)


def test_one_front_end_is_served_in_order_of_arrival() -> None:
    simulation = Simulation(seats=2)
    sequences = [make_sequence([number] * (1 + number % 3), 3) for number in range(9)]
    simulation.add(*sequences)
    simulation.run()
    assert simulation.first_rows == sequences


def test_equal_prompts_arriving_together_are_computed_once() -> None:
    simulation = Simulation(rows=16, seats=8, pages=200)
    sequences = [make_sequence(range(64), 1) for _ in range(8)]
    simulation.add(*sequences)
    num_rows = 0
    while not simulation.scheduler.is_idle:
        batch = simulation.turn().batch
        num_rows += batch.num_rows if batch is not None else 0
    assert num_rows < 64 + 32 + 8 * PAGE


def test_a_long_prompt_is_looked_up_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.scheduler.scheduler._MAX_DIGESTS", 8)
    simulation = Simulation(rows=64, pages=200)
    prompt = list(range(16 * PAGE + 1))
    simulation.add(make_sequence(prompt, 1))
    simulation.run()
    stream, again, short = make_sequence([1], 30), make_sequence(prompt, 1), make_sequence([2] * 5, 1)
    simulation.add(stream)
    simulation.turn()
    simulation.add(again, short)
    num_turns = 0
    while again.status is Status.WAITING:
        num_made = len(again.page_digests)
        plan = simulation.turn()
        assert plan.batch is not None
        assert plan.batch.num_decode == 1, "the stream keeps its pace"
        assert len(again.page_digests) - num_made <= 8
        assert plan.is_looking == (again.status is Status.WAITING)
        num_turns += 1
    assert num_turns == 4
    assert again.reused_tokens == 16 * PAGE
    assert simulation.first_rows.index(short) < simulation.first_rows.index(again)


def test_an_idle_scheduler_asks_to_go_on_looking_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.scheduler.scheduler._MAX_DIGESTS", 8)
    simulation = Simulation(rows=64, pages=200)
    prompt = list(range(16 * PAGE + 1))
    simulation.add(make_sequence(prompt, 1))
    simulation.run()
    simulation.add(make_sequence(prompt, 1))
    plans = [simulation.turn() for _ in range(4)]
    assert [plan.is_looking for plan in plans] == [True, True, True, False]
    assert [plan.batch is None for plan in plans] == [True, True, True, False]


@DEPTHS
def test_the_latest_arrival_is_preempted_and_served_first_afterwards(depth: int) -> None:
    simulation = Simulation(pages=8, seats=3, depth=depth)
    first, second = make_sequence([1] * 8, 20), make_sequence([2] * 8, 20)
    simulation.add(first, second)
    while not second.num_preemptions:
        simulation.turn()
    assert first.num_preemptions == 0
    assert second.status is Status.WAITING
    newcomer = make_sequence([3], 1)
    simulation.add(newcomer)
    while newcomer.status is Status.WAITING:
        simulation.turn()
    assert simulation.scheduler.running.get(second.seat) is second
    simulation.run()
    assert len(second.tokens) == 28


def test_a_seat_that_preemption_frees_is_given_away_by_the_next_plan_only() -> None:
    simulation = Simulation(pages=6, seats=2)
    first, second, third = make_sequence([1] * 8, 20), make_sequence([2] * 9, 20), make_sequence([3], 1)
    simulation.add(first, second)
    simulation.turn()
    simulation.paused = {second.slot}
    simulation.add(third)
    while not (plan := simulation.turn()).preempted:
        pass
    assert plan.preempted == (second,)
    assert plan.batch is not None
    assert plan.batch.seated == (), "nobody has asked yet whether the third may get a token"
    plan = simulation.turn()
    assert plan.batch is not None
    assert plan.batch.seated == (third,)


def test_newcomers_are_not_seated_where_the_next_page_would_preempt_them() -> None:
    simulation = Simulation(pages=10)
    sequences = [make_sequence([number] * 5 * PAGE, 4) for number in range(2)]
    simulation.add(*sequences)
    simulation.run()
    assert simulation.finished == sequences
    assert [sequence.num_preemptions for sequence in sequences] == [0, 0]


@DEPTHS
def test_a_sequence_that_outgrows_all_pages_alone_is_reported(depth: int) -> None:
    simulation = Simulation(pages=3, depth=depth)
    sequence = make_sequence([1] * 8, 100)
    simulation.add(sequence)
    simulation.run()
    assert simulation.too_large == [sequence]
    assert len(sequence.tokens) == 3 * PAGE + 1  # the newest token has no place to be computed


def test_a_sequence_that_could_never_fit_is_not_taken() -> None:
    simulation = Simulation(pages=3)
    assert simulation.scheduler.fits(make_sequence([1] * 12))
    assert not simulation.scheduler.fits(make_sequence([1] * 13))


def test_a_large_prompt_is_not_overtaken_for_ever() -> None:
    simulation = Simulation(pages=16, seats=4)
    simulation.add(*(make_sequence([number] * 8, 6) for number in range(3)))
    simulation.turn()
    large = make_sequence([7] * 60, 1)
    simulation.add(large)
    for number in range(40):
        simulation.add(make_sequence([100 + number] * 8, 6))
        simulation.turn()
        if large in simulation.finished:
            break
    assert large in simulation.finished


def test_a_blocked_queue_is_not_looked_at_again_until_pages_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(pages=16, seats=4)
    running, large = make_sequence([1] * 8, 16), make_sequence([2] * 60, 1)
    simulation.add(running)
    simulation.turn()
    simulation.add(large)
    asked: list[Sequence] = []
    find = simulation.scheduler.cache.find

    def asking(sequence: Sequence) -> list[int]:
        asked.append(sequence)
        return find(sequence)

    monkeypatch.setattr(simulation.scheduler.cache, "find", asking)
    while running not in simulation.finished:
        simulation.turn()
    assert asked == [large]
    simulation.run()
    assert large in simulation.finished


def test_a_blocked_sequence_starts_as_soon_as_enough_of_its_pages_were_computed_by_another() -> None:
    simulation = Simulation(pages=16, seats=4, rows=16)
    running, alike = make_sequence([1] * 40, 8), make_sequence([1] * 48, 1)
    simulation.add(running)
    simulation.turn()
    simulation.add(alike)  # 12 pages, of which it can share 10
    simulation.turn()
    assert alike.status is Status.WAITING
    simulation.run()
    assert simulation.finished == [alike, running]
    assert alike.reused_tokens == 32  # two steps of the other


@DEPTHS
def test_a_paused_sequence_gets_no_row_that_samples(depth: int) -> None:
    simulation = Simulation(depth=depth)
    paused, other = make_sequence([1] * 6, 5), make_sequence([2], 9)
    simulation.paused = {paused.slot}
    simulation.add(other)
    simulation.turn()
    simulation.paused = set()
    simulation.add(paused)
    simulation.turn()
    simulation.paused = {paused.slot}
    for _ in range(12):
        simulation.turn()
    assert simulation.finished == [other]
    simulation.paused = set()
    simulation.run()
    assert simulation.finished == [other, paused]


@DEPTHS
def test_a_sequence_set_aside_is_computed_again_to_the_same_end(depth: int) -> None:
    simulation = Simulation(depth=depth, seats=1)
    slow, waiting = make_sequence([1] * 6, 9), make_sequence([2], 3)
    simulation.add(slow, waiting)
    for _ in range(4):
        simulation.turn()
    simulation.paused = {slow.slot}
    while slow.num_in_flight:
        simulation.turn()
    simulation.scheduler.set_aside(slow)
    while waiting not in simulation.finished:
        simulation.turn()
    simulation.paused = set()
    simulation.run()
    assert slow.tokens.tolist() == [1] * 6 + list(range(6, 15))


def test_a_lost_page_is_noticed_when_idle() -> None:
    simulation = Simulation()
    simulation.scheduler.cache.take([], 1)
    with pytest.raises(AssertionError, match="idle"):
        simulation.scheduler.check()


ARRIVALS = st.lists(
    st.fixed_dictionaries(
        {
            "turn": st.integers(0, 30),
            "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=40),
            "max_tokens": st.integers(1, 12),
            "front_end": st.integers(0, 2),
            "tenant": st.integers(0, 2),
            "weight": st.integers(1, 3),
            "cancel_after": st.none() | st.integers(0, 20),
            "pause": st.none() | st.tuples(st.integers(0, 20), st.integers(1, 10)),
        }
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(
    arrivals=ARRIVALS,
    pages=st.integers(13, 40),
    seats=st.integers(1, 5),
    rows=st.integers(5, 24),
    depth=st.integers(0, 1),
)
def test_whatever_arrives_everybody_ends_and_nothing_leaks(
    arrivals: list[dict[str, object]], pages: int, seats: int, rows: int, depth: int
) -> None:
    simulation = Simulation(
        pages=pages, seats=seats, rows=rows, depth=depth, sample=lambda one: len(one.tokens) % 2
    )
    made = []
    for arrival in arrivals:
        sequence = make_sequence(
            arrival["prompt"],  # type: ignore[arg-type]
            arrival["max_tokens"],  # type: ignore[arg-type]
            front_end=arrival["front_end"],  # type: ignore[arg-type]
            tenant=arrival["tenant"],
            weight=arrival["weight"],
        )
        made.append((arrival, sequence))
    for turn in range(70):
        simulation.paused = set()
        for arrival, sequence in made:
            age = turn - arrival["turn"]  # type: ignore[operator]
            if age == 0:
                simulation.add(sequence)
            if age >= 0 and age == arrival["cancel_after"] and sequence.status is not Status.FINISHED:
                simulation.finish(sequence)
            pause = arrival["pause"]
            if pause is not None and pause[0] <= age < pause[0] + pause[1]:  # type: ignore[index]
                simulation.paused.add(sequence.slot)
        simulation.turn()
        if not simulation.flights:
            simulation.scheduler.cache.check()
    simulation.paused = set()
    simulation.run()
    assert not simulation.too_large
    assert sorted(one.arrival for one in simulation.finished) == [one.arrival for _, one in made]
    for arrival, sequence in made:
        if arrival["cancel_after"] is None:
            assert len(sequence.tokens) == len(arrival["prompt"]) + arrival["max_tokens"]  # type: ignore[arg-type,operator]
