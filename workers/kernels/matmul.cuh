// What all matrix products share: the activations they read and what they do with their sums.
//
// Owns: nothing. Runs in: the matmul kernels. Source: this project.
#pragma once
#include "prelude.cuh"

#define UNIT_INPUTS 64

// ---- activations -------------------------------------------------------------------------------------
// Written by `quantise.cu` in one of two ways. A row of inputs is padded with zeros to units of 64.
//
// Rounded to int8, for the dot products of quantised_vector.cu:
//   values   int8, of each unit: [4 lanes t][2 blocks b][2 halves h][4 j] = input 32b + 16h + 4t + j,
//            so that 16 bytes are what a lane needs of both blocks;
//   records  one for each 32 inputs: input = scale * value, and the sums of the first and last 16 values.
// As float16, for the matrix instructions of quantised_matrix.cu:
//   values   float16, of each unit: [2 blocks b][4 lanes t][2 halves h][4 j], the same inputs: 16 bytes are a lane's
//            operand B for one block;
//   scales   float32, one a row: input = scale * value. It is a power of two that brings the row's largest
//            magnitude to 1..2, so nothing overflows and no bit is lost.
struct Record {
  float scale;
  short sums[2];
};

// What a kernel's `halves` asks for.
#define INT8 0
#define HALVES_SCALED 1
#define HALVES_UNSCALED 2  // float16 with scale 1: for rows that are known to fit

__device__ __forceinline__ size_t padded(int size) { return (size_t)((size + UNIT_INPUTS - 1) / UNIT_INPUTS) * UNIT_INPUTS; }
__device__ __forceinline__ int place_of_half(int i) { return (i & ~31) + 8 * (i >> 2 & 3) + 4 * (i >> 4 & 1) + (i & 3); }

// One warp, one block of 32 inputs: lane i holds input i.
__device__ __forceinline__ void quantise_block(float v, int block, int lane, u8* values, Record* records) {
  const float largest = warp_max(fabsf(v));
  const bool broken = __any_sync(ALL_LANES, v != v);
  const float scale = broken ? __int_as_float(0x7FC00000) : __fdiv_rn(largest, 127.0f);
  const int q = scale > 0 ? __float2int_rn(__fdiv_rn(v, scale)) : 0;
  int sum = q;
#pragma unroll
  for (int bits = 8; bits; bits >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, bits);
  const int last_sum = __shfl_sync(ALL_LANES, sum, 16);
  const int h = lane >> 4, t = lane >> 2 & 3, j = lane & 3;
  values[(block >> 1) * UNIT_INPUTS + 16 * t + 8 * (block & 1) + 4 * h + j] = (u8)(i8)q;
  if (lane == 0) {
    Record r;
    r.scale = scale;
    r.sums[0] = (short)sum;
    r.sums[1] = (short)last_sum;
    records[block] = r;
  }
}

// ---- what becomes of a sum ---------------------------------------------------------------------------
#define EPILOGUE_STORE 0    // out = sum (+ bias)
#define EPILOGUE_ADD 1      // out += sum
#define EPILOGUE_GATE_UP 2  // out = silu(sum of gate) * (sum of up); tiles hold 8 outputs of each

__device__ __forceinline__ float silu(float v) { return __fdiv_rn(v, 1.0f + expf(-v)); }

// The sums of one tile for one row, as `sum(output)` gives them; thread `index` of 16 (8 for gate and up).
template <class Sum>
__device__ __forceinline__ void finish_tile(float* out, const float* bias, int epilogue, int tile, int index,
                                            int num_outputs, Sum sum) {
  if (epilogue == EPILOGUE_GATE_UP) {
    const int output = tile * 8 + index;
    if (index < 8 && output < num_outputs) out[output] = __fmul_rn(silu(sum(index)), sum(index + 8));
    return;
  }
  const int output = tile * 16 + index;
  if (output >= num_outputs) return;
  const float v = sum(index);
  if (epilogue == EPILOGUE_ADD) out[output] = __fadd_rn(out[output], v);
  else out[output] = bias ? __fadd_rn(v, bias[output]) : v;
}
