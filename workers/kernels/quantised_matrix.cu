// Any number of rows times a quantised matrix, on the tensor cores with int8 operands.
//
// Weights are operand A (16 outputs), activations operand B (8 rows), straight from memory in fragment
// order: no shuffle, no unpacking of activations. Precision: the integer sums
// of 32 (16) inputs are exact, everything else is float32.
// Order of the float32 sum, the same in every kernel of this file: inputs are cut into 8 slices of whole
// units, a slice adds block by block, then the slices are added in order. So all kernels give the same bits
// for a row, whatever the batch: any of them may be chosen by speed alone.
//
// Grid: matrix_8 (tiles, rows / 8); matrix_16 and _32 (tiles / 2, rows / 16, / 32), matrix_64 (tiles / 4,
// rows / 64); all rounded up. Shared memory: static, 36 KiB at most.
// Assumes: activations as in matmul.cuh. Reference: tests/workers/kernels/reference.py,
// `quantised_matmul`.
#include "formats.cuh"

#define SLICES 8

// In matrix_64 formats with more parts leave no registers for a unit that is loaded ahead, nor for both blocks at once.
constexpr bool ROOMY = !HALVES && !FIVE_BITS;

__device__ __forceinline__ int slice_start(int slice, int num_units) { return slice * num_units / SLICES; }

// Adds one unit to the sums of N groups of 8 rows. `values(n, block)` is the lane's operand B; `record(n, c,
// block)` is of row 2t + c: its scale and its two sums.
template <int N, int UNROLL, class Values, class RecordOf>
__device__ __forceinline__ void add_unit(float (&acc)[N][4], const Unit& u, const Matrix& m, Values values,
                                         RecordOf record) {
#pragma unroll UNROLL
  for (int block = 0; block < 2; ++block) {
    u32 a[4];
    operand(a, u, m, block);
    const Scale scales[2] = {scale_of(u, 0, block), scale_of(u, 1, block)};
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint2 b = values(n, block);
      float row_scale[2], row_sum[2][2];
      int start[2][2];  // of the integer sums: what offsets add, in MAGIC
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint2 r = record(n, c, block);
        row_scale[c] = __uint_as_float(r.x);
        const int first_sum = (short)r.y, last_sum = (int)r.y >> 16;
        start[c][0] = MAGIC_BITS - OFFSET * (HALVES ? first_sum : first_sum + last_sum);
        start[c][1] = MAGIC_BITS - OFFSET * last_sum;
        row_sum[c][0] = __fmul_rn(row_scale[c], (float)(HALVES ? first_sum : first_sum + last_sum));
        row_sum[c][1] = __fmul_rn(row_scale[c], (float)last_sum);
      }
#pragma unroll
      for (int half = 0; half < (HALVES ? 2 : 1); ++half) {
        int dots[4] = {start[0][half], start[1][half], start[0][half], start[1][half]};
        if constexpr (HALVES) {
          const u32 own_a[2] = {a[2 * half], a[2 * half + 1]}, own_b[1] = {half ? b.y : b.x};
          mma_s8_k16(dots, own_a, own_b);
        } else {
          const u32 both[2] = {b.x, b.y};
          mma_s8_k32(dots, a, both);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Scale& s = scales[i >> 1];
          const int c = i & 1;
          acc[n][i] = __fmaf_rn(__fmul_rn(s.scale[half], row_scale[c]), from_magic(dots[i]), acc[n][i]);
          if constexpr (HAS_MIN) acc[n][i] = __fmaf_rn(s.min[half], row_sum[c][half], acc[n][i]);
        }
      }
    }
  }
}

