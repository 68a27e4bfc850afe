"""The ring's figures: cost of a step, idle cost, and the same work over ZeroMQ and multiprocessing.Queue.

python -m tests.benchmarks.ring [--seconds 4] [--quick]

Compare rows of one run with each other; on a machine that does other things the ratios mean more than
the figures.
"""

import argparse
import os
import platform
import sys

from ds4.ring.fence import process_fence
from tests.benchmarks.ring_idle import measure_idle
from tests.benchmarks.ring_step import step_costs
from tests.benchmarks.ring_transports import Case, measure

TARGETS_US = {256: 60, 1024: 120, 4096: 250}
TRANSPORTS = ("ring", "zmq + msgspec", "mp.Queue")


def main() -> int:
    """Print every table."""
    parser = argparse.ArgumentParser(description="benchmark of the slot ring")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each end-to-end measurement")
    parser.add_argument("--quick", action="store_true", help="only the cost of a step")
    arguments = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, load {load}")
    print(f"fence: {process_fence().name}\n")
    print("Worker cost of one step without the model, median us")
    print("  rows  front ends   poll  writable  publish   step  target  set changed  + status")
    for cost in step_costs():
        print(
            f"{cost.num_rows:6d}  {cost.num_front_ends:10d}  {cost.poll_us:5.1f}  {cost.writable_us:8.1f}  "
            f"{cost.publish_us:7.1f}  {cost.step_us:5.0f}  {TARGETS_US[cost.num_rows]:6d}  "
            f"{cost.changed_step_us:11.0f}  {cost.status_us:8.1f}"
        )
    if arguments.quick:
        return 0
    idle = measure_idle(arguments.seconds)
    fronts = ", ".join(f"{percent:.2f}" for percent in idle.front_end_percent)
    print(
        f"\nIdle, percent of a core: worker {idle.worker_percent:.2f}, front ends {fronts} (target below 1)\n"
    )
    print("End to end, every token checked by its consumer")
    print(
        "setup                     transport       tokens/s  worker us/step  wakes/step  front-end cores  wrong"
    )
    for front_ends, streams, step_ms in ((4, 64, 10.0), (4, 256, 10.0), (4, 64, 0.0), (4, 256, 0.0)):
        for transport in TRANSPORTS:
            found = measure(Case(transport, front_ends, streams, step_ms, arguments.seconds))
            setup = f"{front_ends} x {streams}, {step_ms:.0f} ms steps"
            print(
                f"{setup:24s}  {transport:13s}  {found.tokens_per_s:10,.0f}  {found.overhead_us:14.0f}  "
                f"{found.wakes_per_step:10.2f}  {found.front_end_cpu:15.2f}  {found.wrong:5d}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
