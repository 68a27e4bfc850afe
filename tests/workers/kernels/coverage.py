"""Line coverage of the CUDA sources: `python -m tests.workers.kernels.coverage [pytest arguments]`.

Owns: a temporary folder of instrumented libraries. Runs in: a developer's shell, CI. Runs the kernel tests with
kernels that the emulator compiles with g++ --coverage, then has gcov count. A line counts as run if any
module ran it (a file is compiled once for each weight format).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

from workers.kernels.sources import FOLDER

_TESTS: Final = ("tests/workers/kernels", "tests/workers/devices/cuda")
_PLUGIN: Final = "tests.workers.kernels.coverage_plugin"

Lines = dict[int, bool]


def count(folder: Path) -> dict[str, Lines]:
    """Source file to its lines that hold code, and whether each was run."""
    found: dict[str, Lines] = defaultdict(dict)
    names = {path.name for path in FOLDER.glob("*.cu*")}
    for data in sorted(folder.rglob("*.gcda")):
        done = subprocess.run(
            ["gcov", "--json-format", "--stdout", str(data)],
            cwd=data.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        for document in done.stdout.splitlines():
            for source in json.loads(document)["files"]:
                if source["file"] not in names:
                    continue
                lines = found[source["file"]]
                for line in source["lines"]:
                    number = line["line_number"]
                    lines[number] = lines.get(number, False) or line["count"] > 0
    return dict(found)


def ranges(numbers: list[int]) -> str:
    """1-3 7 as text."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def report(found: dict[str, Lines]) -> str:
    """A table, with what was never run."""
    rows, total, run = [], 0, 0
    for name, lines in sorted(found.items()):
        missed = sorted(number for number, was_run in lines.items() if not was_run)
        total, run = total + len(lines), run + len(lines) - len(missed)
        share = 100 * (len(lines) - len(missed)) / len(lines)
        rows.append(f"{name:24} {len(lines):5} lines {share:6.1f} %  {ranges(missed)}".rstrip())
    rows.append(f"{'all':24} {total:5} lines {100 * run / max(total, 1):6.1f} %")
    return "\n".join(rows)


def main(arguments: list[str]) -> int:
    """Run the tests and print the report. Returns pytest's exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        tests = arguments or [path for path in _TESTS if Path(path).is_dir()]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", _PLUGIN, "-p", "no:cacheprovider", *tests],
            env={**os.environ, "TMPDIR": temporary},  # noqa: TID251 - where the tests put temporary files
            check=False,
        )
        print(report(count(Path(temporary))))
        return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
