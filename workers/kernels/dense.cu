// What surrounds a product that cuBLAS computes: operands in bfloat16, and what becomes of its result.
//
// Shared memory: none. Precision: rounding to bfloat16 (round_rows), float32 (finish_rows). Large prompt chunks only:
// cuBLAS may sum in another order for another number of rows. Reference: tests/workers/kernels/reference.py,
// `silu_product`, and NumPy's arithmetic.
#include "matmul.cuh"

// out = x as bfloat16. Grid: (count / 1024, rounded up), four values a thread. `count` is a multiple of 4.
extern "C" __global__ void __launch_bounds__(256) round_rows(void* out, const float* x, int count) {
  const int i = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (i >= count) return;
  const float4 v = *(const float4*)(x + i);
  __nv_bfloat16* to = (__nv_bfloat16*)out + i;
  to[0] = __float2bfloat16_rn(v.x);
  to[1] = __float2bfloat16_rn(v.y);
  to[2] = __float2bfloat16_rn(v.z);
  to[3] = __float2bfloat16_rn(v.w);
}

// Some weight rows' products, [num_rows][num_weight_rows], whole tiles of 16 from `first_tile` on, through an
// epilogue as in matmul.cuh. Grid: (tiles / 16, rounded up, rows): a thread for each output of each tile.
extern "C" __global__ void __launch_bounds__(256) finish_rows(float* out, int out_stride, int out_offset, const float* product, const float* bias, int num_outputs, int first_tile, int num_weight_rows, int epilogue) {
  const int tile = blockIdx.x * 16 + threadIdx.x / 16;
  if (tile * 16 >= num_weight_rows) return;
  const float* from = product + (size_t)blockIdx.y * num_weight_rows + tile * 16;
  float* to = out + (size_t)blockIdx.y * out_stride + out_offset;
  finish_tile(to, bias, epilogue, first_tile + tile, threadIdx.x % 16, num_outputs, [&](int output) { return from[output]; });
}
