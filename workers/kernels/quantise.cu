// Float rows to int8 blocks, alone or as the end of an RMS norm.
//
// Grid: (rows). Shared memory: static, 132 bytes. Precision: float32; a value is scale * q with
// scale = largest magnitude / 127 of each 32 inputs, q rounded to nearest even. A NaN or an infinity
// makes its block's scale NaN or infinite, so it is not lost.
// Assumes: row lengths that are multiples of 32. Output: as in matmul.cuh. Reference:
// tests/workers/kernels/reference.py, `quantise` and `norm`.
#include "matmul.cuh"

// One warp, one block of 32 inputs: lane i holds input i.
__device__ __forceinline__ void quantise_block(float v, int block, int lane, u8* values, Record* records) {
  const float largest = warp_max(fabsf(v));
  const bool broken = __any_sync(ALL_LANES, v != v);
  const float scale = broken ? __int_as_float(0x7FC00000) : __fdiv_rn(largest, 127.0f);
  const int q = largest > 0 && !broken ? __float2int_rn(__fdiv_rn(v, scale)) : 0;
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

__device__ __forceinline__ size_t padded(int size) { return (size_t)((size + UNIT_INPUTS - 1) / UNIT_INPUTS) * UNIT_INPUTS; }

extern "C" __global__ void __launch_bounds__(256) quantise(const float* x, int size, u8* values, void* records) {
  const size_t row = blockIdx.x;
  const float* from = x + row * size;
  quantise_row(size, values + row * padded(size), (Record*)records + row * (padded(size) / 32),
               [&](int i) { return from[i]; });
}

// normed = hidden / sqrt(mean(hidden^2) + eps) * weight, of row `rows[i]` (all in order where that is null),
// as floats where `out` is given and quantised where `values` is.
extern "C" __global__ void __launch_bounds__(256) rms_norm(const float* hidden, const int* rows, const float* weight, int size, float eps, float* out, u8* values, void* records) {
  __shared__ float cells[33];
  const size_t row = blockIdx.x;
  const float* from = hidden + (size_t)(rows ? rows[row] : (int)row) * size;
  float squares = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) squares = __fmaf_rn(from[i], from[i], squares);
  const float mean = __fdiv_rn(block_sum(squares, cells), (float)size);
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
  const auto normed = [&](int i) { return __fmul_rn(__fmul_rn(from[i], scale), weight[i]); };
  if (out)
    for (int i = threadIdx.x; i < size; i += blockDim.x) out[row * size + i] = normed(i);
  if (values) quantise_row(size, values + row * padded(size), (Record*)records + row * (padded(size) / 32), normed);
}
