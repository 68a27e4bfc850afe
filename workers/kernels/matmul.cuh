// What all matrix products share: the activations they read and what they do with their sums.
//
// Owns: nothing. Runs in: the matmul kernels. Source: this project.
#pragma once
#include "prelude.cuh"

#define UNIT_INPUTS 64

// ---- quantised activations ---------------------------------------------------------------------------
// Written by `quantise.cu`. A row of inputs, padded with zeros to units of 64, has
//   values   int8, of each unit: [4 lanes t][2 blocks b][2 halves h][4 j] = input 32b + 16h + 4t + j,
//            so that 16 bytes are a lane's operand B for both blocks;
//   records  one for each 32 inputs: input = scale * value, and the sums of the first and last 16 values.
struct Record {
  float scale;
  short sums[2];
};

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
