"""The cache of compiled code."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("numba", reason="the CPU engine needs numba")

from tests.workers.devices.cpu.rig import Kernels
from workers.devices.cpu import machine_code
from workers.devices.cpu.emit import ADDRESS, Emitter, Library, Value
from workers.devices.cpu.machine_code import CONSTANTS, SOURCES, cache_key, load_machine_code
from workers.devices.cpu.spec import StepSpec
from workers.devices.cpu.target import Isa, host_target, restricted_target, target_machine

SPEC = StepSpec(num_heads=4, num_kv_heads=2, head_size=16, kinds=(1,), table_kinds=(1,))


def small_object() -> bytes:
    """An object file with an entry that does nothing but return 0."""
    import llvmlite.binding as llvm

    text = "define i32 @ds4_cpu_step(i64 %r, i64 %e, i64 %c, i64 %t) { ret i32 0 }"  # Numba's convention
    return bytes(target_machine(host_target()).emit_object(llvm.parse_assembly(text)))


class Maker:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return small_object()


def test_code_is_made_once_and_then_read(tmp_path: Path) -> None:
    make = Maker()
    for _ in range(3):
        load_machine_code(host_target(), SPEC, tmp_path / "new", make=make)(0, 0)
    assert make.calls == 1


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    make = Maker()
    load_machine_code(host_target(), SPEC, tmp_path, make=make)
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    load_machine_code(host_target(), SPEC, tmp_path, make=make)(0, 0)
    path.write_bytes(path.read_bytes()[:-1])
    load_machine_code(host_target(), SPEC, tmp_path, make=make)(0, 0)
    assert make.calls == 3


def test_a_directory_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")  # a directory cannot be made below a file, not even by root
    make = Maker()
    load_machine_code(host_target(), SPEC, blocker / "cpu", make=make)(0, 0)
    assert make.calls == 1


def test_no_half_written_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    load_machine_code(host_target(), SPEC, tmp_path, make=Maker())(0, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_key_tells_targets_and_specs_apart() -> None:
    target = host_target()
    keys = {
        cache_key(target, SPEC),
        cache_key(target, msgspec.structs.replace(SPEC, head_size=32)),
        cache_key(target, msgspec.structs.replace(SPEC, kinds=(1, 2))),
        *(cache_key(restricted_target(isa), SPEC) for isa in Isa if isa is not target.isa),
    }
    assert len(keys) == 3 + len(Isa) - 1


def test_every_module_that_shapes_the_code_is_part_of_the_key() -> None:
    source = (
        "import sys; import workers.devices.cpu.build; "
        "print(*(n.rpartition('.')[2] for n in sys.modules if n.startswith('workers.devices.cpu.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert set(loaded.stdout.split()) == set(SOURCES)


def test_every_constant_of_other_packages_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = set()
    for name in SOURCES:
        source = Path(machine_code.__file__).with_name(f"{name}.py").read_text()
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        for node in imports:
            if not (node.module or "").startswith("workers.devices.cpu."):
                imported |= {alias.name for alias in node.names if alias.name.isupper()}
    assert imported == set(CONSTANTS)
    before = cache_key(host_target(), SPEC)
    for name in CONSTANTS:
        with monkeypatch.context() as patch:
            patch.setitem(CONSTANTS, name, 7)
            assert cache_key(host_target(), SPEC) != before
    assert cache_key(host_target(), SPEC) == before


def test_a_cached_start_imports_no_numba(tmp_path: Path) -> None:
    load_machine_code(host_target(), SPEC, tmp_path, make=Maker())
    source = (
        "import sys\nfrom pathlib import Path\n"
        "from workers.devices.cpu.device import CpuDevice\n"
        "from workers.devices.cpu.machine_code import load_machine_code\n"
        "from workers.devices.cpu.spec import StepSpec\n"
        "from workers.devices.cpu.target import host_target\n"
        f"spec = StepSpec(num_heads=4, num_kv_heads=2, head_size=16, kinds=(1,), table_kinds=(1,))\n"
        f"load_machine_code(host_target(), spec, Path({str(tmp_path)!r}))(0, 0)\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_a_kernel_is_a_function_of_the_library() -> None:
    library = Library(host_target())

    @library.kernel(ADDRESS, ADDRESS)
    def copy(e: Emitter, source: Value, place: Value) -> None:
        e.store(e.load_floats(source), place, 4)

    assert Kernels(library).names == ["ds4_copy_0"]
