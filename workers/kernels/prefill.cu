// What large prompt chunks need around cuBLAS: activations in bfloat16, and gate times up afterwards.
//
// Owns: nothing. Runs in: steps of many rows, where a matrix is dequantised (embedding.cu) and multiplied by cuBLAS.
// Source: this project. Shared memory: none. Precision: bfloat16 as rounded, else float32. Reference: tests/workers/devices/cuda/test_dense.py.
#include "prelude.cuh"

// Any grid of blocks of 256. Rounds to nearest even.
extern "C" __global__ void __launch_bounds__(256) to_bfloat16(void* out, const float* x, int count) {
  __nv_bfloat16* to = (__nv_bfloat16*)out;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    to[i] = __float2bfloat16_rn(x[i]);
}

// act [rows][ffn] = silu(gate) * up. both: float [rows][num_weight_rows], in the order of packed gate and up: eight
// outputs of gate, then the same of up. Grid: (rows, any), blocks of 256.
extern "C" __global__ void __launch_bounds__(256) join_gate_up(float* act, const float* both, int ffn, int num_weight_rows) {
  const float* from = both + (size_t)blockIdx.x * num_weight_rows;
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < ffn; i += gridDim.y * blockDim.x) {
    const int gate = (i >> 3) * 16 + (i & 7);
    const float g = from[gate];
    act[(size_t)blockIdx.x * ffn + i] = __fmul_rn(__fdiv_rn(g, 1.0f + expf(-g)), from[gate + 8]);
  }
}
