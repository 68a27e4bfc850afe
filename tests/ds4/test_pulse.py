"""ds4/pulse.py: what the supervisor hears of a child."""

import os
import time

from ds4.pulse import Pulse, PulseWatch, Stage, take_option


def test_silence_counts_from_the_last_beat_and_not_before_the_first() -> None:
    watch = PulseWatch()
    pulse = Pulse(os.dup(watch.fd))
    assert watch.silent_s(100.0) == 0.0
    assert watch.silent_s(1000.0) == 0.0, "it may start for as long as it likes"
    pulse.beat(Stage.LOADED)
    assert watch.silent_s(1001.0) == 0.0
    assert watch.stage == int(Stage.LOADED)
    assert watch.silent_s(1004.0) == 3.0
    pulse.beat(Stage.SERVING)
    assert watch.silent_s(1005.0) == 0.0
    assert watch.stage == int(Stage.SERVING)
    watch.forgive()
    assert watch.silent_s(time.monotonic()) < 60
    watch.close()
    watch.close()


def test_the_childs_own_children_do_not_inherit_it() -> None:
    watch = PulseWatch()
    os.set_inheritable(watch.fd, True)
    Pulse(watch.fd)
    assert not os.get_inheritable(watch.fd)
    watch.close()


def test_a_process_that_nobody_watches_beats_for_itself() -> None:
    Pulse(None).beat(Stage.SERVING)


def test_the_supervisors_options_are_taken_off_the_front() -> None:
    assert take_option(["--pulse-fd", "7", "--port", "1"], "--pulse-fd") == (7, ["--port", "1"])
    assert take_option(["--port", "1"], "--pulse-fd") == (None, ["--port", "1"])
