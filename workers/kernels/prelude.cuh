// What every kernel includes: names of types, all inline PTX with its CPU twin, reductions.
//
// Owns: nothing. Runs in: every kernel. Source: PTX ISA for the instructions; this project.
// The same text is compiled by NVRTC and, with CUDA_ON_CPU, by g++ (workers/devices/emulator).
#pragma once
#ifdef CUDA_ON_CPU
#define DYNAMIC_SHARED(T, name) T* name = (T*)emulator::dynamic_memory()
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DYNAMIC_SHARED(T, name)                                 \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  T* name = (T*)name##_bytes
#endif

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ALL_LANES 0xFFFFFFFFu
#define MINUS_INFINITY __int_as_float((int)0xFF800000)

// ---- matrix instructions: D[16][8] += A[16][K] * B[K][8]; fragments as in emulator/matrix.h -------------
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef CUDA_ON_CPU
  emulator::multiply<emulator::Half, 16>(d, a, b, "mma.m16n8k16.f16");
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef CUDA_ON_CPU
  emulator::multiply<emulator::Tensor32, 8>(d, a, b, "mma.m16n8k8.tf32");
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// The nearest value with a 10-bit mantissa, ties away from zero.
__device__ __forceinline__ u32 to_tf32(float v) {
#ifdef CUDA_ON_CPU
  const u32 bits = __float_as_uint(v);
  return (bits & 0x7F800000u) == 0x7F800000u ? bits : (bits + 0x1000u) & 0xFFFFE000u;
#else
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return bits;
#endif
}

// ---- shared memory ---------------------------------------------------------------------------------------
#ifndef CUDA_ON_CPU
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#endif
// Four 8 x 8 matrices of 16-bit values; lane 8m + i points at row i of matrix m.
__device__ __forceinline__ void ldmatrix_x4(u32 (&to)[4], const void* row) {
#ifdef CUDA_ON_CPU
  emulator::load_matrices<4>(to, row, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}
__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&to)[4], const void* row) {
#ifdef CUDA_ON_CPU
  emulator::load_matrices<4>(to, row, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}
// 16 bytes from global to shared memory, past the registers; zeros where `valid` is false.
__device__ __forceinline__ void copy_async_16(void* to, const void* from, bool valid) {
  const int read_bytes = valid ? 16 : 0;
#ifdef CUDA_ON_CPU
  emulator::copy_async(to, from, 16, read_bytes);
#else
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(to)), "l"(from), "r"(read_bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void copy_async_commit() {
#ifdef CUDA_ON_CPU
  emulator::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most LEFT of this thread's groups are on their way. Other threads' need a barrier.
template <int LEFT> __device__ __forceinline__ void copy_async_wait() {
#ifdef CUDA_ON_CPU
  emulator::wait_copies(LEFT);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
// 16 bytes that are read once: they need not stay in the first cache.
__device__ __forceinline__ uint4 load_streaming(const void* p) {
#ifdef CUDA_ON_CPU
  return *(const uint4*)p;
#else
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#endif
}

// What another block wrote: from the cache that all share.
__device__ __forceinline__ float load_fresh(const float* p) {
#ifdef CUDA_ON_CPU
  return *p;
#else
  return __ldcg(p);
#endif
}

// ---- reductions: a fixed tree, so the same values give the same bits -----------------------------------------
template <class T> __device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int bits = 16; bits; bits >>= 1) v += __shfl_xor_sync(ALL_LANES, v, bits);
  return v;
}
template <class T> __device__ __forceinline__ T warp_max(T v) {
#pragma unroll
  for (int bits = 16; bits; bits >>= 1) {
    const T other = __shfl_xor_sync(ALL_LANES, v, bits);
    v = other > v ? other : v;
  }
  return v;
}
// For blocks of whole warps, at most 32; `cells` are 33 shared values. Every thread gets the result.
template <class T> __device__ __forceinline__ T block_sum(T v, T* cells) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  v = warp_sum(v);
  if (lane == 0) cells[warp] = v;
  __syncthreads();
  if (warp == 0) {
    v = warp_sum(lane < num_warps ? cells[lane] : (T)0);
    if (lane == 0) cells[32] = v;
  }
  __syncthreads();
  return cells[32];  // the next call writes it only behind a barrier
}
template <class T> __device__ __forceinline__ T block_max(T v, T* cells) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  v = warp_max(v);
  if (lane == 0) cells[warp] = v;
  __syncthreads();
  if (warp == 0) {
    v = warp_max(cells[lane < num_warps ? lane : 0]);
    if (lane == 0) cells[32] = v;
  }
  __syncthreads();
  return cells[32];
}
