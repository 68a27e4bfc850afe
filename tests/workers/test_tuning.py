"""workers/tuning.py: limits that change while sequences run."""

from pathlib import Path

from ds4.config import Settings
from ds4.ring.control import ControlPage
from tests.support.sequences import make_sequence
from workers.admission import CoalescingWindow
from workers.kvcache.prefix import PrefixCache
from workers.scheduler.scheduler import Scheduler
from workers.tuning import Tuning


class _Rig:
    def __init__(self, directory: Path) -> None:
        self.page = ControlPage(directory)
        self.scheduler = Scheduler(PrefixCache(64, 4), max_seats=4, max_rows=32)
        self.window = CoalescingWindow(window_us=2000, max_seats=4, clock=lambda: 0.0)
        self.tuning = Tuning(self.page, Settings(), self.scheduler, self.window)

    def change(self, name: str, value: int | None) -> None:
        self.page.set(name, value)
        self.tuning.apply()


def test_fewer_sessions_are_seated_and_more_again(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    for _ in range(6):
        rig.scheduler.enqueue(make_sequence([1, 2, 3]))
    rig.change("batched_sessions", 2)
    assert rig.scheduler.plan((), may_preempt=True).batch is not None
    assert len(rig.scheduler.running) == 2
    rig.change("batched_sessions", 1)
    assert rig.scheduler.plan((), may_preempt=True).batch is not None, "who runs goes on"
    assert len(rig.scheduler.running) == 2
    rig.change("batched_sessions", 100)
    rig.scheduler.plan((), may_preempt=True)
    assert len(rig.scheduler.running) == 4, "never more than there are seats"


def test_the_token_budget_of_a_step_changes(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    rig.change("max_batch_tokens", 16)
    rig.scheduler.enqueue(make_sequence(range(40)))
    batch = rig.scheduler.plan((), may_preempt=True).batch
    assert batch is not None
    assert batch.num_rows == 16
    rig.change("max_batch_tokens", 1)
    assert rig.scheduler.row_limit == 4, "a row for each session at least"
    rig.change("max_batch_tokens", None)
    assert rig.scheduler.row_limit == 32


def test_window_and_batch_log_change(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert rig.window.wait_s(num_waiting=1, num_preparing=1) > 0
    rig.window.close()
    rig.change("decode_coalesce_us", 0)
    assert rig.window.wait_s(num_waiting=1, num_preparing=1) == 0
    seen = [rig.tuning.batch_log]
    for value in (1, None):
        rig.change("batch_log", value)
        seen.append(rig.tuning.batch_log)
    assert seen == [False, True, False]


def test_what_was_changed_before_the_worker_came_holds_for_it(tmp_path: Path) -> None:
    ControlPage(tmp_path).set("batched_sessions", 1)
    rig = _Rig(tmp_path)
    rig.tuning.apply()
    assert rig.scheduler.seat_limit == 1
