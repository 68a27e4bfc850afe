"""Making the engine's object code: Numba to LLVM IR to an object file. The only way into Numba.

Owns nothing. Runs in a process of its own, once for each machine and kind of model:

    python -m workers.devices.cpu.build < TARGET_AND_SPEC.json > OBJECT
"""

import re
import sys
from typing import Any, Final

import llvmlite.binding as llvm
import msgspec
import numba
from numba import types

from workers.devices.cpu.emit import Library
from workers.devices.cpu.spec import StepSpec
from workers.devices.cpu.step import make_entry
from workers.devices.cpu.target import Target, target_machine

ENTRY: Final = "ds4_cpu_step"  # machine_code.py looks it up


def build_module(target: Target, spec: StepSpec) -> Any:
    """The entry and all it calls as one optimised LLVM module for `target`.

    `ENTRY` has the calling convention of Numba's native functions: int32 f(result pointer, exception
    pointer, int64 control, int64 thread); it never touches the first two in a way that matters.
    """
    library = Library(target)
    signature = types.void(types.int64, types.int64)
    entry = make_entry(library, spec)
    for name in library.names:
        # Numba loads what it compiles; it never calls it, so any address will do for the kernels.
        llvm.add_symbol(name, llvm.address_of_symbol("sched_yield"))
    compiled = numba.cfunc(signature, error_model="numpy")(entry)
    text = compiled.inspect_llvm()
    wrapper = compiled.native_name
    # The C wrapper would need Numba's own run-time symbols: take the function inside it.
    text = re.sub(rf"^define [^\n]*@{re.escape(wrapper)}\(.*?^}}\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = text.replace(wrapper.removeprefix("cfunc."), ENTRY)
    machine = target_machine(target)
    kernels = compile_kernels(library)
    module = llvm.parse_assembly(_for_target(text, target, machine))
    module.link_in(kernels)
    module.verify()
    return module


def compile_kernels(library: Library) -> Any:
    """The library's own functions as an optimised LLVM module."""
    machine = target_machine(library.target)
    module = llvm.parse_assembly(_for_target(str(library.module), library.target, machine))
    _optimise(module, machine)
    return module


def _for_target(text: str, target: Target, machine: Any) -> str:
    """The same module with the target's triple and data layout."""
    text = re.sub(r'^target (datalayout|triple) = ".*"\n', "", text, flags=re.MULTILINE)
    return f'target datalayout = "{machine.target_data}"\ntarget triple = "{target.triple}"\n{text}'


def _optimise(module: Any, machine: Any) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # Kernels are unrolled and vectorised as they are emitted.
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def build_object(target: Target, spec: StepSpec) -> bytes:
    """Object code with the one entry `ENTRY`."""
    return bytes(target_machine(target).emit_object(build_module(target, spec)))


def main() -> None:
    """Read `[target, spec]`, write object code."""
    target, spec = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[Target, StepSpec])
    sys.stdout.buffer.write(build_object(target, spec))


if __name__ == "__main__":
    main()
