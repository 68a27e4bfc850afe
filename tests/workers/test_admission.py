"""The coalescing window: waited only where waiting can help."""

import pytest

from workers.admission import CoalescingWindow


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def window(clock: Clock, *, window_us: int = 2000, max_seats: int = 4) -> CoalescingWindow:
    return CoalescingWindow(window_us=window_us, max_seats=max_seats, clock=clock)


def test_a_lone_stream_never_pays(clock: Clock) -> None:
    assert window(clock).wait_s(num_waiting=1, num_preparing=0) == 0.0


def test_it_waits_while_others_are_being_prepared(clock: Clock) -> None:
    assert window(clock).wait_s(num_waiting=1, num_preparing=1) > 0.0


def test_nobody_pending_is_nothing_to_wait_for(clock: Clock) -> None:
    assert window(clock).wait_s(num_waiting=0, num_preparing=5) == 0.0


def test_a_full_batch_starts_at_once(clock: Clock) -> None:
    assert window(clock).wait_s(num_waiting=4, num_preparing=5) == 0.0


def test_batching_off_never_waits(clock: Clock) -> None:
    assert window(clock, max_seats=1).wait_s(num_waiting=1, num_preparing=5) == 0.0


def test_zero_turns_it_off(clock: Clock) -> None:
    assert window(clock, window_us=0).wait_s(num_waiting=1, num_preparing=5) == 0.0


def test_it_starts_as_soon_as_nobody_is_on_the_way(clock: Clock) -> None:
    coalescing = window(clock)
    assert coalescing.wait_s(num_waiting=1, num_preparing=1) > 0.0
    clock.now += 0.0005
    assert coalescing.wait_s(num_waiting=2, num_preparing=0) == 0.0


def test_the_whole_wait_is_the_window_and_no_longer(clock: Clock) -> None:
    coalescing = window(clock)
    start = clock.now
    while (wait_s := coalescing.wait_s(num_waiting=1, num_preparing=1)) > 0.0:
        assert clock.now + wait_s <= start + 0.002 + 1e-9
        clock.now += wait_s
    assert clock.now == pytest.approx(start + 0.002)
    assert coalescing.wait_s(num_waiting=1, num_preparing=1) == 0.0, "the window is over until it has started"


def test_each_start_has_its_own_window(clock: Clock) -> None:
    coalescing = window(clock)
    coalescing.wait_s(num_waiting=1, num_preparing=1)
    coalescing.close()
    clock.now += 10.0
    assert coalescing.wait_s(num_waiting=1, num_preparing=1) > 0.0
