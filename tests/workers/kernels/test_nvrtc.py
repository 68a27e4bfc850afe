"""Every kernel becomes machine code for every supported GPU, within its budget of registers and memory.

The only statements about speed that a machine without a GPU can make: nothing spills, nothing lies on a stack, and
enough threads fit on a multiprocessor.
"""

import struct
from typing import Final

import pytest

from ds4.ggml_types import GgmlType
from workers.kernels.nvrtc import ARCHITECTURES, CompilationError, compile_text, read_log, resources
from workers.kernels.sources import FOLDER, launch_bounds, source_text
from workers.quant.repack import FLOAT_TYPES, PACKABLE_TYPES, QUANTISED_TYPES

pytest.importorskip(
    "cuda.bindings.nvrtc",
    reason="NVRTC's bindings are not installed: pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime",
)

Defines = tuple[tuple[str, int], ...]

STACKED: Final = """extern "C" __global__ void __launch_bounds__(32) stacked(int* out, int n) {
    int v[64]; for (int i = 0; i < n; ++i) v[out[i] & 63] = i; out[0] = v[n & 63]; }"""

# The fewest threads, in parts of what a multiprocessor holds. The products keep their operands in registers and
# many loads in flight; attention is bound by its shared memory, of which sm_8x and sm_120 have less than half.
_FEWEST: Final = {
    "typical": 0.5,  # few rows want it
    "vector_1": 0.37,  # several units a warp are in flight
    "vector_2": 0.25,
    "vector_gate_up_1": 0.25,
    "vector_gate_up_2": 0.25,
    "matrix_8": 0.25,  # copies that are under way need no threads
    "matrix_16": 0.25,
    "matrix_32": 0.16,  # sm_120; elsewhere 0.25
    "matrix_64": 0.12,
    "float_vector_1": 0.5,
    "float_vector_4": 0.25,
    "float_matrix": 0.4,
    "attend_row": 0.03,
    "attend_chunk": 0.12,
    "sample": 0.25,
    "rope_append": 0.6,
    "rms_norm": 0.6,  # one block of 1024 where there is room for 1536, as the next
    "adjust": 0.6,
}
_OTHERS: Final = 0.75


def _modules() -> list[tuple[str, Defines]]:
    """Every file with every compile-time parameter that a model may need."""
    found: list[tuple[str, Defines]] = [
        (name, ()) for name in ("prefill.cu", "quantise.cu", "rope_append.cu", "sampling.cu", "seats.cu")
    ]
    found += [("attention.cu", (("HEAD_SIZE", size), ("SPLIT_TOKENS", 128))) for size in (64, 128)]
    found += [("embedding.cu", (("FORMAT", int(kind)),)) for kind in sorted(PACKABLE_TYPES)]
    found += [("float_matmul.cu", (("FORMAT", int(kind)),)) for kind in sorted(FLOAT_TYPES)]
    for kind in sorted(QUANTISED_TYPES):
        found += [(name, (("FORMAT", int(kind)),)) for name in ("quantised_vector.cu", "quantised_matrix.cu")]
    return found


MODULES: Final = _modules()
# All types on the two architectures that differ most; elsewhere one plain and one composed type.
ALL_TYPES_ON: Final = ("sm_80", "sm_120")
SOME_TYPES: Final = (int(GgmlType.F16), int(GgmlType.Q4_1), int(GgmlType.Q6_K))


def _cases() -> list[tuple[str, str, Defines]]:
    return [
        (architecture, name, defines)
        for architecture in ARCHITECTURES
        for name, defines in MODULES
        if architecture in ALL_TYPES_ON
        or "FORMAT" not in dict(defines)
        or dict(defines)["FORMAT"] in SOME_TYPES
    ]


def _name(value: object) -> str:
    return "-".join(str(number) for _, number in value) if isinstance(value, tuple) else str(value)


def test_every_file_is_compiled() -> None:
    assert {name for name, _ in MODULES} == {path.name for path in FOLDER.glob("*.cu")}


@pytest.mark.parametrize(("architecture", "name", "defines"), _cases(), ids=_name)
def test_a_module_fits_its_budget(architecture: str, name: str, defines: Defines) -> None:
    found = resources(name, defines, architecture)
    assert set(found) == set(launch_bounds(name))
    limits = ARCHITECTURES[architecture]
    for entry, used in found.items():
        assert used.spill_bytes == 0, entry
        assert used.stack_bytes == 0, entry
        assert used.shared_bytes <= 48 * 1024, entry
        fewest = _FEWEST.get(entry, _OTHERS)
        assert used.occupancy(limits) >= fewest, f"{entry}: {used}"


# The low 12 bits of an instruction of 16 bytes, the same from Volta to Blackwell, as nvdisasm -hex shows them.
OPCODES: Final = {"HMMA": 0x23C, "IDP": 0x226, "LDGSTS": 0xFAE, "LDSM": 0x83B, "LDL": 0x983, "STL": 0x387}


def instructions(code: bytes) -> set[str]:
    """Which of those that have a name above the machine code holds, in all its kernels together."""
    start, count, names_index = *struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HH", code, 60)
    sections = [struct.unpack_from("<IIQQQQ", code, start + 64 * index) for index in range(count)]
    names = sections[names_index][4]
    found = {
        struct.unpack_from("<H", code, at)[0] & 0xFFF
        for name, _, _, _, offset, size in sections
        if code.startswith(b".text.", names + name)
        for at in range(offset, offset + size, 16)
    }
    return {name for name, opcode in OPCODES.items() if opcode in found}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_120"])
@pytest.mark.parametrize(
    ("name", "defines", "meant"),
    [
        ("quantised_matrix.cu", (("FORMAT", 12),), {"HMMA", "LDGSTS"}),
        ("quantised_vector.cu", (("FORMAT", 12),), {"IDP"}),
        ("attention.cu", (("HEAD_SIZE", 128), ("SPLIT_TOKENS", 128)), {"HMMA", "LDSM", "LDGSTS"}),
        ("float_matmul.cu", (("FORMAT", 1),), {"HMMA"}),
    ],
    ids=["matrix", "vector", "attention", "float"],
)
def test_machine_code_has_the_instructions_that_were_meant(
    architecture: str, name: str, defines: Defines, meant: set[str]
) -> None:
    """Tensor cores, dot products, copies past the registers; and nothing of a thread's own lies in memory."""
    code, _ = compile_text(source_text(name), name, architecture, defines)
    assert instructions(code) == meant


def test_a_stack_is_seen_in_machine_code() -> None:
    code, _ = compile_text(STACKED, "stacked.cu", "sm_90", [])
    assert instructions(code) == {"LDL", "STL"}


def test_an_error_names_the_file_and_the_line() -> None:
    text = source_text("rope_append.cu").replace("positions[row] += 1;", "positions[row] += nonsense;")
    with pytest.raises(CompilationError, match=r'rope_append.cu\(\d+\): error: identifier "nonsense"'):
        compile_text(text, "rope_append.cu", "sm_90", [])


def test_a_kernel_that_uses_its_stack_is_seen() -> None:
    _, log = compile_text(STACKED, "stacked.cu", "sm_90", [])
    assert read_log(log, {"stacked": 32})["stacked"].stack_bytes > 0
