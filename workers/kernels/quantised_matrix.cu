// Any number of rows times a quantised matrix, on the tensor cores with float16 operands.
//
// Weights are operand A (16 outputs), unpacked to float16 in registers once for all rows of the block; activations
// are operand B (8 rows), straight from memory in fragment order. A block has 8 tiles of 16 outputs: four pairs
// of warps, a warp two tiles and one of two slices of the inputs. Weights come through shared memory, each warp's
// own, by copies that are several units ahead: that keeps some 40 KiB in flight on a multiprocessor.
//
// Precision: a weight is rounded to float16 (11 bits; scale and minimum are too), as activations were; products are
// exact, sums float32 on the tensor cores. WEIGHT_GAIN moves weights away from the numbers that float16 has few bits for:
// they keep 11 bits from 4e-6 to 4096, which is far past what models have.
// Order of a row's sum, the same in every kernel of this file: inputs are cut into 2 gridDim.z slices of whole units,
// a slice adds in order of inputs, pairs of slices are added, then these in order. gridDim.z depends on
// the matrix alone, so all kernels give the same bits for a row, whatever the batch: any may be chosen by speed.
//
// Grid: (tiles / 8, rows / ROWS, splits of the inputs). Shared memory: static, 48 KiB at most.
// scratch: float [splits][num_rows][16 tiles], tickets: int [grid x * grid y], zeros before and after; both only where
// there are splits. Assumes: activations as in matmul.cuh. Reference: tests/workers/kernels/reference.py,
// `halved_matmul`. Source: the split of weights and rows is Marlin's (arXiv 2408.11743); the rest is this project's.
#include "formats.cuh"

#define PAIRS_OF_WARPS 4
#define WARPS (2 * PAIRS_OF_WARPS)
#define WARP_TILES 2
#define BLOCK_TILES (PAIRS_OF_WARPS * WARP_TILES)
#define WEIGHT_GAIN 16.0f

// ---- weights in flight -------------------------------------------------------------------------------------
constexpr int OTHER_BYTES = HIGH_BYTES + 8 * SCALE_BYTES_OF_G + 8 * SUPER_BYTES_OF_G;
constexpr int UNIT_BYTES = VALUE_BYTES + OTHER_BYTES;
constexpr int AFFORDED_STAGES = (48 * 1024 - 64) / (WARPS * WARP_TILES * UNIT_BYTES);
constexpr int STAGES = AFFORDED_STAGES < 6 ? AFFORDED_STAGES : 6;
constexpr int STAGE_BYTES = STAGES * WARPS * WARP_TILES * UNIT_BYTES;
#define PITCH (TILE_OUTPUTS + 1)  // of a row of sums
#define SUM_BYTES(N) (BLOCK_TILES * 8 * (N) * PITCH * 4)
constexpr int shared_bytes(int n) { return STAGE_BYTES > SUM_BYTES(n) + 16 ? STAGE_BYTES : SUM_BYTES(n) + 16; }
static_assert(STAGES >= 2 && OTHER_BYTES <= 512 && OTHER_BYTES % 16 == 0, "one copy a lane holds all but the values");

// What a lane copies of the units of one tile: 16 bytes of values (or twice that), and 16 of all else if there are any.
struct Source {
  const u8 *values, *other;
  int shift, step;  // of `other`: it goes on by `step` bytes every 2^shift units
};
__device__ __forceinline__ Source source_of(const Matrix& m, int tile) {
  const int lane = threadIdx.x & 31;
  const Planes from = planes_of(m, tile, 0);
  int at = 16 * lane;
  Source s = {from.values + at, from.high + at, 0, HIGH_BYTES};
  if ((at -= HIGH_BYTES) >= 0) s.other = from.scales + at, s.step = 8 * SCALE_BYTES_OF_G;
  if ((at -= 8 * SCALE_BYTES_OF_G) >= 0) s.other = from.super + at, s.step = 8 * SUPER_BYTES_OF_G, s.shift = 2;
  return s;
}
__device__ __forceinline__ void fetch_unit(u8* to, const Source& from, int unit) {
  const int at = 16 * (threadIdx.x & 31);
  const u8* values = from.values + (size_t)unit * VALUE_BYTES;
  if (VALUE_BYTES >= 512 || at < VALUE_BYTES) copy_async_16(to + at, values, true);
  if constexpr (VALUE_BYTES == 1024) copy_async_16(to + 512 + at, values + 512, true);
  if (at < OTHER_BYTES) copy_async_16(to + VALUE_BYTES + at, from.other + (size_t)(unit >> from.shift) * from.step, true);
}
__device__ __forceinline__ Planes fetched(const u8* unit) {
  const u8* other = unit + VALUE_BYTES;
  return {unit, other, other + HIGH_BYTES, other + HIGH_BYTES + 8 * SCALE_BYTES_OF_G};
}

