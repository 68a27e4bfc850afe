"""The tuner against made-up machines."""

from collections.abc import Callable

from workers.devices.cpu.tuner import ThreadTuner


def run(tuner: ThreadTuner, cost: Callable[[int], float], steps: int, rows: int = 1) -> list[int]:
    chosen = []
    for _ in range(steps):
        threads = tuner.choose(rows)
        chosen.append(threads)
        tuner.record(rows, cost(threads))
    return chosen


def quiet(threads: int) -> float:
    return 1.0 / threads


def crowded(threads: int) -> float:
    return 1.0 if threads == 1 else 5.0


def test_a_quiet_machine_keeps_nearly_all_steps_on_all_threads() -> None:
    chosen = run(ThreadTuner(4), quiet, 2000)
    assert chosen.count(4) > 0.95 * len(chosen)


def test_a_busy_neighbour_drops_threads_within_a_few_steps() -> None:
    tuner = ThreadTuner(2)
    run(tuner, quiet, 100)
    chosen = run(tuner, crowded, 40)
    assert chosen[10:] == [1] * 30


def test_a_machine_that_is_busy_from_the_start_is_found_out() -> None:
    tuner = ThreadTuner(2)
    run(tuner, crowded, 12)
    assert run(tuner, crowded, 200).count(1) >= 195


def test_threads_come_back_when_the_neighbour_leaves() -> None:
    tuner = ThreadTuner(2)
    run(tuner, crowded, 300)
    chosen = run(tuner, quiet, 1000)
    assert chosen[-20:] == [2] * 20


def test_trials_become_rare_while_nothing_changes() -> None:
    tuner = ThreadTuner(2)
    early = run(tuner, quiet, 400).count(1)
    run(tuner, quiet, 4000)
    assert run(tuner, quiet, 400).count(1) < early


def test_many_threads_step_down_to_the_best_count() -> None:
    tuner = ThreadTuner(16)
    run(tuner, lambda threads: abs(threads - 4) + 1.0, 400)
    assert run(tuner, lambda threads: abs(threads - 4) + 1.0, 50).count(4) >= 40


def test_one_slow_step_changes_nothing() -> None:
    tuner = ThreadTuner(2)
    run(tuner, quiet, 10)
    tuner.record(1, 100.0)
    assert run(tuner, quiet, 3) == [2, 2, 2]


def test_one_thread_leaves_no_choice() -> None:
    assert set(run(ThreadTuner(1), quiet, 200)) == {1}


def test_steps_of_different_sizes_are_judged_apart() -> None:
    tuner = ThreadTuner(2)
    run(tuner, crowded, 100, rows=1)
    assert run(tuner, quiet, 3, rows=512) == [2, 2, 2]
