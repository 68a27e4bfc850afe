// Rows times a matrix of F32, F16 or BF16 weights, chosen by FORMAT, row-major [outputs, inputs].
//
// Precision: float_vector float32; float_matrix as below.
// float_vector: up to ROWS rows by float32 products; a row's order is the same whatever ROWS and the batch,
// which makes it the batch-invariant kernel too. float_matrix: many rows on the tensor cores with tf32
// operands (10-bit mantissas: F16 and BF16 weights are exact, activations and F32 weights are rounded).
// Grid: vectors (tiles of 16 outputs, rows / ROWS), matrix (outputs / 64, rows / 32), rounded up. Shared memory:
// static, 4.3 KiB at most. Gate and up lie as in matmul.cuh. x: float [rows][num_inputs].
// Assumes: num_inputs a multiple of 8. Reference: tests/workers/kernels/reference.py, `float_matmul`.
#include "matmul.cuh"

#define GGML_F32 0
#define GGML_F16 1
#define TILE_OUTPUTS 16
#define WARPS 8
#define PIECE 8  // weights that a lane takes at once

// Eight weights from 16 (F32: 32) bytes.
__device__ __forceinline__ void load_weights(float (&w)[PIECE], const void* weight, size_t index) {
#if FORMAT == GGML_F32
  const uint4 low = load_streaming((const float*)weight + index), high = load_streaming((const float*)weight + index + 4);
  const u32 bits[PIECE] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < PIECE; ++i) w[i] = __uint_as_float(bits[i]);
#else
  const uint4 v = load_streaming((const u16*)weight + index);
  const u32 pairs[PIECE / 2] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    const u16 bits = (u16)(pairs[i / 2] >> 16 * (i & 1));
#if FORMAT == GGML_F16
    w[i] = __half2float(*(const __half*)&bits);
#else
    w[i] = __uint_as_float((u32)bits << 16);
#endif
  }
#endif
}

template <int ROWS>
__device__ __forceinline__ void vector_product(float* out, int out_stride, int out_offset, const void* weight,
                                               const float* bias, int num_outputs, int num_weight_rows, int num_inputs,
                                               const float* x, int num_rows, int epilogue,
                                               float (*sums)[TILE_OUTPUTS]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile = blockIdx.x, first_row = blockIdx.y * ROWS;
#pragma unroll 1
  for (int o = warp; o < TILE_OUTPUTS; o += WARPS) {
    const int weight_row = min(tile * TILE_OUTPUTS + o, num_weight_rows - 1);
    float acc[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) acc[r] = 0;
#pragma unroll 2
    for (int k = lane * PIECE; k < num_inputs; k += 32 * PIECE) {
      float w[PIECE];
      load_weights(w, weight, (size_t)weight_row * num_inputs + k);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float* from = x + (size_t)min(first_row + r, num_rows - 1) * num_inputs + k;
        const float4 low = *(const float4*)from, high = *(const float4*)(from + 4);
        const float v[PIECE] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < PIECE; ++i) acc[r] = __fmaf_rn(w[i], v[i], acc[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float v = warp_sum(acc[r]);
      if (lane == 0) sums[r][o] = v;
    }
  }
  __syncthreads();
  const int r = threadIdx.x / TILE_OUTPUTS, row = first_row + r;
  if (r < ROWS && row < num_rows)
    finish_tile(out + (size_t)row * out_stride + out_offset, bias, epilogue, tile, threadIdx.x % TILE_OUTPUTS,
                num_outputs, [&](int output) { return sums[r][output]; });
}

extern "C" __global__ void __launch_bounds__(256, 4) float_vector_1(float* out, int out_stride, int out_offset, const void* weight, const float* bias, int num_outputs, int num_weight_rows, int num_inputs, const float* x, int num_rows, int epilogue) {
  __shared__ float sums[1][TILE_OUTPUTS];
  vector_product<1>(out, out_stride, out_offset, weight, bias, num_outputs, num_weight_rows, num_inputs, x, num_rows,
                    epilogue, sums);
}
extern "C" __global__ void __launch_bounds__(256, 2) float_vector_4(float* out, int out_stride, int out_offset, const void* weight, const float* bias, int num_outputs, int num_weight_rows, int num_inputs, const float* x, int num_rows, int epilogue) {
  __shared__ float sums[4][TILE_OUTPUTS];
  vector_product<4>(out, out_stride, out_offset, weight, bias, num_outputs, num_weight_rows, num_inputs, x, num_rows,
                    epilogue, sums);
}

#define SPAN 32         // inputs that are staged at once
#define ROW_GROUPS 4    // of 8 rows
#define PITCH (SPAN + 2)  // of a staged row: 16 lanes read 16 different pairs of banks

extern "C" __global__ void __launch_bounds__(128) float_matrix(float* out, int out_stride, int out_offset, const void* weight, const float* bias, int num_outputs, int num_weight_rows, int num_inputs, const float* x, int num_rows, int epilogue) {
  __shared__ __align__(16) u32 staged[8 * ROW_GROUPS][PITCH];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tile = blockIdx.x * 4 + warp, first_row = blockIdx.y * 8 * ROW_GROUPS;
  size_t weight_rows[2];
#pragma unroll
  for (int o = 0; o < 2; ++o) weight_rows[o] = (size_t)min(tile * TILE_OUTPUTS + g + 8 * o, num_weight_rows - 1) * num_inputs;
  float acc[ROW_GROUPS][4];
#pragma unroll
  for (int n = 0; n < ROW_GROUPS; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;

  for (int k0 = 0; k0 < num_inputs; k0 += SPAN) {
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * ROW_GROUPS * SPAN / 4; i += 128) {
      const int r = i / (SPAN / 4), k = i % (SPAN / 4) * 4;
      const float* from = x + (size_t)min(first_row + r, num_rows - 1) * num_inputs + k0 + k;
      const float4 v = k0 + k < num_inputs ? *(const float4*)from : make_float4(0, 0, 0, 0);
      *(uint2*)&staged[r][k] = make_uint2(to_tf32(v.x), to_tf32(v.y));
      *(uint2*)&staged[r][k + 2] = make_uint2(to_tf32(v.z), to_tf32(v.w));
    }
    // The lane takes inputs 8t..8t+7 of the span: two for each of four steps of the instruction. The order
    // of inputs within a span is free as long as both operands agree.
    float w[2][PIECE];
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      if (k0 + PIECE * t < num_inputs) {
        load_weights(w[o], weight, weight_rows[o] + k0 + PIECE * t);
      } else {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) w[o][i] = 0;
      }
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u32 a[4] = {to_tf32(w[0][2 * step]), to_tf32(w[1][2 * step]), to_tf32(w[0][2 * step + 1]), to_tf32(w[1][2 * step + 1])};
#pragma unroll
      for (int n = 0; n < ROW_GROUPS; ++n) {
        const uint2 pair = *(const uint2*)&staged[8 * n + g][PIECE * t + 2 * step];
        const u32 b[2] = {pair.x, pair.y};
        mma_tf32(acc[n], a, b);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < ROW_GROUPS; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = first_row + 8 * n + 2 * t + c;
      if (row >= num_rows) continue;
      float* to = out + (size_t)row * out_stride + out_offset;
      const auto sum = [&](int output) { return output < 8 ? acc[n][c] : acc[n][c + 2]; };
      finish_tile(to, bias, epilogue, tile, g, num_outputs, sum);
      if (epilogue != EPILOGUE_GATE_UP) finish_tile(to, bias, epilogue, tile, g + 8, num_outputs, sum);
    }
}