// ---- weights as float16 ----------------------------------------------------------------------------------------
constexpr bool SIGNED = BYTES || TABLE || CODEBOOK;
// A byte q in the low bits of 1024.0 is 1024 + q exactly, of a signed one q + 128.
#define PLUS_1024 0x64646464u
#define HALF_OF(n) (0x6400u + (n))
constexpr u32 ZERO_OF_BYTE = HALF_OF(SIGNED ? 128 : OFFSET);

// Scale and minimum of one output and 16 inputs, both twice, times WEIGHT_GAIN.
struct HalfScale {
  __half2 scale, min;
};
__device__ __forceinline__ __half2 as_halves(u32 bits) { return *(const __half2*)&bits; }
__device__ __forceinline__ u32 as_bits(__half2 v) { return *(const u32*)&v; }
__device__ __forceinline__ __half2 both(u32 bits, int high) { return as_halves(__byte_perm(bits, 0, high ? 0x3232 : 0x1010)); }
__device__ __forceinline__ HalfScale half_scale_of(const Unit& u, u32 plus_1024, int output, int block, int half) {
  const __half2 gain = __floats2half2_rn(WEIGHT_GAIN, WEIGHT_GAIN);
  HalfScale s;
  if constexpr (one_of(GGML_Q4_K, GGML_Q5_K)) {  // (scale, min) of 256 inputs times those of 32
    const __half2 super = __hmul2(as_halves(u.super[output]), __floats2half2_rn(WEIGHT_GAIN, -WEIGHT_GAIN));
    const __half2 raised = as_halves(__byte_perm(u.scales[output], plus_1024, block ? 0x4342 : 0x4140));
    const u32 product = as_bits(__hmul2(super, __hsub2(raised, as_halves(HALF_OF(0) << 16 | HALF_OF(0)))));
    s.scale = both(product, 0);
    s.min = both(product, 1);
  } else if constexpr (one_of(GGML_Q6_K, GGML_Q3_K)) {
    const __half2 super = __hmul2(both(u.super[0], output), gain);
    const int byte = 2 * block + half;
    const __half2 raised = as_halves(__byte_perm(u.scales[output] ^ 0x80808080u, plus_1024, 0x4040 + byte * 0x0101));
    s.scale = __hmul2(super, __hsub2(raised, as_halves(HALF_OF(128) << 16 | HALF_OF(128))));
    s.min = s.scale;
  } else if constexpr (one_of(GGML_Q4_1, GGML_Q5_1)) {
    const u32 pair = as_bits(__hmul2(as_halves(block ? u.scales[2 * output + 1] : u.scales[2 * output]), gain));
    s.scale = both(pair, 0);
    s.min = both(pair, 1);
  } else if constexpr (one_of(GGML_Q4_0, GGML_Q5_0, GGML_Q8_0, GGML_IQ4_NL)) {
    s.scale = __hmul2(both(u.scales[output], block), gain);
    s.min = s.scale;
  } else {
    const Scale exact = scale_of(u, output, block);
    const float scale = __fmul_rn(exact.scale[half], WEIGHT_GAIN), minimum = __fmul_rn(exact.min[half], WEIGHT_GAIN);
    s.scale = __floats2half2_rn(scale, scale);
    s.min = __floats2half2_rn(minimum, minimum);
  }
  return s;
}

__device__ __forceinline__ u32 unpack_pair(u32 bytes, u32 plus_1024, u32 selector, const HalfScale& s) {
  const __half2 q = __hsub2(as_halves(__byte_perm(bytes, plus_1024, selector)), as_halves(ZERO_OF_BYTE << 16 | ZERO_OF_BYTE));
  return as_bits(HAS_MIN ? __hfma2(q, s.scale, s.min) : __hmul2(q, s.scale));
}

// ---- the product ------------------------------------------------------------------------------------------------
template <int N>
__device__ __forceinline__ void add_units(float (&acc)[WARP_TILES][N][4], u8* stages, const Matrix& m, int first_tile,
                                          int begin, int end, const u8* values, int first_row, int num_rows) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  Source sources[WARP_TILES];
