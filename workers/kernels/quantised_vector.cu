// One or two rows times a quantised matrix, by 4-byte integer dot products.
//
// Grid: vector_* (tiles of 16 outputs, groups of ROWS rows); vector_gate_up_* (blocks of 32 activations, the same).
// Shared memory: static, 4 KiB at most. A warp loads several units, or a unit of several tiles, before it uses the
// first: narrow matrices have some 16 warps on a multiprocessor, which must keep 30 KiB and more in flight.
// Precision: the dot product of 32 weights with 32 int8 activations is exact; its product with both
// scales and the sum over blocks are float32. Warps take units in turn: a row's sum has the same order
// whatever ROWS and the batch are, but another one than in the matrix kernels.
// Assumes: activations as in matmul.cuh, inputs padded to whole units. Reference:
// tests/workers/kernels/reference.py, `quantised_matmul`.
#include "formats.cuh"

#define WARPS 8

// What the lane needs of one unit of a row.
struct Inputs {
  uint4 values, records;
};

// Adds one unit of two outputs (g and g + 8) for each row.
template <int ROWS>
__device__ __forceinline__ void add_unit(float (&acc)[ROWS][2], const Unit& u, const Matrix& m, const Inputs (&x)[ROWS]) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    u32 a[4];
    operand(a, u, m, block);
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const Scale s = scale_of(u, o, block);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int b0 = block ? x[r].values.z : x[r].values.x, b1 = block ? x[r].values.w : x[r].values.y;
        const float scale = __uint_as_float(block ? x[r].records.z : x[r].records.x);
        const u32 both_sums = block ? x[r].records.w : x[r].records.y;
        // What belongs to the whole block, not to this lane's quarter, is added by one of the four lanes.
        const int first_sum = t == 0 ? (short)both_sums : 0, last_sum = t == 0 ? (int)both_sums >> 16 : 0;
        if constexpr (HALVES) {
          const int first = __dp4a((int)a[o], b0, MAGIC_BITS - OFFSET * first_sum);
          const int last = __dp4a((int)a[o + 2], b1, MAGIC_BITS - OFFSET * last_sum);
          acc[r][o] = __fmaf_rn(__fmul_rn(s.scale[0], scale), from_magic(first), acc[r][o]);
          acc[r][o] = __fmaf_rn(__fmul_rn(s.scale[1], scale), from_magic(last), acc[r][o]);
        } else {
          const int start = MAGIC_BITS - OFFSET * (first_sum + last_sum);
          const int dot = __dp4a((int)a[o + 2], b1, __dp4a((int)a[o], b0, start));
          acc[r][o] = __fmaf_rn(__fmul_rn(s.scale[0], scale), from_magic(dot), acc[r][o]);
        }
        if constexpr (HAS_MIN && HALVES) {
          acc[r][o] = __fmaf_rn(s.min[0], __fmul_rn(scale, (float)first_sum), acc[r][o]);
          acc[r][o] = __fmaf_rn(s.min[1], __fmul_rn(scale, (float)last_sum), acc[r][o]);
        } else if constexpr (HAS_MIN) {
          acc[r][o] = __fmaf_rn(s.min[0], __fmul_rn(scale, (float)(first_sum + last_sum)), acc[r][o]);
        }
      }
    }
  }
}

template <int ROWS>
__device__ __forceinline__ void load_inputs(Inputs (&x)[ROWS], const u8* values, const Record* records, int first_row,
                                            int num_rows, int num_units, int unit) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const size_t cell = (size_t)min(first_row + r, num_rows - 1) * num_units + unit;
    x[r].values = *(const uint4*)(values + cell * UNIT_INPUTS + 16 * t);
    x[r].records = *(const uint4*)(records + cell * 2);
  }
}

// The sums of a warp for its 16 outputs, where the block adds them up.
template <int ROWS> __device__ __forceinline__ void bring(float (*sums)[TILE_OUTPUTS], const float (&acc)[ROWS][2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      float v = acc[r][o];
      v += __shfl_xor_sync(ALL_LANES, v, 1);
      v += __shfl_xor_sync(ALL_LANES, v, 2);
      if (t == 0) sums[r][g + 8 * o] = v;
    }
}

