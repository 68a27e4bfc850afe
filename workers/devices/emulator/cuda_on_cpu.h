// The CUDA C++ that our kernels use, as plain C++ for g++.
//
// Owns: names (keywords, built-in variables, intrinsics) and the exported trampolines. Runs in: as
// `fibers.h`. Source: CUDA C++ Programming Guide; only what the kernels need is here.
#pragma once
#include <cmath>

#include "matrix.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static __attribute__((section("emulator_shared")))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// ---- vector types --------------------------------------------------------------------------------
#define EMULATOR_VECTOR(T, NAME)                                                   \
  struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                               \
  struct alignas(4 * sizeof(T)) NAME##4 { T x, y, z, w; };                         \
  static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTOR(float, float)
EMULATOR_VECTOR(int, int)
EMULATOR_VECTOR(unsigned, uint)
EMULATOR_VECTOR(short, short)
EMULATOR_VECTOR(unsigned short, ushort)
#undef EMULATOR_VECTOR

#define threadIdx (emulator::running->thread)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

// ---- synchronisation -----------------------------------------------------------------------------
#define __syncthreads() ((void)emulator::meet_block(0, "__syncthreads", __LINE__))
#define __syncthreads_or(p) (emulator::meet_block(!!(p), "__syncthreads_or", __LINE__) != 0)
#define __syncthreads_count(p) emulator::meet_block(!!(p), "__syncthreads_count", __LINE__)
#define __threadfence() ((void)0)  // blocks run one after the other
#define __trap() emulator::fail("__trap")
static inline void __syncwarp(unsigned mask = ~0u) {
  emulator::meet_warp(mask, 1, "__syncwarp", 0, emulator::no_work);
}

// A lane reads what lane `from` brought; `valid` false: it keeps its own value.
template <class T> static inline T emulator_shuffle(unsigned mask, T v, unsigned from, bool valid, int operation, const char* what) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t mine = 0;
  memcpy(&mine, &v, sizeof v);
  const uint64_t* all = emulator::meet_warp(mask, operation, what, mine, emulator::no_work);
  if (!valid) return v;
  if (!(mask >> from & 1)) emulator::fail("%s reads lane %u, which is not in the mask", what, from);
  memcpy(&v, &all[from], sizeof v);
  return v;
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  const unsigned lane = emulator::running->lane;
  return emulator_shuffle(mask, v, (lane & ~(width - 1)) | (from & (width - 1)), true, 2, "__shfl_sync");
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  const unsigned lane = emulator::running->lane, from = lane ^ bits;
  return emulator_shuffle(mask, v, from & 31, (from & ~(width - 1)) <= (lane & ~(width - 1)), 3, "__shfl_xor_sync");
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  const unsigned lane = emulator::running->lane;
  return emulator_shuffle(mask, v, (lane + by) & 31, (lane & (width - 1)) + by < (unsigned)width, 4, "__shfl_down_sync");
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  const unsigned lane = emulator::running->lane;
  return emulator_shuffle(mask, v, (lane - by) & 31, (lane & (width - 1)) >= by, 5, "__shfl_up_sync");
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* all = emulator::meet_warp(mask, 6, "__ballot_sync", predicate != 0, [mask](uint64_t* values) {
    uint64_t bits = 0;
    for (int l = 0; l < 32; ++l)
      if (mask >> l & 1 && values[l]) bits |= 1u << l;
    for (int l = 0; l < 32; ++l) values[l] = bits;
  });
  return (unsigned)all[emulator::running->lane];
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

// ---- atomics: fibers switch only where they wait, so plain code is atomic ---------------------------
template <class T> static inline T emulator_exchange(T* p, T v) { T old = *p; *p = v; return old; }
static inline int atomicAdd(int* p, int v) { return emulator_exchange(p, *p + v); }
static inline unsigned atomicAdd(unsigned* p, unsigned v) { return emulator_exchange(p, *p + v); }
static inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) { return emulator_exchange(p, *p + v); }
static inline int atomicMin(int* p, int v) { return emulator_exchange(p, *p < v ? *p : v); }
static inline int atomicMax(int* p, int v) { return emulator_exchange(p, *p > v ? *p : v); }
static inline unsigned atomicMax(unsigned* p, unsigned v) { return emulator_exchange(p, *p > v ? *p : v); }
static inline unsigned long long atomicMin(unsigned long long* p, unsigned long long v) { return emulator_exchange(p, *p < v ? *p : v); }
static inline unsigned long long atomicMax(unsigned long long* p, unsigned long long v) { return emulator_exchange(p, *p > v ? *p : v); }
static inline int atomicOr(int* p, int v) { return emulator_exchange(p, *p | v); }

