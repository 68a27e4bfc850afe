"""Free memory on a machine, in a container, and where nothing says."""

from pathlib import Path

from workers.devices.memory import available_bytes

MIB = 1 << 20


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_a_machine_without_limits_has_what_the_kernel_says(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8192 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "5000\n")
    assert available_bytes(tmp_path) == 8 * MIB


def test_a_container_has_the_rest_of_its_limit_with_the_page_cache(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 8388608 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", str(1024 * MIB))
    write(tmp_path, "sys/fs/cgroup/memory.current", str(700 * MIB))
    write(tmp_path, "sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {100 * MIB}\n")
    assert available_bytes(tmp_path) == 424 * MIB


def test_version_1_groups_are_read_too(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 8388608 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(512 * MIB))
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(112 * MIB))
    assert available_bytes(tmp_path) == 400 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/memory.max", "1000")
    write(tmp_path, "sys/fs/cgroup/memory.current", "2000")
    assert available_bytes(tmp_path) == 0


def test_an_unknown_machine_is_taken_for_a_small_one(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 2048 * MIB


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