template <int ROWS, int UNITS>
__device__ __forceinline__ void vector_product(float* out, int out_stride, int out_offset, const void* weight,
                                               const void* codebook, const float* bias, int num_outputs,
                                               int num_tiles, int num_units, const u8* values,
                                               const Record* records, int num_rows, int epilogue) {
  __shared__ float sums[WARPS][ROWS][TILE_OUTPUTS];
  const int warp = threadIdx.x >> 5, tile = blockIdx.x, first_row = blockIdx.y * ROWS;
  const Matrix m = open_matrix(weight, codebook, num_tiles, num_units);
  float acc[ROWS][2] = {};
  int unit = warp;
  for (; unit + (UNITS - 1) * WARPS < num_units; unit += UNITS * WARPS) {
    Unit u[UNITS];
    Inputs x[UNITS][ROWS];
#pragma unroll
    for (int i = 0; i < UNITS; ++i) load_unit(u[i], m, tile, unit + i * WARPS);
#pragma unroll
    for (int i = 0; i < UNITS; ++i) load_inputs(x[i], values, records, first_row, num_rows, num_units, unit + i * WARPS);
#pragma unroll
    for (int i = 0; i < UNITS; ++i) add_unit(acc, u[i], m, x[i]);
  }
#pragma unroll 1
  for (; unit < num_units; unit += WARPS) {
    Unit u;
    Inputs x[ROWS];
    load_unit(u, m, tile, unit);
    load_inputs(x, values, records, first_row, num_rows, num_units, unit);
    add_unit(acc, u, m, x);
  }
  bring(sums[warp], acc);
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * TILE_OUTPUTS; i += WARPS * 32) {
    const int r = i / TILE_OUTPUTS, row = first_row + r;
    if (row >= num_rows) break;
    finish_tile(out + (size_t)row * out_stride + out_offset, bias, epilogue, tile, i % TILE_OUTPUTS, num_outputs,
                [&](int output) {
                  float v = 0;
#pragma unroll
                  for (int w = 0; w < WARPS; ++w) v = __fadd_rn(v, sums[w][r][output]);
                  return v;
                });
  }
}

extern "C" __global__ void __launch_bounds__(256, 3) vector_1(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  vector_product<1, BYTES ? 2 : 4>(out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
                                   values, (const Record*)records, num_rows, epilogue);
}
extern "C" __global__ void __launch_bounds__(256, 2) vector_2(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  vector_product<2, BYTES ? 2 : 4>(out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
                                   values, (const Record*)records, num_rows, epilogue);
}

// Gate and up with all that follows: silu(gate) * up, rounded to int8 for the next product. A block has the four tiles
// of 32 activations. act_values and act_records are what `quantise` would write of rows of `num_outputs`. Four warps, so
// that all blocks of a large model are on the GPU at once: a second wave of a few would use it badly.
#define PAIR_TILES 4
#define PAIR_WARPS 4

template <int ROWS, int UNITS>
__device__ __forceinline__ void gate_up_product(u8* act_values, Record* act_records, const void* weight,
                                                const void* codebook, int num_outputs, int num_tiles, int num_units,
                                                const u8* values, const Record* records, int num_rows) {
  __shared__ float sums[PAIR_TILES][PAIR_WARPS][ROWS][TILE_OUTPUTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first_row = blockIdx.y * ROWS;
  const int first_tile = blockIdx.x * PAIR_TILES;
  const Matrix m = open_matrix(weight, codebook, num_tiles, num_units);
  float acc[PAIR_TILES][ROWS][2] = {};
#pragma unroll 1
  for (int unit = warp; unit < num_units; unit += UNITS * PAIR_WARPS) {
    Unit u[UNITS][PAIR_TILES];
    Inputs x[UNITS][ROWS];
    // Past the end: the last unit again, which is not added.
#pragma unroll
    for (int k = 0; k < UNITS; ++k) {
      const int own = min(unit + k * PAIR_WARPS, num_units - 1);
#pragma unroll
      for (int i = 0; i < PAIR_TILES; ++i) load_unit(u[k][i], m, min(first_tile + i, num_tiles - 1), own);
      load_inputs(x[k], values, records, first_row, num_rows, num_units, own);
    }
#pragma unroll
    for (int k = 0; k < UNITS; ++k)
      if (unit + k * PAIR_WARPS < num_units)
#pragma unroll
        for (int i = 0; i < PAIR_TILES; ++i) add_unit(acc[i], u[k][i], m, x[k]);
  }
#pragma unroll
  for (int i = 0; i < PAIR_TILES; ++i) bring(sums[i][warp], acc[i]);
  __syncthreads();
  const int row = first_row + warp, i = blockIdx.x * 32 + lane;
  if (warp >= ROWS || row >= num_rows) return;
  float pair[2];  // gate, up
#pragma unroll
  for (int o = 0; o < 2; ++o) {
    pair[o] = 0;
#pragma unroll
    for (int w = 0; w < PAIR_WARPS; ++w) pair[o] = __fadd_rn(pair[o], sums[lane >> 3][w][warp][(lane & 7) + 8 * o]);
  }
  const float v = i < num_outputs ? __fmul_rn(silu(pair[0]), pair[1]) : 0.0f;
  const size_t size = padded(num_outputs);
  quantise_block(v, blockIdx.x, lane, act_values + row * size, act_records + row * (size / 32));
}

extern "C" __global__ void __launch_bounds__(128, 4) vector_gate_up_1(u8* act_values, void* act_records, const void* weight, const void* codebook, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows) {
  gate_up_product<1, BYTES ? 1 : 2>(act_values, (Record*)act_records, weight, codebook, num_outputs, num_tiles, num_units, values,
                     (const Record*)records, num_rows);
}
extern "C" __global__ void __launch_bounds__(128, 4) vector_gate_up_2(u8* act_values, void* act_records, const void* weight, const void* codebook, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows) {
  gate_up_product<2, 1>(act_values, (Record*)act_records, weight, codebook, num_outputs, num_tiles, num_units, values,
                     (const Record*)records, num_rows);
}
