"""Reading kernel files: every one of ours follows the rules, and what does not is seen."""

from pathlib import Path
from typing import Final

import pytest

from workers.kernels.sources import (
    FOLDER,
    Kernel,
    ParameterKind,
    compile_options,
    launch_bounds,
    parameters,
    signature,
    source_text,
)

FILES: Final = sorted(path.name for path in FOLDER.glob("*.cu"))


def test_parameters_are_read_from_the_source() -> None:
    kinds = parameters("quantise.cu")["rms_norm"]
    pointer, integer, real = ParameterKind.POINTER, ParameterKind.INT32, ParameterKind.FLOAT32
    assert kinds == (pointer, pointer, pointer, integer, real, pointer, pointer, pointer, integer)
    assert signature(Kernel(source="rope_append.cu", entry="advance")) == "ppi"


def test_a_module_is_one_text_with_each_header_once() -> None:
    text = source_text("quantised_matrix.cu")
    assert '#include "' not in text
    for header in ("prelude.cuh", "matmul.cuh", "formats.cuh"):
        assert text.count(f'#line 1 "{header}"') == 1
    # Errors name the line of the file they are in.
    lines = text.splitlines()
    marker = next(i for i, line in enumerate(lines) if line.startswith("#define WEIGHT_GAIN"))
    start = max(i for i, line in enumerate(lines[:marker]) if line.startswith("#line"))
    number = int(lines[start].split()[1]) + marker - start - 1
    assert (FOLDER / "quantised_matrix.cu").read_text().splitlines()[number - 1] == lines[marker]


def test_compile_time_parameters_become_options() -> None:
    assert compile_options([("FORMAT", 12)]) == ("-std=c++17", "-DFORMAT=12")


@pytest.mark.parametrize("name", FILES)
def test_every_entry_point_can_be_read(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert set(parameters(name)) == set(launch_bounds(name))
    assert len(parameters(name)) == text.count("__global__") > 0
    assert all(bound % 32 == 0 for bound in launch_bounds(name).values())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.cu*")), ids=lambda path: path.name)
def test_kernel_files_follow_the_rules(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("// ")
    if path.name != "prelude.cuh":
        assert "asm(" not in text
        assert "asm volatile" not in text
        assert "CUDA_ON_CPU" not in text
        assert "#include <" not in text
    if path.suffix == ".cu":
        for word in ("grid", "shared memory", "precision", "reference:"):
            assert word in text.lower(), f"{path.name} does not say: {word}"
