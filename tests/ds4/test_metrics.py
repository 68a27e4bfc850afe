"""ds4/metrics.py: one writer per block, sums over all of them, text that Prometheus reads."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.errors import RingError
from ds4.metrics import FILE_NAME, TABLE, WORKER, Metrics


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Metrics]:
    metrics = Metrics.open(tmp_path, owner=0)
    yield metrics
    metrics.close()


def test_counters_of_all_processes_are_added_up(tmp_path: Path, front: Metrics) -> None:
    other = Metrics.open(tmp_path, owner=1)
    front.add("ds4_prompt_tokens_total", 7)
    other.add("ds4_prompt_tokens_total", 5)
    assert front.value("ds4_prompt_tokens_total") == 12
    assert other.exposition() == front.exposition()
    other.close()


def test_counts_survive_a_restart_of_their_writer_and_gauges_do_not(tmp_path: Path) -> None:
    first = Metrics.open(tmp_path, owner=WORKER)
    first.add("ds4_num_preemptions_total", 3)
    first.set("ds4_num_requests_running", 9)
    first.close()
    second = Metrics.open(tmp_path, owner=WORKER)
    assert second.value("ds4_num_preemptions_total") == 3
    assert second.value("ds4_num_requests_running") == 0
    assert second.value("ds4_worker_restarts_total") == 1
    second.close()


def test_a_first_worker_is_no_restart(tmp_path: Path, front: Metrics) -> None:
    worker = Metrics.open(tmp_path, owner=WORKER)
    assert front.value("ds4_worker_restarts_total") == 0
    worker.close()


def test_a_histogram_has_cumulative_buckets_with_inclusive_bounds(front: Metrics) -> None:
    front.observe("ds4_batch_size", 1)
    front.observe("ds4_batch_size", 2, count=3)
    front.observe("ds4_batch_size", 1e9)
    text = front.exposition()
    assert 'ds4_batch_size_bucket{le="1"} 1\n' in text
    assert 'ds4_batch_size_bucket{le="2"} 4\n' in text
    assert 'ds4_batch_size_bucket{le="4096"} 4\n' in text
    assert 'ds4_batch_size_bucket{le="+Inf"} 5\n' in text
    assert "ds4_batch_size_count 5\n" in text
    assert "ds4_batch_size_sum 1000000007\n" in text
    assert front.samples("ds4_batch_size") == (5, 1000000007.0)


def test_labels_are_series_of_their_own(front: Metrics) -> None:
    front.add("ds4_requests_rejected_total", label="full")
    text = front.exposition()
    assert 'ds4_requests_rejected_total{reason="full"} 1\n' in text
    assert 'ds4_requests_rejected_total{reason="invalid"} 0\n' in text


def test_gauges_that_are_read_at_scrape_come_from_the_caller(front: Metrics) -> None:
    assert "ds4_decode_pending 4\n" in front.exposition({"ds4_decode_pending": 4})


def test_every_line_follows_the_exposition_format(front: Metrics) -> None:
    front.observe("ds4_step_time_seconds", 0.0123)
    sample = re.compile(r'^ds4_[a-z0-9_]+(\{[a-z_]+="[^"]*"\})? [0-9.e+-]+$')
    lines = front.exposition().splitlines()
    assert all(line.startswith(("# HELP ds4_", "# TYPE ds4_")) or sample.match(line) for line in lines)
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == [
        metric.name for metric in TABLE
    ]


def test_names_are_unique_and_no_series_shares_a_word(front: Metrics) -> None:
    assert len({metric.name for metric in TABLE}) == len(TABLE)
    for number, metric in enumerate(TABLE, start=1):
        for label in metric.label_values:
            if metric.kind == "counter":
                front.add(metric.name, number, label)
            elif metric.kind == "gauge":
                front.set(metric.name, number, label)
            else:
                front.observe(metric.name, number)
    for number, metric in enumerate(TABLE, start=1):
        if metric.kind == "histogram":
            assert front.samples(metric.name) == (1, number)
        else:
            assert {front.value(metric.name, label) for label in metric.label_values} == {number}


def test_a_file_of_another_version_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"something else")
    metrics = Metrics.open(tmp_path, owner=0)
    metrics.add("ds4_prompt_tokens_total")
    assert metrics.value("ds4_prompt_tokens_total") == 1
    metrics.close()


def test_processes_that_create_the_file_together_share_one(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ds4.metrics import Metrics\n"
        "sys.stdin.readline()\n"
        "m = Metrics.open(Path(sys.argv[1]), owner=int(sys.argv[2]))\n"
        "[m.add('ds4_prompt_tokens_total') for _ in range(1000)]\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(owner)], stdin=subprocess.PIPE)
        for owner in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
    assert [child.wait(60) for child in children] == [0, 0, 0]
    metrics = Metrics.open(tmp_path, owner=5)
    assert metrics.value("ds4_prompt_tokens_total") == 3000
    assert os.listdir(tmp_path) == [FILE_NAME]
    metrics.close()


def test_a_directory_that_cannot_be_used_is_a_ring_error(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="metrics"):
        Metrics.open(tmp_path / "missing", owner=0)
    with pytest.raises(RingError):
        Metrics.open(tmp_path, owner=254)