#pragma unroll
  for (int i = 0; i < WARP_TILES; ++i) sources[i] = source_of(m, min(first_tile + i, m.num_tiles - 1));
  u8 *next = stages, *current = stages, *const last = stages + STAGES * WARP_TILES * UNIT_BYTES;
  const auto go_on = [&](u8*& stage) {
    stage += WARP_TILES * UNIT_BYTES;
    if (stage == last) stage = stages;
  };
  const auto fetch = [&](int unit) {
    if (unit < end)
#pragma unroll
      for (int i = 0; i < WARP_TILES; ++i) fetch_unit(next + i * UNIT_BYTES, sources[i], unit);
    copy_async_commit();
    go_on(next);
  };
  const u32 plus_1024 = PLUS_1024 ^ (u32)(m.num_units >> 31);  // no constant to the compiler, which would copy it again and again
  u32 rows[N];  // bytes
#pragma unroll
  for (int n = 0; n < N; ++n)
    rows[n] = (min(first_row + 8 * n + g, num_rows - 1) * m.num_units + begin) * (2 * UNIT_INPUTS) + 16 * t;
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(begin + s);
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
    copy_async_wait<STAGES - 2>();
    __syncwarp();  // the unit is here for all lanes, and none still reads the one that is refilled next
    fetch(unit + STAGES - 1);
    Unit u[WARP_TILES];
#pragma unroll
    for (int i = 0; i < WARP_TILES; ++i) read_unit<false>(u[i], fetched(current + i * UNIT_BYTES));
    go_on(current);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      uint4 b[N];
#pragma unroll
      for (int n = 0; n < N; ++n) b[n] = *(const uint4*)(values + rows[n] + UNIT_INPUTS * block);
#pragma unroll
      for (int i = 0; i < WARP_TILES; ++i) {
        u32 bytes[4];
        operand(bytes, u[i], m, block);
        HalfScale scales[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 a[4];  // (g, first two of a lane's four inputs), (g + 8, first two), (g, last two), (g + 8, last two)
#pragma unroll
          for (int o = 0; o < 2; ++o) {
            if (HALVES || half == 0) scales[o] = half_scale_of(u[i], plus_1024, o, block, half);
            const u32 word = SIGNED ? bytes[o + 2 * half] ^ 0x80808080u : bytes[o + 2 * half];
            a[o] = unpack_pair(word, plus_1024, 0x4140, scales[o]);
            a[o + 2] = unpack_pair(word, plus_1024, 0x4342, scales[o]);
          }
#pragma unroll
          for (int n = 0; n < N; ++n) {
            const u32 own[2] = {half ? b[n].z : b[n].x, half ? b[n].w : b[n].y};
            mma_f16(acc[i][n], a, own);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) rows[n] += 2 * UNIT_INPUTS;
  }
  copy_async_wait<0>();
}

template <int N>
__device__ __forceinline__ void product(u8* shared, float* out, int out_stride, int out_offset, const void* weight,
                                        const void* codebook, const float* bias, int num_outputs, int num_tiles,
                                        int num_units, const u8* values, const float* row_scales, int num_rows,
                                        int epilogue, float* scratch, int* tickets) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int pair = warp >> 1, slice = blockIdx.z * 2 + (warp & 1), num_slices = gridDim.z * 2;
  const int first_tile = blockIdx.x * BLOCK_TILES + pair * WARP_TILES, first_row = blockIdx.y * 8 * N;
  const Matrix m = open_matrix(weight, codebook, num_tiles, num_units);
  float acc[WARP_TILES][N][4];
#pragma unroll
  for (int i = 0; i < WARP_TILES; ++i)
