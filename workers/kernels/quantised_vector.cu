// Few rows times a quantised matrix, by 4-byte integer dot products.
//
// Grid: (tiles of 16 outputs, groups of ROWS rows). Shared memory: static, 4.6 KiB at most.
// Precision: the dot product of 32 weights with 32 int8 activations is exact; its product with both
// scales and the sum over blocks are float32. Warps take units in turn: a row's sum has the same order
// whatever ROWS and the batch are, but another one than in the matrix kernels.
// Assumes: activations as in matmul.cuh, inputs padded to whole units. Reference:
// tests/workers/kernels/reference.py, `quantised_matmul`.
#include "formats.cuh"

#define WARPS 8

template <int ROWS>
__device__ __forceinline__ void vector_product(float* out, int out_stride, int out_offset, const void* weight,
                                               const void* codebook, const float* bias, int num_outputs,
                                               int num_tiles, int num_units, const u8* values,
                                               const Record* records, int num_rows, int epilogue,
                                               float (*sums)[ROWS][TILE_OUTPUTS]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tile = blockIdx.x, first_row = blockIdx.y * ROWS;
  const Matrix m = open_matrix(weight, codebook, num_tiles, num_units);
  float acc[ROWS][2];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = 0;

  for (int unit = warp; unit < num_units; unit += WARPS) {
    Unit u;
    load_unit(u, m, tile, unit);
    uint4 x[ROWS], record[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const size_t cell = (size_t)min(first_row + r, num_rows - 1) * num_units + unit;
      x[r] = *(const uint4*)(values + cell * UNIT_INPUTS + 16 * t);
      record[r] = *(const uint4*)(records + cell * 2);
    }
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      u32 a[4];
      operand(a, u, m, block);
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const Scale s = scale_of(u, o, block);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int b0 = block ? x[r].z : x[r].x, b1 = block ? x[r].w : x[r].y;
          const float scale = __uint_as_float(block ? record[r].z : record[r].x);
          const u32 both_sums = block ? record[r].w : record[r].y;
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
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      float v = acc[r][o];
      v += __shfl_xor_sync(ALL_LANES, v, 1);
      v += __shfl_xor_sync(ALL_LANES, v, 2);
      if (t == 0) sums[warp][r][g + 8 * o] = v;
    }
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

extern "C" __global__ void __launch_bounds__(256) vector_1(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  __shared__ float sums[WARPS][1][TILE_OUTPUTS];
  vector_product<1>(out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units, values,
                    (const Record*)records, num_rows, epilogue, sums);
}
extern "C" __global__ void __launch_bounds__(256, 4) vector_2(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  __shared__ float sums[WARPS][2][TILE_OUTPUTS];
  vector_product<2>(out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units, values,
                    (const Record*)records, num_rows, epilogue, sums);
}
extern "C" __global__ void __launch_bounds__(256, 2) vector_4(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  __shared__ float sums[WARPS][4][TILE_OUTPUTS];
  vector_product<4>(out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units, values,
                    (const Record*)records, num_rows, epilogue, sums);
}
