// Deliberately wrong kernels, one defect each. The emulator must find every one of them; a GPU would
// run most of these without a word.
// Reference: none; tests/workers/devices/emulator/test_backend_checks.py says what must be reported.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(64) missing_barrier(float* out, const float* in) {
  __shared__ float s[64];
  s[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = s[63 - threadIdx.x];
}
// The second half of a tile is overwritten while the first warp may still read it.
extern "C" __global__ void __launch_bounds__(64) missing_second_barrier(float* out, const float* in) {
  __shared__ float s[64];
  float sum = 0;
  for (int round = 0; round < 2; ++round) {
    s[threadIdx.x] = in[round * 64 + threadIdx.x];
    __syncthreads();
    sum += s[63 - threadIdx.x];
  }
  out[threadIdx.x] = sum;
}
// A warp that is a round ahead overwrites what the other still reads: seen only if one runs far ahead.
extern "C" __global__ void __launch_bounds__(64) missing_barrier_far_ahead(float* out, const float* in) {
  __shared__ float s[2][64];
  float sum = 0;
  for (int round = 0; round < 4; ++round) {
    s[round & 1][threadIdx.x] = in[round * 64 + threadIdx.x];
    if (round == 0) __syncthreads();
    else __syncwarp();
    for (int i = 0; i < 4; ++i) sum += warp_sum(s[round & 1][(threadIdx.x + i) & 31]);
  }
  out[threadIdx.x] = sum;
}
extern "C" __global__ void __launch_bounds__(64) divergent_barrier(float* out) {
  if (threadIdx.x < 32) __syncthreads();
  else __syncthreads();
  out[threadIdx.x] = 1;
}
extern "C" __global__ void __launch_bounds__(64) barrier_in_a_branch(float* out) {
  if (threadIdx.x == 5) __syncthreads();
  else out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, 1.0f, 1);
}
extern "C" __global__ void __launch_bounds__(32) divergent_collective(float* out) {
  float v = threadIdx.x;
  if (threadIdx.x < 16) v += __shfl_down_sync(ALL_LANES, v, 8);
  else __syncwarp();
  out[threadIdx.x] = v;
}
extern "C" __global__ void __launch_bounds__(32) divergent_matrix(float* out) {
  float d[4] = {0, 0, 0, 0};
  const u32 a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
  if (threadIdx.x < 16) mma_f16(d, a, b);
  else mma_tf32(d, a, b);
  out[threadIdx.x] = d[0];
}
extern "C" __global__ void __launch_bounds__(32) wrong_mask(float* out) { out[threadIdx.x] = __shfl_sync(0x0000FFFFu, 1.0f, 0); }
extern "C" __global__ void __launch_bounds__(32) lane_outside_the_mask(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000FFFFu, 1.0f, 20);
}
extern "C" __global__ void __launch_bounds__(32) returned_lanes(float* out, int count) {
  if ((int)threadIdx.x >= count) return;
  out[threadIdx.x] = warp_sum(1.0f);
}
extern "C" __global__ void __launch_bounds__(32) misaligned_load(int* out, const u8* in) { out[threadIdx.x] = *(const int*)(in + 34 * threadIdx.x + 2); }
extern "C" __global__ void __launch_bounds__(32) misaligned_vector(float* out, const float* in) { out[threadIdx.x] = ((const float4*)(in + 2 * threadIdx.x))->x; }
extern "C" __global__ void __launch_bounds__(32) misaligned_copy(float* out, const float* in) {
  __shared__ __align__(16) float s[160];
  copy_async_16(s + 5 * threadIdx.x, in + 4 * threadIdx.x, true);
  copy_async_commit();
  copy_async_wait<0>();
  out[threadIdx.x] = s[5 * threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(32) misaligned_matrix_row(float* out) {
  __shared__ __align__(16) u16 s[32 * 12];
  for (int i = 0; i < 12; ++i) s[threadIdx.x * 12 + i] = 0;
  __syncthreads();
  u32 to[4];
  ldmatrix_x4(to, s + 12 * threadIdx.x);
  out[threadIdx.x] = (float)to[0];
}
extern "C" __global__ void __launch_bounds__(32) overrun(float* out) { out[blockIdx.x * 32 + threadIdx.x] = 1; }
extern "C" __global__ void __launch_bounds__(32) read_overrun(float* out, const float4* in) { out[threadIdx.x] = in[threadIdx.x].x; }
extern "C" __global__ void __launch_bounds__(32) null_pointer(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x]; }
extern "C" __global__ void __launch_bounds__(32) shared_overrun(float* out) {
  __shared__ float s[32];
  s[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(32) dynamic_overrun(float* out) {
  DYNAMIC_SHARED(float, s);
  s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(32) local_overrun(float* out, int index) {
  float v[4] = {1, 2, 3, 4};
  out[threadIdx.x] = v[index + threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(32) unwritten_shared(float* out) {
  __shared__ float s[32];
  if (threadIdx.x) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(32) partly_unwritten(float* out) {
  if (threadIdx.x % 2) out[threadIdx.x] = 1;
}
extern "C" __global__ void __launch_bounds__(32) short_copy_wait(float* out, const float* in) {
  __shared__ __align__(16) float s[128];
  copy_async_16(s + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
  copy_async_commit();
  copy_async_wait<1>();  // leaves the only group on its way
  __syncthreads();
  out[threadIdx.x] = s[4 * threadIdx.x];
  copy_async_wait<0>();
}
// The wait is for one's own copies only: others' data need a barrier.
extern "C" __global__ void __launch_bounds__(64) copy_without_barrier(float* out, const float* in) {
  __shared__ __align__(16) float s[256];
  copy_async_16(s + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
  copy_async_commit();
  copy_async_wait<0>();
  out[threadIdx.x] = s[4 * (63 - threadIdx.x)];
}
extern "C" __global__ void __launch_bounds__(32) forgotten_copy_wait(float* out, const float* in) {
  __shared__ __align__(16) float s[128];
  copy_async_16(s + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
  copy_async_commit();
  out[threadIdx.x] = 1;
}
extern "C" __global__ void __launch_bounds__(32) wide_shift(u32* out, int by) { out[threadIdx.x] = 1u << (by + threadIdx.x); }
extern "C" __global__ void __launch_bounds__(32) deep_stack(float* out, int size) {
  volatile float v[20000];
  for (int i = 0; i < size; ++i) v[i] = i;
  out[threadIdx.x] = v[size - 1];
}
extern "C" __global__ void __launch_bounds__(32) store_value(int* out, int v) { out[threadIdx.x] = v; }
