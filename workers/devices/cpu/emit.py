"""Writing LLVM instructions from Numba functions: sixteen-lane vectors, memory by address, dot products.

Owns nothing. Runs in the worker process while the engine's machine code is made.

A kernel is a Python function that appends instructions through an `Emitter`. `Library.inline` makes of
it something that jitted functions call like any other and that costs no call, `Library.kernel` a function
of the library's own module: LLVM then optimises it once, and not in every jitted function around it.
Vectors always have 16 lanes; LLVM splits them on narrower machines. Addresses are 64-bit integers:
nothing here knows arrays.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar, cast

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workers.devices.cpu.target import Isa, Target

Value: TypeAlias = Any  # an llvmlite value: the package ships no types
Emission: TypeAlias = Callable[..., Value]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
F16: Final = ir.HalfType()
F32: Final = ir.FloatType()
F64: Final = ir.DoubleType()
LANES: Final = 16
V16F32: Final = ir.VectorType(F32, 16)
V16I32: Final = ir.VectorType(I32, 16)
V16I16: Final = ir.VectorType(I16, 16)
V16I8: Final = ir.VectorType(I8, 16)
V16F16: Final = ir.VectorType(F16, 16)
V32I16: Final = ir.VectorType(I16, 32)
V64I8: Final = ir.VectorType(I8, 64)

# Adding and subtracting 1.5 * 2^23 rounds a small float32 to the nearest even whole number; the low
# bits of the sum are that number. No conversion instruction is needed, nor defined for NaN.
_ROUNDING: Final = 12582912.0
# 2^x on [-1/2, 1/2], highest power first: least largest relative error, 9e-8, of those with 1 at 0.
_EXP2: Final = (0.00132647273, 0.00967151279, 0.0555073374, 0.240222421, 0.693146978, 1.0)

LOG2_E: Final = 1.44269504

ADDRESS: Final = types.int64
FLOAT: Final = types.float32
DOUBLE: Final = types.float64
VOID: Final = types.void


def jit(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile with Numba when first called from jitted code: no GIL, no checks, IEEE arithmetic in order."""
    compiled = numba.njit(
        nogil=True,
        boundscheck=False,
        fastmath=False,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )(function)
    return cast("Callable[Parameters, Result]", compiled)


class Library:
    """The kernels of one target. Mutated only while its kernels are defined."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.module = ir.Module("ds4_cpu_kernels")
        self.module.triple = target.triple

    @property
    def names(self) -> list[str]:
        """Names of the kernels' functions."""
        return [function.name for function in self.module.functions if not function.is_declaration]

    def inline(self, *arguments: Any, returns: Any = VOID) -> Callable[[Emission], Callable[..., Any]]:
        """Decorator: a function `(emitter, *values)` that emits instructions becomes callable from jitted code."""

        def decorate(emit: Emission) -> Callable[..., Any]:
            return _as_intrinsic(self.target, emit, arguments, returns)

        return decorate

    def kernel(self, *arguments: Any, returns: Any = VOID) -> Callable[[Emission], Callable[..., Any]]:
        """The same for large pieces: emitted once, as a function that jitted code calls."""

        def decorate(emit: Emission) -> Callable[..., Any]:
            name = f"ds4_{emit.__name__}_{len(self.module.functions)}"
            kinds = [_LLVM_TYPES[argument] for argument in arguments]
            returned = _LLVM_TYPES[returns]
            function = ir.Function(self.module, ir.FunctionType(returned, kinds), name)
            builder = ir.IRBuilder(function.append_basic_block("entry"))
            result = emit(Emitter(builder, self.target), *function.args)
            if returns is VOID:
                builder.ret_void()
            else:
                builder.ret(result)

            def call(e: Emitter, *values: Value) -> Value:
                return e.call(name, returned, *values)

            return _as_intrinsic(self.target, call, arguments, returns)

        return decorate


_LLVM_TYPES: Final = {ADDRESS: I64, FLOAT: F32, DOUBLE: F64, VOID: ir.VoidType()}


