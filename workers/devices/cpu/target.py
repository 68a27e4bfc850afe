"""Which instructions the kernels are made of, and how object code for them is emitted.

Owns nothing. Runs in the worker process, at start. Imports llvmlite only.
"""

import ctypes
import sys
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

import llvmlite.binding as llvm
import msgspec


class Isa(StrEnum):
    """How four 8-bit products are summed into one 32-bit lane; best first on each architecture."""

    AMX = "amx"  # AVX512_VNNI, and tile registers for sixteen rows and more
    AVX512_VNNI = "avx512-vnni"  # vpdpbusd on 512 bits, 32 registers
    AVX_VNNI = "avx-vnni"  # vpdpbusd on 256 bits
    AVX2 = "avx2"  # vpmaddubsw, with signs moved to the activations
    NEON_DOT = "neon-dot"  # sdot
    PLAIN = "plain"  # multiplications and additions that LLVM chooses


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A machine to emit code for."""

    isa: Isa
    triple: str
    cpu: str
    features: str

    @property
    def has_unsigned_dot(self) -> bool:
        """The dot product is unsigned x signed, so that signed weights are stored with an offset of 128."""
        return self.isa in (Isa.AMX, Isa.AVX512_VNNI, Isa.AVX_VNNI)

    @property
    def has_wide_registers(self) -> bool:
        """Thirty-two registers of sixteen lanes: large register tiles pay."""
        return self.isa in (Isa.AMX, Isa.AVX512_VNNI)

    @property
    def has_tiles(self) -> bool:
        """Tile registers multiply blocks of sixteen rows (`tiles.py`)."""
        return self.isa is Isa.AMX

    @property
    def has_half_conversion(self) -> bool:
        """Half precision converts in hardware."""
        return self.isa is not Isa.PLAIN or not self.triple.startswith("x86_64")

    @property
    def has_fused_multiply_add(self) -> bool:
        """A fused multiply-add is one instruction and not a library call."""
        return self.has_half_conversion


_AVX512_VNNI_FEATURES: Final = ("avx512f", "avx512bw", "avx512vl", "avx512vnni", "f16c", "fma")
_X86_FEATURES: Final = (
    (Isa.AMX, ("amx-tile", "amx-int8", *_AVX512_VNNI_FEATURES)),
    (Isa.AVX512_VNNI, _AVX512_VNNI_FEATURES),
    (Isa.AVX_VNNI, ("avxvnni", "avx2", "f16c", "fma")),
    (Isa.AVX2, ("avx2", "f16c", "fma")),
)


def host_target() -> Target:
    """The machine we run on, with the best instructions it has."""
    _initialise()
    triple = llvm.get_default_triple()
    flags = llvm.get_host_cpu_features()
    return Target(
        isa=_best_isa(triple, {name for name, present in flags.items() if present}),
        triple=triple,
        cpu=llvm.get_host_cpu_name(),
        features=flags.flatten(),
    )


def _best_isa(triple: str, features: set[str]) -> Isa:
    if triple.startswith("x86_64"):
        for isa, needed in _X86_FEATURES:
            if features.issuperset(needed) and (isa is not Isa.AMX or _may_use_tiles()):
                return isa
    elif triple.startswith(("aarch64", "arm64")) and ("dotprod" in features or "apple" in triple):
        return Isa.NEON_DOT
    return Isa.PLAIN


@lru_cache(maxsize=1)
def _may_use_tiles() -> bool:
    """Ask Linux for the tile registers' state, for every thread of this process; False where it refuses.

    Source: Documentation/arch/x86/xstate.rst of Linux.
    """
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def restricted_target(isa: Isa) -> Target:
    """A target that is held to `isa`, for tests: emitted anywhere, run where the host is a superset."""
    _initialise()
    host = host_target()
    if isa is host.isa:
        return host
    x86 = host.triple if host.triple.startswith("x86_64") else "x86_64-unknown-linux-gnu"
    match isa:
        case Isa.AMX:
            return Target(isa=isa, triple=x86, cpu="sapphirerapids", features="")
        case Isa.AVX512_VNNI:
            return Target(isa=isa, triple=x86, cpu="cascadelake", features="")
        case Isa.AVX_VNNI if host.isa in (Isa.AMX, Isa.AVX512_VNNI):
            # The same intrinsic, in the encoding that this host has.
            return Target(isa=isa, triple=x86, cpu=host.cpu, features=host.features)
        case Isa.AVX_VNNI:
            return Target(isa=isa, triple=x86, cpu="alderlake", features="")
        case Isa.AVX2:
            return Target(isa=isa, triple=x86, cpu="haswell", features="")
        case Isa.NEON_DOT:
            return Target(isa=isa, triple="aarch64-unknown-linux-gnu", cpu="neoverse-n1", features="")
        case Isa.PLAIN:
            cpu = "x86-64" if host.triple.startswith("x86_64") else "generic"
            return Target(isa=isa, triple=host.triple, cpu=cpu, features="")


def _initialise() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def target_machine(target: Target) -> Any:
    """LLVM's code generator for `target`."""
    _initialise()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="default"
    )
