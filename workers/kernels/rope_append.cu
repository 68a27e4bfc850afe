// Rotation of queries and keys, and what goes into the pages of the KV cache.
//
// Owns: the layout of a layer's cache: keys and values are each float16 [pages][kv heads][16][head size]. Page
// tables are [seats][pitch], a row finds its own by its seat. Source: rotary embeddings (Su et al.,
// arXiv 2104.09864), both pairings; paging is Kwon et al., arXiv 2309.06180.
#include "prelude.cuh"

#define PAGE_TOKENS 16  // workers.devices.interface

// Grid: (rows, heads + 2 kv heads), 64 threads. Shared memory: none. Precision: float32, rounded to float16
// at the end. qkv: float [rows][(heads + 2 kv heads) * head_size]; rotations: [positions][num_pairs] (cos, sin);
// q: float16 [rows][heads][head_size], multiplied by `q_scale`. Dimensions past 2 num_pairs are not rotated.
// Reference: tests/workers/kernels/reference.py, `rope`.
extern "C" __global__ void __launch_bounds__(64) rope_append(const float* qkv, const float2* rotations, const int* positions, const int* row_seats, const int* page_tables, int pitch, void* q, void* keys, void* values, int num_heads, int num_kv_heads, int head_size, int num_pairs, int interleaved, float q_scale) {
  const int head = blockIdx.y, row = blockIdx.x, position = positions[row];
  const float* from = qkv + ((size_t)row * gridDim.y + head) * head_size;
  const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
  __half* to;
  if (is_query) {
    to = (__half*)q + ((size_t)row * num_heads + head) * head_size;
  } else {
    const int kv_head = is_value ? head - num_heads - num_kv_heads : head - num_heads;
    const int page = page_tables[(size_t)row_seats[row] * pitch + position / PAGE_TOKENS];
    to = (__half*)(is_value ? values : keys) +
         (((size_t)page * num_kv_heads + kv_head) * PAGE_TOKENS + position % PAGE_TOKENS) * head_size;
  }
  const float scale = is_query ? q_scale : 1.0f;
  for (int i = threadIdx.x; i < head_size / 2; i += blockDim.x) {
    const bool rotated = !is_value && i < num_pairs;
    const int first = rotated && !interleaved ? i : 2 * i, second = rotated && !interleaved ? i + num_pairs : 2 * i + 1;
    float a = from[first], b = from[second];
    if (rotated) {
      const float2 r = rotations[(size_t)position * num_pairs + i];
      const float turned = __fadd_rn(__fmul_rn(a, r.x), -__fmul_rn(b, r.y));
      b = __fadd_rn(__fmul_rn(a, r.y), __fmul_rn(b, r.x));
      a = turned;
    }
    to[first] = __float2half_rn(__fmul_rn(a, scale));
    to[second] = __float2half_rn(__fmul_rn(b, scale));
  }
}

// Enters pages into tables. entries: [count] (seat, column, page). Grid: (count / 128, rounded up).
extern "C" __global__ void __launch_bounds__(128) update_pages(int* page_tables, int pitch, const int* entries, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) page_tables[(size_t)entries[3 * i] * pitch + entries[3 * i + 1]] = entries[3 * i + 2];
}

// The next decode step's input without the host: every row goes on by one position with the token that its
// seat draws now (PREVIOUS_SAMPLE). Grid: (num_rows / 128, rounded up).
extern "C" __global__ void __launch_bounds__(128) advance(int* tokens, int* positions, int num_rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;
  tokens[row] = -1;
  positions[row] += 1;
}
