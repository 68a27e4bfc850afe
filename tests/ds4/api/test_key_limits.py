"""ds4/api/key_limits.py: limits that hold over several front ends, alone and through HTTP."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from ds4.api import key_limits
from ds4.api.errors import KeyLimitError
from ds4.api.key_limits import _FLAG, PERIOD_S, KeyLimits
from ds4.api.keys import Tenant
from ds4.errors import RequestError
from ds4.ring.fence import process_fence
from ds4.ring.liveness import FIRST_FRONT_END_BYTE, Leases
from tests.support.front_rig import Front, until, with_front

ALICE = Tenant(number=1, name="alice", max_concurrent=4, tokens_per_minute=100)
BOB = Tenant(number=2, name="bob")
CAROL = Tenant(number=3, name="carol", tokens_per_minute=10)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0 * PERIOD_S

    def __call__(self) -> float:
        return self.now


class Places:
    """Front ends in one directory, each with the lease of its place."""

    def __init__(self, directory: Path) -> None:
        self.clock = Clock()
        self._directory = directory
        self._open: dict[int, tuple[KeyLimits, Leases]] = {}

    def enter(self, index: int, *tenants: Tenant) -> KeyLimits:
        leases = Leases(self._directory)
        assert leases.take(FIRST_FRONT_END_BYTE + index)
        limits = KeyLimits(tenants or (ALICE, BOB, CAROL), clock=self.clock)
        limits.open(self._directory, index)
        self._open[index] = limits, leases
        return limits

    def die(self, index: int) -> None:
        limits, leases = self._open.pop(index)
        limits.close()
        leases.abandon()


@pytest.fixture
def places(tmp_path: Path) -> Any:
    places = Places(tmp_path)
    yield places
    for index in list(places._open):
        places.die(index)


def test_concurrent_requests_count_over_all_front_ends(places: Places) -> None:
    first, second = places.enter(0), places.enter(3)
    first.take(ALICE, 3, 1)
    second.take(ALICE, 1, 1)
    for limits in (first, second):
        with pytest.raises(KeyLimitError, match=r"4 concurrent requests.*max_concurrent"):
            limits.take(ALICE, 1, 1)
    first.give_back(ALICE, 3)
    with pytest.raises(KeyLimitError):
        second.take(ALICE, 4, 1)
    second.take(ALICE, 3, 1)


def test_what_could_never_run_is_not_told_to_come_back(places: Places) -> None:
    limits = places.enter(0)
    with pytest.raises(RequestError, match=r"4 concurrent requests \(max_concurrent\).*counts as 5"):
        limits.take(ALICE, 5, 1)
    limits.take(ALICE, 4, 1)


def test_of_two_that_compete_for_what_is_left_one_gets_it(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have asked before either looks at what the other did: without turns each refuses the other."""
    both_asked, both_summed = threading.Barrier(2), threading.Barrier(2)
    sum_up = KeyLimits._used

    class Meeting:
        @staticmethod
        def call() -> None:
            with contextlib.suppress(threading.BrokenBarrierError):  # whose turn it is is alone here
                both_asked.wait(0.2)
            process_fence().call()

    def slowly(limits: KeyLimits, start: int, now: int) -> list[int]:
        used = sum_up(limits, start, now)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_summed.wait(0.2)
        return used

    monkeypatch.setattr(key_limits, "process_fence", Meeting)
    monkeypatch.setattr(KeyLimits, "_used", slowly)
    monkeypatch.setattr(key_limits, "_MAX_TURN_S", 30.0)  # threads take longer turns than processes
    competing = [places.enter(index) for index in (1, 4)]
    won: list[KeyLimits] = []

    def compete(limits: KeyLimits) -> None:
        with contextlib.suppress(KeyLimitError):
            limits.take(CAROL, 1, 10)
            won.append(limits)

    threads = [threading.Thread(target=compete, args=(limits,)) for limits in competing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_a_place_that_is_stopped_while_it_asks_holds_nobody_up(places: Places) -> None:
    stopped, going = places.enter(0), places.enter(1)
    stopped._words[stopped._own + _FLAG] = 1  # where a process would leave it
    going.take(ALICE, 4, 1)
    with pytest.raises(KeyLimitError):
        going.take(ALICE, 1, 1)
    places.die(0)
    assert going._asking(0) == []
    places.enter(0).take(CAROL, 1, 1)


def test_a_tenant_without_limits_is_not_counted(places: Places) -> None:
    limits = places.enter(0)
    for _ in range(1000):
        limits.take(BOB, 100, 1 << 30)


def test_what_a_dead_front_end_had_running_is_over_but_its_tokens_count(places: Places) -> None:
    dying, living = places.enter(0), places.enter(1)
    dying.take(ALICE, 4, 60)
    places.die(0)
    living.take(ALICE, 4, 40)
    living.give_back(ALICE, 4)
    with pytest.raises(KeyLimitError, match="tokens_per_minute"):
        living.take(ALICE, 1, 1)
    successor = places.enter(0)
    with pytest.raises(KeyLimitError, match="tokens_per_minute"):
        successor.take(ALICE, 1, 1)


def test_tokens_of_the_last_minute_are_bounded_and_come_back(places: Places) -> None:
    first, second = places.enter(0), places.enter(1)
    first.take(CAROL, 1, 4)
    second.add_tokens(CAROL, 5)
    second.take(CAROL, 1, 1)
    with pytest.raises(KeyLimitError, match="10 tokens per minute") as refused:
        first.take(CAROL, 1, 1)
    wait_s = refused.value.retry_after_s
    assert 60 <= wait_s <= 60 + PERIOD_S + 1
    places.clock.now += 59.9
    with pytest.raises(KeyLimitError):
        first.take(CAROL, 1, 1)
    places.clock.now += wait_s - 59.9
    first.take(CAROL, 1, 10)


def test_a_refusal_leaves_nothing_behind(places: Places) -> None:
    limits = places.enter(0)
    limits.take(ALICE, 1, 90)
    for _ in range(3):
        with pytest.raises(KeyLimitError, match="tokens_per_minute"):
            limits.take(ALICE, 1, 20)
    limits.take(ALICE, 3, 10)


def test_only_as_much_as_is_needed_is_waited_out(places: Places) -> None:
    limits = places.enter(0)
    limits.take(CAROL, 1, 6)
    places.clock.now += 30
    limits.take(CAROL, 1, 4)
    with pytest.raises(KeyLimitError) as refused:
        limits.take(CAROL, 1, 5)
    assert refused.value.retry_after_s <= 30 + PERIOD_S + 1
    with pytest.raises(KeyLimitError, match="this prompt alone has 11") as refused:
        limits.take(CAROL, 1, 11)
    places.clock.now += 36
    limits.take(CAROL, 1, 5)


def test_another_key_file_counts_apart(places: Places) -> None:
    places.enter(0).take(ALICE, 4, 0)
    places.enter(1, ALICE, CAROL, Tenant(number=4, name="dave", max_concurrent=1)).take(ALICE, 4, 0)


def _keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(
        "sk-alice name=alice weight=3 max_concurrent=2\nsk-carol name=carol tokens_per_minute=40\n"
    )
    return str(path)


async def _ask(front: Front, key: str, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    return await front.client.post(f"/v1/{path}", json=body, headers={"Authorization": f"Bearer {key}"})


def test_the_tenant_reaches_the_worker_with_its_weight(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        for key in ("sk-alice", "sk-carol"):
            assert (await _ask(front, key)).status_code == 200
        assert front.worker is not None
        asked = [(each.request.tenant, each.request.weight) for each in front.worker.requests]
        assert asked == [(1, 3), (2, 1)]

    with_front(tmp_path, scenario, api_key_file=_keys(tmp_path))


def test_a_refusal_names_the_limit_and_when_to_come_again(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        never = await _ask(front, "sk-alice", n=3)
        assert (never.status_code, "retry-after" in never.headers) == (400, False)
        assert "max_concurrent" in never.text
        (alice,) = (tenant for tenant in front.state.keys.values() if tenant.name == "alice")
        front.state.limits.take(alice, 1, 1)
        response = await _ask(front, "sk-alice", n=2)
        front.state.limits.give_back(alice, 1)
        assert response.status_code == 429
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "max_concurrent" in error["message"]
        assert "alice" not in response.text
        assert int(response.headers["retry-after"]) >= 1
        assert (await _ask(front, "sk-alice", n=2)).status_code == 200
        assert (await _ask(front, "sk-alice", n=2)).status_code == 200, "an answered request is over"

        while (response := await _ask(front, "sk-carol", "messages", max_tokens=5)).status_code == 200:
            pass
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert "tokens_per_minute" in response.text
        assert 1 <= int(response.headers["retry-after"]) <= 66
        assert front.state.engine.metrics.value("ds4_requests_rejected_total", "key_limit") == 2

    with_front(tmp_path, scenario, api_key_file=_keys(tmp_path))


def test_output_counts_towards_the_minute(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-erin tokens_per_minute=1000\n")

    async def scenario(front: Front) -> None:
        response = await _ask(front, "sk-erin")
        used = response.json()["usage"]["total_tokens"]
        limits, (tenant,) = front.state.limits, front.state.keys.values()
        limits.take(tenant, 1, 1000 - used)
        with pytest.raises(KeyLimitError):
            limits.take(tenant, 1, 1)
        limits.give_back(tenant, 1)

    with_front(tmp_path, scenario, api_key_file=str(path))


def test_a_request_that_found_no_worker_costs_nothing(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        for _ in range(20):
            assert (await _ask(front, "sk-carol")).status_code == 503
        front.start_worker("hi")
        await until(lambda: front.state.engine.ready)
        assert (await _ask(front, "sk-carol")).status_code == 200

    with_front(tmp_path, scenario, None, api_key_file=_keys(tmp_path))
