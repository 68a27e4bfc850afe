// Float rows as the products take them, alone or as the end of an RMS norm.
//
// Grid: (rows). Shared memory: static, 132 bytes. Precision: float32; an int8 value is scale * q with
// scale = largest magnitude / 127 of each 32 inputs, q rounded to nearest even; a float16 is rounded once. A NaN or
// an infinity makes the scale of its block (float16: of its row) NaN or infinite, so it is not lost.
// `values` and `records` are int8 and Record, or float16 and float where `halves` is not INT8.
// Assumes: row lengths that are multiples of 32. Output: as in matmul.cuh. Reference:
// tests/workers/kernels/reference.py, `quantise`, `halve` and `norm`.
#include "matmul.cuh"

// `input(i)` for a row of `size` inputs; the padding of the last unit becomes zeros.
template <class Input>
__device__ __forceinline__ void quantise_row(int size, u8* values, Record* records, Input input) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  const int num_blocks = (size + UNIT_INPUTS - 1) / UNIT_INPUTS * 2;
  for (int block = warp; block < num_blocks; block += num_warps) {
    const int i = block * 32 + lane;
    quantise_block(i < size ? input(i) : 0, block, lane, values, records);
  }
}

// 2^k with 2^k <= largest < 2^(k + 1), within what a float16 and its inverse allow; NaN and infinity are themselves.
__device__ __forceinline__ float scale_of_row(float largest) {
  const u32 bits = __float_as_uint(largest) & 0x7F800000u;
  if (bits == 0x7F800000u) return largest;
  return __uint_as_float(min(max(bits, 0x04000000u), 0x7C000000u));
}
// `input(i)` for a row of `size` inputs, of which `largest` is the largest magnitude.
template <class Input>
__device__ __forceinline__ void halve_row(int size, float largest, __half* values, float* row_scale, Input input) {
  const float scale = scale_of_row(largest), inverse = __fdiv_rn(1.0f, scale);
  const int padded_size = (size + UNIT_INPUTS - 1) / UNIT_INPUTS * UNIT_INPUTS;
  for (int i = threadIdx.x; i < padded_size; i += blockDim.x) {
    values[place_of_half(i)] = __float2half_rn(i < size ? __fmul_rn(input(i), inverse) : 0);
  }
  if (threadIdx.x == 0) *row_scale = scale;
}
// The larger; NaN where one of them is.
__device__ __forceinline__ float larger(float largest, float v) { return v > largest || v != v ? v : largest; }
__device__ __forceinline__ float largest_of_block(float own, float* cells) {
  const bool broken = __syncthreads_or(own != own);
  const float largest = block_max(own == own ? own : 0.0f, cells);
  return broken ? __int_as_float(0x7FC00000) : largest;
}

// Where row `row` of the output begins.
struct Target {
  u8* values;
  void* records;
};
__device__ __forceinline__ Target target_of(u8* values, void* records, size_t row, int size, int halves) {
  if (halves) return {values + 2 * row * padded(size), (float*)records + row};
  return {values + row * padded(size), (Record*)records + row * (padded(size) / 32)};
}

extern "C" __global__ void __launch_bounds__(256) quantise(const float* x, int size, u8* values, void* records, int halves) {
  __shared__ float cells[33];
  const size_t row = blockIdx.x;
  const float* from = x + row * size;
  const Target to = target_of(values, records, row, size, halves);
  const auto input = [&](int i) { return from[i]; };
  if (halves == INT8) {
    quantise_row(size, to.values, (Record*)to.records, input);
    return;
  }
  if (halves == HALVES_UNSCALED) {
    halve_row(size, 1.0f, (__half*)to.values, (float*)to.records, input);
    return;
  }
  float largest = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) largest = larger(largest, fabsf(from[i]));
  halve_row(size, largest_of_block(largest, cells), (__half*)to.values, (float*)to.records, input);
}

// normed = hidden / sqrt(mean(hidden^2) + eps) * weight, of row `rows[i]` (all in order where that is null),
// as floats where `out` is given and as `values` and `records` where those are. A thread reads four inputs at once,
// and all of a row at once as long as it has no more than 4096.
extern "C" __global__ void __launch_bounds__(1024) rms_norm(const float* hidden, const int* rows, const float* weight, int size, float eps, float* out, u8* values, void* records, int halves) {
  __shared__ float cells[33];
  const size_t row = blockIdx.x;
  const float* from = hidden + (size_t)(rows ? rows[row] : (int)row) * size;
  float squares = 0, largest = 0;
  for (int i = 4 * threadIdx.x; i < size; i += 4 * blockDim.x) {
    const float4 v = *(const float4*)(from + i), w = *(const float4*)(weight + i);
    squares = __fmaf_rn(v.x, v.x, __fmaf_rn(v.y, v.y, __fmaf_rn(v.z, v.z, __fmaf_rn(v.w, v.w, squares))));
    largest = larger(larger(largest, fabsf(v.x * w.x)), fabsf(v.y * w.y));
    largest = larger(larger(largest, fabsf(v.z * w.z)), fabsf(v.w * w.w));
  }
  const float mean = __fdiv_rn(block_sum(squares, cells), (float)size);
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
  const auto normed = [&](int i) { return __fmul_rn(__fmul_rn(from[i], scale), weight[i]); };
  if (out)
    for (int i = threadIdx.x; i < size; i += blockDim.x) out[row * size + i] = normed(i);
  if (!values) return;
  const Target to = target_of(values, records, row, size, halves);
  if (halves) halve_row(size, __fmul_rn(largest_of_block(largest, cells), scale), (__half*)to.values, (float*)to.records, normed);
  else quantise_row(size, to.values, (Record*)to.records, normed);
}