// ---- integers and bits -----------------------------------------------------------------------------
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += (int8_t)((unsigned)a >> 8 * i) * (int8_t)((unsigned)b >> 8 * i);
  return c;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> 4 * i & 15, byte = bytes >> 8 * (s & 7) & 255;
    out |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __float_as_int(float v) { return emulator::same_bits<int>(v); }
static inline unsigned __float_as_uint(float v) { return emulator::same_bits<unsigned>(v); }
static inline float __int_as_float(int v) { return emulator::same_bits<float>(v); }
static inline float __uint_as_float(unsigned v) { return emulator::same_bits<float>(v); }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

// ---- floats ----------------------------------------------------------------------------------------
// Macros where the C library declares a function of the name.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __int2float_rn(int v) { return (float)v; }
static inline int __float2int_rn(float v) { return (int)nearbyintf(v); }

struct __half {
  _Float16 value;
  __half() = default;
};
struct alignas(4) __half2 { __half x, y; };
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
};
static inline float __half2float(__half v) { return (float)v.value; }
static inline __half __float2half_rn(float v) { __half h; h.value = (_Float16)v; return h; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
static inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn((float)a.x.value - (float)b.x.value, (float)a.y.value - (float)b.y.value);
}
static inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn((float)a.x.value * (float)b.x.value, (float)a.y.value * (float)b.y.value);
}
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __floats2half2_rn(fmaf(a.x.value, b.x.value, c.x.value), fmaf(a.y.value, b.y.value, c.y.value));
}
static inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
static inline float __bfloat162float(__nv_bfloat16 v) { return emulator::same_bits<float>((uint32_t)v.bits << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const uint32_t u = emulator::same_bits<uint32_t>(v);
  __nv_bfloat16 b;
  b.bits = v != v ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  return b;
}

// ---- what Python calls -------------------------------------------------------------------------------
namespace emulator {
template <class... A, size_t... I> static inline void unpack(void (*f)(A...), void** cells, std::index_sequence<I...>) {
  f(*(std::remove_cv_t<A>*)cells[I]...);
}
template <class... A> static inline void call(void (*f)(A...), void** cells) {
  unpack(f, cells, std::index_sequence_for<A...>{});
}
template <class T> constexpr char letter() {
  return std::is_pointer<T>::value ? 'p' : std::is_same<T, float>::value ? 'f' : std::is_same<T, int>::value ? 'i'
         : std::is_same<T, unsigned>::value ? 'u' : std::is_same<T, unsigned long long>::value ? 'q' : '?';
}
template <class... A> static const char* signature(void (*)(A...)) {
  static const char letters[] = {letter<A>()..., 0};
  return letters;
}
// Hooks of -fsanitize=alignment,bounds,shift: no sanitizer library is needed.
struct Location { const char* file; uint32_t line, column; };
}  // namespace emulator
#define EMULATOR_HOOK(name, what, ...)                                                                \
  extern "C" [[noreturn]] __attribute__((visibility("hidden"))) void name(emulator::Location* l, ##__VA_ARGS__) { \
    emulator::fail("%s at %s:%u", what, l->file, l->line);                                             \
  }
EMULATOR_HOOK(__ubsan_handle_type_mismatch_v1_abort, "misaligned access", void*)
EMULATOR_HOOK(__ubsan_handle_out_of_bounds_abort, "array index out of bounds", void*)
EMULATOR_HOOK(__ubsan_handle_shift_out_of_bounds_abort, "shift count too large", void*, void*)
#undef EMULATOR_HOOK

// All other symbols stay hidden: the C library also has a function called `advance`.
#define EMULATOR_API extern "C" __attribute__((visibility("default")))
EMULATOR_API void emulator_set_order(int order) { emulator::thread_order = order; }
EMULATOR_API const char* emulator_message() { return emulator::message; }
#define EMULATOR_EXPORT(kernel)                                                                       \
  EMULATOR_API int run_##kernel(const unsigned* grid, unsigned block, unsigned shared, void** cells) { \
    return emulator::launch(#kernel, [](void** c) { emulator::call(&kernel, c); }, grid, block, shared, cells); \
  }                                                                                                    \
  EMULATOR_API const char* signature_##kernel() { return emulator::signature(&kernel); }
