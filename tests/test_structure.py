"""Rules about the tree that no other tool checks: sizes, mirrors, packages, strings, the wheel."""

import importlib.metadata
import re
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
WARN_LINES: Final = 500
MAX_LINES: Final = 700
# Files over WARN_LINES, each with the reason why it is not two files.
LONG: Final = {
    "ds4/protocol/anthropic_messages.py": "one dialect: its request, answer and events refer to each other",
    "tests/ds4/ring/test_worker_end.py": "one class, every behaviour of which is tested through the same real peer",
    "tests/benchmarks/ring_transports.py": "three transports doing the same work, comparable only side by side",
}
# Test modules about several modules of their package at once.
OF_SEVERAL: Final = {
    "tests/ds4/api/test_sdk_types.py": "every dialect's answers under the types of its clients' packages",
    "tests/ds4/text/test_known_templates.py": "template, format and readers of calls together, on known models",
    "tests/ds4/text/tools/test_rarer_calls.py": "small readers of one model line each",
    "tests/ds4/ring/test_life_cycle.py": "both ends of the ring together",
    "tests/ds4/ring/test_processes.py": "both ends of the ring in real processes",
    "tests/workers/devices/cpu/test_fallback.py": "a broken Numba, seen from the registry and the build",
    "tests/workers/devices/cpu/test_quality.py": "the whole engine on the real model",
    "tests/workers/devices/cpu/test_sampling.py": "the device and the host's sampler together",
    "tests/workers/devices/cpu/test_kernels.py": "every kernel module against the oracle",
    "tests/workers/devices/cuda/test_server.py": "the device below the whole server",
}


def _tracked() -> list[str]:
    done = subprocess.run(
        [
            "git",
            "-c",
            f"safe.directory={ROOT}",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("this is no git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _sources() -> list[str]:
    return [name for name in _tracked() if name.endswith((".py", ".cu", ".cuh"))]


def test_no_source_file_is_too_long() -> None:
    sizes = {name: len((ROOT / name).read_text().splitlines()) for name in _sources()}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}
    long = {name for name, size in sizes.items() if size > WARN_LINES}
    assert long <= set(LONG), "a file over 500 lines is split, or has its reason in LONG"


def test_every_folder_of_tests_and_code_is_a_package() -> None:
    folders = {Path(name).parent for name in _sources() if name.startswith(("tests/", "ds4/", "workers/"))}
    missing = [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()]
    assert missing == []


def test_every_test_module_mirrors_a_module() -> None:
    tests = [name for name in _sources() if re.match(r"tests/(ds4|workers)/", name) and "/test_" in name]
    assert tests
    lost = []
    for name in set(tests) - set(OF_SEVERAL):
        folder, _, module = name.removeprefix("tests/").rpartition("/")
        stem = module.removeprefix("test_").removesuffix(".py")
        # test_engine.py mirrors engine.py, and test_engine_cancel.py too: a module may have several.
        words = stem.split("_")
        stems = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        if not any(
            (ROOT / folder / f"{part}.py").is_file() or (ROOT / folder / part).is_dir() for part in stems
        ):
            lost.append(name)
    assert lost == []


def test_every_module_says_what_it_owns() -> None:
    silent = []
    for name in _sources():
        if (
            name.startswith(("ds4/", "workers/"))
            and not name.endswith("__init__.py")
            and name.endswith(".py")
        ):
            text = (ROOT / name).read_text()
            if not text.startswith('"""'):
                silent.append(name)
    assert silent == []


def test_no_tracked_file_names_a_registry_or_a_machine() -> None:
    # Written so that this file does not match itself.
    hosts = [
        ".".join(parts)
        for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("deb", "debian"))
    ]
    pattern = re.compile(
        "|".join([*map(re.escape, hosts), r"/ro" r"ot/", r"/wo" r"rk/", r"/ho" r"me/(?!ds4)"])
    )
    found = []
    for name in _tracked():
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


def test_requirements_are_pinned_by_hash() -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        text = (ROOT / name).read_text()
        entries = re.split(r"\n(?=\S)", text.strip())
        assert len(entries) > 20
        for entry in entries:
            assert re.match(r"[a-z0-9_.-]+==\S+", entry), entry
            assert "--hash=sha256:" in entry, entry


def test_development_requirements_pin_the_same_versions() -> None:
    def pins(name: str) -> set[str]:
        return set(re.findall(r"^[a-z0-9_.-]+==[^ ;\\]+", (ROOT / name).read_text(), re.MULTILINE))

    assert pins("requirements.txt") <= pins("requirements-dev.txt")


def test_no_other_distribution_claims_our_package_names() -> None:
    owners = importlib.metadata.packages_distributions()
    for package in ("ds4", "workers"):
        assert set(owners.get(package, [])) <= {"ds4-server"}, (
            f"another distribution installs a package called {package}: use an environment of its own"
        )


def test_the_package_is_the_one_of_this_tree() -> None:
    for package in ("ds4", "workers"):
        module = __import__(package)
        assert Path(str(module.__file__)).parent == ROOT / package


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    target = tmp_path_factory.mktemp("wheel")
    build = f"from hatchling.build import build_wheel; print(build_wheel({str(target)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (path,) = target.glob("*.whl")
    return path


def test_the_wheel_holds_all_our_code_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {name for name in _tracked() if name.startswith(("ds4/", "workers/"))}
    assert names == ours


def test_the_wheel_declares_its_commands_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = {
            name.rpartition("/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert "ds4-server = ds4.cli:main" in info["entry_points.txt"]
    assert "ds4-front = ds4.cli:main_front" in info["entry_points.txt"]
    assert "ds4-worker = workers.main:main" in info["entry_points.txt"]
    assert "License-Expression: MIT" in info["METADATA"]
    assert "LICENSE" in info


def test_the_entry_points_exist() -> None:
    from ds4.cli import main, main_front
    from workers.main import main as main_worker

    assert callable(main)
    assert callable(main_front)
    assert callable(main_worker)


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning):
        warnings.warn("heard", stacklevel=1)
