"""What is installed against what is pinned: every version, offline.

    python .ci/audit.py requirements-dev.txt

Lists each distribution of this environment with its version and licence, ready for an advisory database
where there is a network, and fails where one is not pinned or has another version than its pin: then
hashes were not what decided what runs here.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

# What makes an environment, and this project itself.
NOT_PINNED = {"pip", "setuptools", "wheel", "ds4-server"}


def normal(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, set[str]]:
    """Versions by name; a name may have several, for different platforms."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", path.read_text(), re.MULTILINE):
        found.setdefault(normal(name), set()).add(version)
    return found


def licence(distribution: importlib.metadata.Distribution) -> str:
    """The licence as the distribution declares it, in a few words."""
    about = distribution.metadata
    classified = [entry for entry in about.get_all("Classifier") or [] if entry.startswith("License ::")]
    text = (
        about.get("License-Expression")
        or (classified[0] if classified else about.get("License"))
        or "unknown"
    )
    return text.split("::")[-1].strip().splitlines()[0][:40]


def audit(path: Path) -> list[str]:
    """Print the list; what is wrong."""
    wanted, faults = pins(path), []
    installed = {normal(one.metadata["Name"]): one for one in importlib.metadata.distributions()}
    for name, distribution in sorted(installed.items()):
        sys.stdout.write(f"{name}=={distribution.version}  {licence(distribution)}\n")
        if name in NOT_PINNED:
            continue
        if name not in wanted:
            faults.append(f"{name} is not pinned")
        elif distribution.version not in wanted[name]:
            faults.append(f"{name} is {distribution.version}, pinned {', '.join(sorted(wanted[name]))}")
    return faults


if __name__ == "__main__":
    problems = audit(Path(sys.argv[1]))
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    sys.exit(1 if problems else 0)
