"""State numbers cross between releases' processes: they are a contract."""

from ds4.ring.states import SlotState, WorkerState


def test_the_numbers_of_the_states_are_fixed() -> None:
    assert {state.name: state.value for state in WorkerState} == {
        "LOADING": 0,
        "READY": 1,
        "DRAINING": 2,
        "RETIRED": 3,
        "FAILED": 4,
    }
    assert {state.name: state.value for state in SlotState} == {
        "FREE": 0,
        "WAITING": 1,
        "PREFILL": 2,
        "DECODE": 3,
        "PAUSED": 4,
    }