def _as_intrinsic(
    target: Target, emit: Emission, arguments: Sequence[Any], returns: Any
) -> Callable[..., Any]:
    def typed(*_: Any) -> tuple[Any, Callable[..., Value]]:
        def generate(context: Any, builder: Any, _signature: Any, values: Sequence[Value]) -> Value:
            result = emit(Emitter(builder, target), *values)
            return context.get_dummy_value() if returns is VOID else result

        return returns(*arguments), generate

    # Numba binds arguments by name; the first parameter is its typing context.
    names = ["context", *(f"argument_{index}" for index in range(len(arguments)))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    typed.__signature__ = signature  # type: ignore[attr-defined]
    typed.__name__ = emit.__name__
    return cast("Callable[..., Any]", intrinsic(typed))


@lru_cache(maxsize=2)
def _dot_takes_words(name: str, operand: str) -> bool:
    """Older LLVM declares the dot products over 32-bit lanes, newer over what they are; its verifier tells."""
    function = f"@llvm.x86.avx512.{name}.512"
    source = (
        f"declare <16 x i32> {function}(<16 x i32>, {operand}, {operand})\n"
        f"define <16 x i32> @f(<16 x i32> %a, {operand} %b) {{\n"
        f"%r = call <16 x i32> {function}(<16 x i32> %a, {operand} %b, {operand} %b)\n"
        "ret <16 x i32> %r }"
    )
    try:
        llvm.parse_assembly(source).verify()
    except RuntimeError:
        return True
    return False


class Emitter:
    """Appends instructions at a builder's place. Lives for one kernel."""

    def __init__(self, builder: Any, target: Target) -> None:
        self.builder = builder
        self.target = target

    # -- constants, variables, loops

    def whole(self, value: int) -> Value:
        """A 64-bit constant."""
        return ir.Constant(I64, value)

    def floats(self, value: float) -> Value:
        """Sixteen equal float32 constants."""
        return ir.Constant(V16F32, [value] * LANES)

    def integers(self, value: int) -> Value:
        """Sixteen equal int32 constants."""
        return ir.Constant(V16I32, [value] * LANES)

    def variable(self, initial: Value) -> Value:
        """A variable that LLVM keeps in a register where it can; set to `initial` here."""
        slot = cgutils.alloca_once(self.builder, initial.type)
        self.builder.store(initial, slot)
        return slot

    def get(self, variable: Value) -> Value:
        """The variable's value."""
        return self.builder.load(variable)

    def set(self, variable: Value, value: Value) -> None:
        """Change the variable."""
        self.builder.store(value, variable)

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """Repeat the body for index 0 .. count - 1."""
        with cgutils.for_range(self.builder, count, intp=I64) as loop:
            yield loop.index

    # -- memory

    def address(self, base: Value, *offsets: Value | int) -> Value:
        """Sum of a base and offsets in bytes."""
        for offset in offsets:
            if isinstance(offset, int):
                if offset == 0:
                    continue
                offset = self.whole(offset)
            base = self.builder.add(base, offset)
        return base

    def times(self, value: Value, factor: Value | int) -> Value:
        """Product of 64-bit integers."""
        return self.builder.mul(value, self.whole(factor) if isinstance(factor, int) else factor)

    def load(self, address: Value, kind: Any, align: int = 1) -> Value:
        """The value of type `kind` at an address."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        """Write a value at an address."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    def load_floats(self, address: Value) -> Value:
        """Sixteen float32."""
        return self.load(address, V16F32, 4)

    def spread_float(self, address: Value) -> Value:
        """The float32 at an address in all lanes."""
        return self.splat(self.load(address, F32, 4))

    def load_halves(self, address: Value) -> Value:
        """Sixteen float16 as float32."""
        return self.half_to_float(self.load(address, V16I16, 2))

    def prefetch(self, address: Value, level: int = 1) -> None:
        """Ask for a cache line that will be read, down to the cache of `level`; any address will do."""
        place = self.builder.inttoptr(address, I8.as_pointer())
        how = [ir.Constant(I32, value) for value in (0, 4 - level, 1)]  # to read, locality, data
        self.call("llvm.prefetch.p0", ir.VoidType(), place, *how)

    # -- arithmetic

    def call(self, name: str, returns: Any, *arguments: Value) -> Value:
        """Call an LLVM intrinsic or a function of the process."""
        function = self.builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(returns, [argument.type for argument in arguments])
            function = ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """A * b + c, rounded once where the machine can."""
        if self.target.has_fused_multiply_add:
            return self.call("llvm.fma.v16f32", V16F32, a, b, c)
        return self.builder.fadd(self.builder.fmul(a, b), c)

    def add_product(self, variable: Value, a: Value, b: Value) -> None:
        """Variable += a * b."""
        self.set(variable, self.fma(a, b, self.get(variable)))

    def maximum(self, a: Value, b: Value) -> Value:
        """Lane-wise larger value; b where either is a NaN. One instruction, where IEEE's maximum takes three."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        """Lane-wise smaller value; b where either is a NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def largest(self, a: Value) -> Value:
        """The largest lane, of lanes that are numbers."""
        width = LANES
        while width > 1:
            width //= 2
            a = self.maximum(self.lanes(a, range(width)), self.lanes(a, range(width, 2 * width)))
        return self.builder.extract_element(a, ir.Constant(I32, 0))

    def largest_magnitude(self, a: Value, b: Value) -> Value:
        """The largest |x| of two vectors, NaN where one is there: magnitudes compare as whole numbers do."""
        low, high = (
            self.builder.and_(self.builder.bitcast(vector, V16I32), self.integers(0x7FFFFFFF))
            for vector in (a, b)
        )
        larger = self.builder.select(self.builder.icmp_signed(">", low, high), low, high)
        return self.builder.bitcast(self.call("llvm.vector.reduce.smax.v16i32", I32, larger), F32)

    def total(self, a: Value) -> Value:
        """Sum of the lanes, pairwise: the order is fixed on every machine."""
        width = LANES
        while width > 1:
            width //= 2
            a = self.builder.fadd(self.lanes(a, range(width)), self.lanes(a, range(width, 2 * width)))
        return self.builder.extract_element(a, ir.Constant(I32, 0))

    def round(self, a: Value) -> tuple[Value, Value]:
        """Nearest whole numbers of small values, as float32 and as int32."""
        shifted = self.builder.fadd(a, self.floats(_ROUNDING))
        bits = self.builder.bitcast(shifted, V16I32)
        origin = self.builder.bitcast(self.floats(_ROUNDING), V16I32)
        return self.builder.fsub(shifted, self.floats(_ROUNDING)), self.builder.sub(bits, origin)

    def exp(self, x: Value) -> Value:
        """e^x to about 1e-7 relative, of values clamped to [-87, 87]; exactly 1 at 0.

        Cody and Waite's reduction by ln 2 in two parts, then a polynomial of degree 6.
        """
        x = self.minimum(self.maximum(x, self.floats(-87.0)), self.floats(87.0))
        whole, exponent = self.round(self.builder.fmul(x, self.floats(LOG2_E)))
        rest = self.fma(whole, self.floats(-0.693145752), x)
        rest = self.fma(whole, self.floats(-1.42860677e-6), rest)
        value = self.floats(1 / 720)
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            value = self.fma(value, rest, self.floats(coefficient))
        power = self.builder.shl(self.builder.add(exponent, self.integers(127)), self.integers(23))
        return self.builder.fmul(value, self.builder.bitcast(power, V16F32))

    def exp2(self, x: Value) -> Value:
        """2^x to about 2e-7 relative, of x up to 126; exactly 1 at 0, 2^-126 of all below, NaN of NaN."""
        x = self.maximum(self.floats(-126.0), x)
        whole, exponent = self.round(x)
        rest = self.builder.fsub(x, whole)
        value = self.floats(_EXP2[0])
        for coefficient in _EXP2[1:]:
            value = self.fma(value, rest, self.floats(coefficient))
        power = self.builder.shl(self.builder.add(exponent, self.integers(127)), self.integers(23))
        return self.builder.fmul(value, self.builder.bitcast(power, V16F32))

    # -- lanes

    def splat(self, scalar: Value, count: int = LANES) -> Value:
        """A scalar in all lanes."""
        empty = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
        first = self.builder.insert_element(empty, scalar, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, count), [0] * count)
        return self.builder.shuffle_vector(first, empty, zeros)

    def lanes(self, vector: Value, indices: Sequence[int]) -> Value:
        """The named lanes, in that order."""
        mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def join(self, parts: Sequence[Value]) -> Value:
        """Vectors of equal length, one after the other; their number is a power of two."""
        joined = list(parts)
        while len(joined) > 1:
            count = joined[0].type.count
            mask = ir.Constant(ir.VectorType(I32, 2 * count), list(range(2 * count)))
            joined = [
                self.builder.shuffle_vector(left, right, mask)
                for left, right in zip(joined[::2], joined[1::2], strict=True)
            ]
        return joined[0]

    # -- half precision

    def half_to_float(self, bits: Value) -> Value:
        """Sixteen float16, given as int16, widened. Without hardware, infinity and NaN come out as 2^16."""
        if self.target.has_half_conversion:
            return self.builder.fpext(self.builder.bitcast(bits, V16F16), V16F32)
        wide = self.builder.zext(bits, V16I32)
        magnitude = self.builder.shl(self.builder.and_(wide, self.integers(0x7FFF)), self.integers(13))
        scaled = self.builder.fmul(self.builder.bitcast(magnitude, V16F32), self.floats(2.0**112))
        sign = self.builder.shl(self.builder.and_(wide, self.integers(0x8000)), self.integers(16))
        return self.builder.bitcast(self.builder.or_(self.builder.bitcast(scaled, V16I32), sign), V16F32)

    # -- dot products

    def dot(self, sums: Value, weights: Value, values: Value, *, signed_weights: bool) -> Value:
        """sums[i] += weights[4i .. 4i+3] . values[4i .. 4i+3], exactly.

        `sums` [16] int32, `weights` and `values` [64] 8 bits; values are signed and never -128. Weights
        are below 128 unless the target's dot product takes unsigned ones, or signed where so flagged.
        """
        isa = self.target.isa
        if isa in (Isa.AMX, Isa.AVX512_VNNI):
            return self._vnni("vpdpbusd", 512, sums, weights, values)
        out = []
        for part, left, right in self._pieces(sums, weights, values):
            if isa is Isa.AVX_VNNI:
                out.append(self._vnni("vpdpbusd", 256, part, left, right))
            elif isa is Isa.AVX2:
                out.append(self._vpmaddubsw(part, left, right, signed_weights=signed_weights))
            elif isa is Isa.NEON_DOT:
                name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
                out.append(self.call(name, part.type, part, left, right))
            else:
                out.append(self._plain_dot(part, left, right))
        return self.join(out)

    def dot_pairs(self, sums: Value, left: Value, right: Value) -> Value:
        """sums[i] += left[2i] * right[2i] + left[2i+1] * right[2i+1] of [32] int16, none of them -32768."""
        isa = self.target.isa
        if isa in (Isa.AMX, Isa.AVX512_VNNI):
            return self._vnni("vpdpwssd", 512, sums, left, right)
        out = []
        for part, a, b in self._pieces(sums, left, right):
            if isa is Isa.AVX_VNNI:
                out.append(self._vnni("vpdpwssd", 256, part, a, b))
            elif isa is Isa.AVX2:
                out.append(self.builder.add(part, self.call("llvm.x86.avx2.pmadd.wd", part.type, a, b)))
            else:
                out.append(self._plain_dot(part, a, b))
        return self.join(out)

    def _pieces(self, sums: Value, left: Value, right: Value) -> Iterator[tuple[Value, Value, Value]]:
        """The operands of a dot product cut to the target's vectors."""
        width = LANES // (4 if self.target.isa is Isa.NEON_DOT else 2)
        per_sum = left.type.count // LANES
        for first in range(0, LANES, width):
            operands = range(per_sum * first, per_sum * (first + width))
            part = self.lanes(sums, range(first, first + width))
            yield part, self.lanes(left, operands), self.lanes(right, operands)

    def _vnni(self, name: str, bits: int, sums: Value, left: Value, right: Value) -> Value:
        if _dot_takes_words(name, "<64 x i8>" if name == "vpdpbusd" else "<32 x i16>"):
            left, right = (self.builder.bitcast(operand, sums.type) for operand in (left, right))
        return self.call(f"llvm.x86.avx512.{name}.{bits}", sums.type, sums, left, right)

    def _vpmaddubsw(self, sums: Value, weights: Value, values: Value, *, signed_weights: bool) -> Value:
        # Pairs are summed in 16 bits with saturation: 2 * 128 * 127 and 2 * 127 * 127 just fit.
        if signed_weights:
            values = self.call("llvm.x86.avx2.psign.b", values.type, values, weights)
            zero = ir.Constant(weights.type, None)
            negative = self.builder.icmp_signed("<", weights, zero)
            weights = self.builder.select(negative, self.builder.sub(zero, weights), weights)
        pairs_type = ir.VectorType(I16, 16)
        pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", pairs_type, weights, values)
        ones = ir.Constant(pairs_type, [1] * 16)
        return self.builder.add(sums, self.call("llvm.x86.avx2.pmadd.wd", sums.type, pairs, ones))

    def _plain_dot(self, sums: Value, weights: Value, values: Value) -> Value:
        wide = ir.VectorType(I32, weights.type.count)
        products = self.builder.mul(self.builder.sext(weights, wide), self.builder.sext(values, wide))
        per_sum = weights.type.count // sums.type.count
        for part in range(per_sum):
            lanes = range(part, weights.type.count, per_sum)
            sums = self.builder.add(sums, self.lanes(products, lanes))
        return sums
