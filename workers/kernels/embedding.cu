// Rows of a weight matrix as floats: the embedding of tokens, and whole matrices for cuBLAS.
//
// FORMAT: the table's GGML type. Grid: embed (rows), dequantise (tiles of 16 outputs).
// Shared memory: none. Precision: the values
// of the format exactly, then `scale` in float32 (embed) or rounding to bfloat16 (dequantise).
// Reference: `workers/quant/dequantise.py`.
#include "formats.cuh"

#define PREVIOUS_SAMPLE -1  // workers.devices.interface

#if FORMAT == GGML_F32 || FORMAT == GGML_F16 || FORMAT == GGML_BF16
__device__ __forceinline__ float plain_value(const void* table, size_t index) {
#if FORMAT == GGML_F32
  return ((const float*)table)[index];
#elif FORMAT == GGML_F16
  return __half2float(((const __half*)table)[index]);
#else
  return __bfloat162float(((const __nv_bfloat16*)table)[index]);
#endif
}
// `write(input, value)` for every input of one output, by all threads of the block.
template <class Write>
__device__ __forceinline__ void read_row(const void* table, const void*, int, int, int size, int output, Write write) {
  for (int i = threadIdx.x; i < size; i += blockDim.x) write(i, plain_value(table, (size_t)output * size + i));
}
#else
__device__ __forceinline__ float weight_of(const Scale& s, int half, int q) {
  return __fadd_rn(__fmul_rn(s.scale[half], (float)(q - OFFSET)), s.min[half]);
}
template <class Write>
__device__ __forceinline__ void read_row(const void* table, const void* codebook, int num_tiles, int num_units, int size,
                                         int output, Write write) {
  const Matrix m = open_matrix(table, codebook, num_tiles, num_units);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5, t = lane & 3;
  const int in_tile = output % TILE_OUTPUTS, o = in_tile >> 3;
  for (int unit = warp; unit < num_units; unit += num_warps) {
    Unit u;
    load_unit(u, m, output / TILE_OUTPUTS, unit);
    if (lane >> 2 != (in_tile & 7)) continue;  // four lanes hold this output
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      u32 a[4];
      operand(a, u, m, block);
      const Scale s = o ? scale_of(u, 1, block) : scale_of(u, 0, block);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 word = o ? a[1 + 2 * half] : a[2 * half];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = unit * UNIT_INPUTS + 32 * block + 16 * half + 4 * t + j;
          if (i < size) write(i, weight_of(s, half, signed_byte(word, j)));
        }
      }
    }
  }
}
#endif

// hidden = table[token] * scale; a token PREVIOUS_SAMPLE is the one that the row's seat drew last.
// `row_seats` may be null where no token is PREVIOUS_SAMPLE.
extern "C" __global__ void __launch_bounds__(128) embed(float* hidden, const int* tokens, const int* row_seats, const int* last_tokens, const void* table, const void* codebook, int num_tiles, int num_units, int size, float scale) {
  const int row = blockIdx.x;
  int token = tokens[row];
  if (token == PREVIOUS_SAMPLE) token = last_tokens[row_seats[row]];
  float* to = hidden + (size_t)row * size;
  read_row(table, codebook, num_tiles, num_units, size, token, [&](int i, float v) { to[i] = __fmul_rn(v, scale); });
}

// out [outputs, inputs] bfloat16, row-major.
extern "C" __global__ void __launch_bounds__(128) dequantise(void* out, const void* weight, const void* codebook, int num_outputs, int num_tiles, int num_units, int size) {
  for (int i = 0; i < TILE_OUTPUTS; ++i) {
    const int output = blockIdx.x * TILE_OUTPUTS + i;
    if (output >= num_outputs) break;
    __nv_bfloat16* to = (__nv_bfloat16*)out + (size_t)output * size;
    read_row(weight, codebook, num_tiles, num_units, size, output,
             [&](int k, float v) { to[k] = __float2bfloat16_rn(v); });
  }
}
