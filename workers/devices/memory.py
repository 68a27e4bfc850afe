"""How much memory this process may still take: the machine's, or the container's where that is less.

Owns: nothing. Runs in: the worker, at start. Sources: proc(5) for MemAvailable; the kernel's cgroup v2
and v1 memory controllers.
"""

from pathlib import Path

_UNKNOWN_BYTES = 2 << 30  # neither /proc nor a cgroup told us: assume a small machine


def _number(path: Path) -> int | None:
    """The whole number a control file holds; None for `max`, and where there is no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)


def _machine_bytes(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_bytes(root: Path) -> int | None:
    """What is left under this control group's limit; page cache that can be dropped counts as free."""
    base = root / "sys/fs/cgroup"
    for folder, limit_name, used_name, cache in (
        (base, "memory.max", "memory.current", "inactive_file"),
        (base / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            return max(0, limit - used + _statistic(folder / "memory.stat", cache))
    return None


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping. `root` is the file system's root, for tests."""
    known = [value for value in (_machine_bytes(root), _cgroup_bytes(root)) if value is not None]
    return min(known) if known else _UNKNOWN_BYTES