#pragma unroll
    for (int n = 0; n < N; ++n) acc[i][n][0] = acc[i][n][1] = acc[i][n][2] = acc[i][n][3] = 0;
  add_units<N>(acc, shared + warp * STAGES * WARP_TILES * UNIT_BYTES, m, first_tile, slice * num_units / num_slices,
               (slice + 1) * num_units / num_slices, values, first_row, num_rows);

  float(*sums)[8 * N][PITCH] = (float(*)[8 * N][PITCH])shared;  // [tile of the block]
  const auto each = [&](auto use) {
#pragma unroll
    for (int i = 0; i < WARP_TILES; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) use(acc[i][n][e], sums[pair * WARP_TILES + i][8 * n + 2 * t + (e & 1)][g + 8 * (e >> 1)]);
  };
  __syncthreads();  // nobody reads weights there any more
  if (warp & 1) each([](float own, float& cell) { cell = own; });
  __syncthreads();
  if (!(warp & 1)) each([](float own, float& cell) { cell = __fadd_rn(own, cell); });
  __syncthreads();

  const int first = blockIdx.x * BLOCK_TILES, num_cells = min(BLOCK_TILES, num_tiles - first) * 8 * N * TILE_OUTPUTS;
  if (gridDim.z > 1) {
    int* ticket = (int*)(shared + SUM_BYTES(N));
    int* counter = tickets + blockIdx.y * gridDim.x + blockIdx.x;
    const size_t pitch = (size_t)num_tiles * TILE_OUTPUTS, of_split = num_rows * pitch;
    const auto each_cell = [&](auto use) {
#pragma unroll 1
      for (int i = threadIdx.x; i < num_cells; i += WARPS * 32) {
        const int tile = i / (8 * N * TILE_OUTPUTS), r = i / TILE_OUTPUTS % (8 * N), output = i % TILE_OUTPUTS;
        if (first_row + r < num_rows)
          use(sums[tile][r][output], scratch + (first_row + r) * pitch + (first + tile) * TILE_OUTPUTS + output);
      }
    };
    each_cell([&](float& cell, float* to) { to[blockIdx.z * of_split] = cell; });
    // Both fences in the thread that counts, between the block's barriers, as a grid's barrier in cooperative groups
    // has them: PTX's memory model then orders what any thread of a block wrote before what any of the last one reads.
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      *ticket = atomicAdd(counter, 1);
      __threadfence();
    }
    __syncthreads();
    if (*ticket != (int)gridDim.z - 1) return;  // the last one here adds up, in the same order always
    if (threadIdx.x == 0) *counter = 0;
    each_cell([&](float& cell, const float* from) {
      float v = load_fresh(from);
      for (int split = 1; split < (int)gridDim.z; ++split) v = __fadd_rn(v, load_fresh(from + split * of_split));
      cell = v;
    });
    __syncthreads();
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < num_cells; i += WARPS * 32) {
    const int tile = i / (8 * N * TILE_OUTPUTS), r = i / TILE_OUTPUTS % (8 * N), row = first_row + r;
    if (row >= num_rows) continue;
    const float scale = __fmul_rn(row_scales[row], 1.0f / WEIGHT_GAIN);
    finish_tile(out + (size_t)row * out_stride + out_offset, bias, epilogue, first + tile, i % TILE_OUTPUTS, num_outputs,
                [&](int output) { return __fmul_rn(sums[tile][r][output], scale); });
  }
}


// The compiler for sm_120 would spill to have two; there one keeps enough in flight for the little bandwidth an SM has.
#if __CUDA_ARCH__ >= 1200
#define MATRIX_32_BLOCKS 1
#else
#define MATRIX_32_BLOCKS 2
#endif

extern "C" __global__ void __launch_bounds__(256, 2) matrix_8(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const void* values, const float* row_scales, int num_rows, int epilogue, float* scratch, int* tickets) {
  __shared__ __align__(16) u8 shared[shared_bytes(1)];
  product<1>(shared, out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
             (const u8*)values, row_scales, num_rows, epilogue, scratch, tickets);
}
extern "C" __global__ void __launch_bounds__(256, 2) matrix_16(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const void* values, const float* row_scales, int num_rows, int epilogue, float* scratch, int* tickets) {
  __shared__ __align__(16) u8 shared[shared_bytes(2)];
  product<2>(shared, out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
             (const u8*)values, row_scales, num_rows, epilogue, scratch, tickets);
}
extern "C" __global__ void __launch_bounds__(256, MATRIX_32_BLOCKS) matrix_32(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const void* values, const float* row_scales, int num_rows, int epilogue, float* scratch, int* tickets) {
  __shared__ __align__(16) u8 shared[shared_bytes(4)];
  product<4>(shared, out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
             (const u8*)values, row_scales, num_rows, epilogue, scratch, tickets);
}
extern "C" __global__ void __launch_bounds__(256, 1) matrix_64(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const void* values, const float* row_scales, int num_rows, int epilogue, float* scratch, int* tickets) {
  __shared__ __align__(16) u8 shared[shared_bytes(8)];
  product<8>(shared, out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
             (const u8*)values, row_scales, num_rows, epilogue, scratch, tickets);
}