// 8 N rows; TILES tiles a block, the slices of each shared out to SLICE_WARPS warps.
template <int N, int TILES, int SLICE_WARPS>
__device__ __forceinline__ void few_rows(float* out, int out_stride, int out_offset, const void* weight,
                                         const void* codebook, const float* bias, int num_outputs, int num_tiles,
                                         int num_units, const u8* values, const Record* all_records, int num_rows,
                                         int epilogue, float (*partial)[TILES][8 * N][TILE_OUTPUTS + 1]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int first_row = blockIdx.y * 8 * N, tile_of_block = warp / SLICE_WARPS, slice_warp = warp % SLICE_WARPS;
  const int first_tile = blockIdx.x * TILES, tile = min(first_tile + tile_of_block, num_tiles - 1);
  const Matrix m = open_matrix(weight, codebook, num_tiles, num_units);

#pragma unroll 1
  for (int i = 0; i < SLICES / SLICE_WARPS; ++i) {
    const int slice = slice_warp * (SLICES / SLICE_WARPS) + i, end = slice_start(slice + 1, num_units);
    float acc[N][4];
#pragma unroll
    for (int n = 0; n < N; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
    Unit next;
    int unit = slice_start(slice, num_units);
    if (unit < end) load_unit(next, m, tile, unit);
    for (; unit < end; ++unit) {
      const Unit u = next;
      if (unit + 1 < end) load_unit(next, m, tile, unit + 1);
      add_unit<N, N >= 4 ? 1 : 2>(
          acc, u, m,
          [&](int n, int block) {
            const size_t row = min(first_row + 8 * n + g, num_rows - 1);
            return *(const uint2*)(values + (row * num_units + unit) * UNIT_INPUTS + 16 * t + 8 * block);
          },
          [&](int n, int c, int block) {
            const size_t row = min(first_row + 8 * n + 2 * t + c, num_rows - 1);
            return *(const uint2*)(all_records + (row * num_units + unit) * 2 + block);
          });
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) partial[slice][tile_of_block][8 * n + 2 * t + (e & 1)][g + 8 * (e >> 1)] = acc[n][e];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * 8 * N * TILE_OUTPUTS; i += TILES * SLICE_WARPS * 32) {
    const int own_tile = i / (8 * N * TILE_OUTPUTS), r = i / TILE_OUTPUTS % (8 * N), row = first_row + r;
    if (row >= num_rows || first_tile + own_tile >= num_tiles) continue;
    finish_tile(out + (size_t)row * out_stride + out_offset, bias, epilogue, first_tile + own_tile, i % TILE_OUTPUTS,
                num_outputs, [&](int output) {
                  float total = 0;
#pragma unroll
                  for (int s = 0; s < SLICES; ++s) total = __fadd_rn(total, partial[s][own_tile][r][output]);
                  return total;
                });
  }
}

extern "C" __global__ void __launch_bounds__(256, 3) matrix_8(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  __shared__ float partial[SLICES][1][8][TILE_OUTPUTS + 1];
  few_rows<1, 1, 8>(out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units, values,
                    (const Record*)records, num_rows, epilogue, partial);
}
extern "C" __global__ void __launch_bounds__(256, 2) matrix_16(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  __shared__ float partial[SLICES][2][16][TILE_OUTPUTS + 1];
  few_rows<2, 2, 4>(out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units, values,
                    (const Record*)records, num_rows, epilogue, partial);
}
extern "C" __global__ void __launch_bounds__(256, 2) matrix_32(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  __shared__ float partial[SLICES][2][32][TILE_OUTPUTS + 1];
  few_rows<4, 2, 4>(out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units, values,
                    (const Record*)records, num_rows, epilogue, partial);
}

// ---- many rows: 64 rows x 64 outputs a block; activations come through shared memory ---------------------
#define STAGES 4
#define BLOCK_ROWS 64
#define ROW_GROUPS 4  // of 8 rows, for each warp

struct Stage {
  uint4 values[BLOCK_ROWS][4];  // [row][t]: a row is 64 bytes, so eight lanes read all banks once
  uint4 records[BLOCK_ROWS];
};

__device__ __forceinline__ void fetch_stage(Stage& stage, const u8* values, const Record* records, int first_row,
                                            int num_rows, int num_units, int unit) {
  const int row = threadIdx.x >> 2, t = threadIdx.x & 3;
  const size_t cell = (size_t)min(first_row + row, num_rows - 1) * num_units + unit;
  copy_async_16(&stage.values[row][t], values + cell * UNIT_INPUTS + 16 * t, true);
  if (t == 0) copy_async_16(&stage.records[row], records + cell * 2, true);
}

extern "C" __global__ void __launch_bounds__(256, 2) matrix_64(float* out, int out_stride, int out_offset, const void* weight, const void* codebook, const float* bias, int num_outputs, int num_tiles, int num_units, const u8* values, const void* records, int num_rows, int epilogue) {
  __shared__ Stage stages[STAGES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int first_row = blockIdx.y * BLOCK_ROWS, own_row = (warp & 1) * 32;
  const int tile = blockIdx.x * 4 + (warp >> 1), read_tile = min(tile, num_tiles - 1);
  const Matrix m = open_matrix(weight, codebook, num_tiles, num_units);
  float total[ROW_GROUPS][4], acc[ROW_GROUPS][4];
#pragma unroll
  for (int n = 0; n < ROW_GROUPS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) total[n][e] = acc[n][e] = 0;

#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < num_units) fetch_stage(stages[s], values, (const Record*)records, first_row, num_rows, num_units, s);
    copy_async_commit();
  }
  Unit next;
  if constexpr (ROOMY) load_unit(next, m, read_tile, 0);
  int slice = 0, slice_end = slice_start(1, num_units);
  for (int unit = 0; unit <= num_units; ++unit) {
    while (slice < SLICES && unit == slice_end) {  // a slice may be empty
#pragma unroll
      for (int n = 0; n < ROW_GROUPS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[n][e] = __fadd_rn(total[n][e], acc[n][e]);
          acc[n][e] = 0;
        }
      ++slice;
      slice_end = slice_start(slice + 1, num_units);
    }
    if (unit == num_units) break;
    copy_async_wait<STAGES - 2>();
    __syncthreads();  // this stage is here for all, and nobody still reads the one that is refilled next
    const int ahead = unit + STAGES - 1;
    if (ahead < num_units)
      fetch_stage(stages[ahead % STAGES], values, (const Record*)records, first_row, num_rows, num_units, ahead);
    copy_async_commit();
    const Stage& stage = stages[unit % STAGES];
    Unit u;
    if constexpr (ROOMY) {
      u = next;
      if (unit + 1 < num_units) load_unit(next, m, read_tile, unit + 1);
    } else {
      load_unit(u, m, read_tile, unit);
    }
    add_unit<ROW_GROUPS, ROOMY ? 2 : 1>(
        acc, u, m,
        [&](int n, int block) { return ((const uint2*)&stage.values[own_row + 8 * n + g][t])[block]; },
        [&](int n, int c, int block) { return ((const uint2*)&stage.records[own_row + 8 * n + 2 * t + c])[block]; });
  }
  copy_async_wait<0>();
  if (tile >= num_tiles) return;
#pragma unroll
  for (int n = 0; n < ROW_GROUPS; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = first_row + own_row + 8 * n + 2 * t + c;
      if (row >= num_rows) continue;
      // The lane has outputs g and g + 8: both at hand for gate and up.
      const float sums[2] = {total[n][c], total[n][c + 2]};
      float* to = out + (size_t)row * out_stride + out_offset;
      const auto sum = [&](int output) { return sums[output >> 3]; };
      finish_tile(to, bias, epilogue, tile, g, num_outputs, sum);
      if (epilogue != EPILOGUE_GATE_UP) finish_tile(to, bias, epilogue, tile, g + 8, num_outputs, sum);
    }
}
