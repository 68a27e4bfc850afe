// Causal attention over pages with grouped queries, on the tensor cores.
//
// HEAD_SIZE: a multiple of 16, at most 128. SPLIT_TOKENS: a multiple of 32. A warp takes 16 queries, which are
// (row, head of the group) pairs of one sequence and one KV head, so that keys are read once for the group.
// Precision: queries, keys, values and probabilities float16; scores, sums and the softmax float32, base 2
// (the queries carry scale * log2(e)).
//
// The order of a row's sum never depends on its batch: a sequence is cut into splits at multiples of
// SPLIT_TOKENS, a split runs a softmax over tiles in order of position, and `fold` joins splits in order.
// Decode rows and prompt chunks run the same code on the same cuts, so they agree bit for bit: keys that a row
// may not see add exact zeros.
//
// Source: the running softmax is Milakov and Gimelshein (arXiv 1805.02867), tiles in registers are Dao (arXiv
// 2307.08691). Reference: tests/workers/kernels/reference.py, `attention`.
#include "matmul.cuh"

#define PAGE_TOKENS 16
#define TILE_TOKENS 32
#define QUERIES 16                  // of a warp
#define PITCH (HEAD_SIZE + 8)       // of a row in shared memory: keeps the rows of a matrix in different banks
#define CHUNKS (HEAD_SIZE / 8)      // of 16 bytes in a row
#define DEPTHS (HEAD_SIZE / 16)     // steps of the matrix instruction through a head
#define COLUMNS (HEAD_SIZE / 8)     // groups of 8 output dimensions

struct __align__(16) Tile {
  __half keys[TILE_TOKENS][PITCH], values[TILE_TOKENS][PITCH];
};

// What a warp has of its 16 queries: lane 4g + t holds rows g and g + 8, in each group of 8 dimensions 2t, 2t + 1.
struct Partial {
  float best[2], sum[2];
  float out[COLUMNS][4];
};

__device__ __forceinline__ void clear(Partial& p) {
  p.best[0] = p.best[1] = MINUS_INFINITY;
  p.sum[0] = p.sum[1] = 0;
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) p.out[c][0] = p.out[c][1] = p.out[c][2] = p.out[c][3] = 0;
}

// How much two sums weigh once they are relative to the larger of both maxima.
__device__ __forceinline__ void weigh(float a, float b, float& best, float& weight_a, float& weight_b) {
  best = fmaxf(a, b);  // finite: every row sees the first split's first key
  weight_a = exp2f(a - best);
  weight_b = exp2f(b - best);
}
__device__ __forceinline__ float join(float a, float weight_a, float b, float weight_b) {
  return __fmaf_rn(b, weight_b, __fmul_rn(a, weight_a));
}

// Copies keys and values at `start`..; what lies after `last` is zeros, whatever the page holds.
template <int THREADS>
__device__ __forceinline__ void fetch_tile(Tile& tile, const __half* keys, const __half* values, const int* pages,
                                           int kv_head, int num_kv_heads, int start, int last) {
  for (int i = threadIdx.x; i < TILE_TOKENS * CHUNKS; i += THREADS) {
    const int token = i / CHUNKS, column = i % CHUNKS * 8, position = start + token;
    const bool valid = position <= last;
    const int page = pages[(valid ? position : last) / PAGE_TOKENS];
    const size_t from = (((size_t)page * num_kv_heads + kv_head) * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_SIZE + column;
    copy_async_16(&tile.keys[token][column], keys + from, valid);
    copy_async_16(&tile.values[token][column], values + from, valid);
  }
}

__device__ __forceinline__ u32 pack(float a, float b) {
  const __half2 both = __floats2half2_rn(a, b);
  return *(const u32*)&both;
}

// One tile of keys at `start`; `limits` are the last positions that rows g and g + 8 may see.
__device__ __forceinline__ void attend_tile(Partial& p, const u32 (&q)[DEPTHS][4], const Tile& tile, int start,
                                            const int (&limits)[2]) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  float scores[TILE_TOKENS / 8][4];
#pragma unroll
  for (int n = 0; n < TILE_TOKENS / 8; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0;
#pragma unroll
  for (int d = 0; d < DEPTHS; ++d)
#pragma unroll
    for (int n = 0; n < TILE_TOKENS / 16; ++n) {
      u32 k[4];  // of 16 keys: (first 8, depth 0..7), (first 8, 8..15), (last 8, 0..7), (last 8, 8..15)
      ldmatrix_x4(k, &tile.keys[16 * n + (lane & 7) + (lane >> 4) * 8][16 * d + (lane >> 3 & 1) * 8]);
      const u32 first[2] = {k[0], k[1]}, second[2] = {k[2], k[3]};
      mma_f16(scores[2 * n], q[d], first);
      mma_f16(scores[2 * n + 1], q[d], second);
    }
  float shrink[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float best = MINUS_INFINITY;
#pragma unroll
    for (int n = 0; n < TILE_TOKENS / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& s = scores[n][2 * r + c];
        if (start + 8 * n + 2 * t + c > limits[r]) s = MINUS_INFINITY;
        best = fmaxf(best, s);
      }
    best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 1));
    best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 2));
    best = fmaxf(best, p.best[r]);
    const float base = best == MINUS_INFINITY ? 0.0f : best;
    shrink[r] = exp2f(p.best[r] - base);
    p.best[r] = best;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < TILE_TOKENS / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& s = scores[n][2 * r + c];
        s = exp2f(s - base);
        sum = __fadd_rn(sum, s);
      }
    p.sum[r] = __fmaf_rn(p.sum[r], shrink[r], sum);  // of this lane's keys only, until the split ends
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) p.out[c][e] = __fmul_rn(p.out[c][e], shrink[e >> 1]);
#pragma unroll
  for (int n = 0; n < TILE_TOKENS / 16; ++n) {
    const u32 weights[4] = {pack(scores[2 * n][0], scores[2 * n][1]), pack(scores[2 * n][2], scores[2 * n][3]),
                            pack(scores[2 * n + 1][0], scores[2 * n + 1][1]),
                            pack(scores[2 * n + 1][2], scores[2 * n + 1][3])};
#pragma unroll
    for (int c = 0; c < COLUMNS / 2; ++c) {
      u32 v[4];  // of 16 dimensions: (keys 0..7, first 8), (keys 8..15, first 8), (0..7, last 8), (8..15, last 8)
      ldmatrix_x4_transposed(v, &tile.values[16 * n + (lane & 15)][16 * c + (lane >> 4) * 8]);
      const u32 first[2] = {v[0], v[1]}, second[2] = {v[2], v[3]};
      mma_f16(p.out[2 * c], weights, first);
      mma_f16(p.out[2 * c + 1], weights, second);
    }
  }
}

// One split for the 16 queries of each of the block's warps; `last` is the last position any of them sees.
template <int THREADS>
__device__ __forceinline__ void attend_split(Partial& p, const u32 (&q)[DEPTHS][4], Tile (&tiles)[2],
                                             const __half* keys, const __half* values, const int* pages, int kv_head,
                                             int num_kv_heads, int split, int last, const int (&limits)[2]) {
  const int begin = split * SPLIT_TOKENS, end = min(begin + SPLIT_TOKENS, last + 1);
  clear(p);
  fetch_tile<THREADS>(tiles[0], keys, values, pages, kv_head, num_kv_heads, begin, last);
  copy_async_commit();
  int which = 0;
  for (int start = begin; start < end; start += TILE_TOKENS, which ^= 1) {
    if (start + TILE_TOKENS < end)
      fetch_tile<THREADS>(tiles[which ^ 1], keys, values, pages, kv_head, num_kv_heads, start + TILE_TOKENS, last);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    attend_tile(p, q, tiles[which], start, limits);
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    p.sum[r] += __shfl_xor_sync(ALL_LANES, p.sum[r], 1);
    p.sum[r] += __shfl_xor_sync(ALL_LANES, p.sum[r], 2);
  }
}

// The queries of one warp: number `index` is (row index / group, head index % group) of the tile's rows.
struct Queries {
  int rows[2], heads[2];  // of the lane's rows g and g + 8; row -1: padding
};
__device__ __forceinline__ void find_queries(Queries& where, int first_query, int first_row, int num_rows, int group,
                                             int kv_head) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int index = first_query + ((threadIdx.x & 31) >> 2) + 8 * r;
    where.rows[r] = index < num_rows * group ? first_row + index / group : -1;
    where.heads[r] = kv_head * group + index % group;
  }
}
__device__ __forceinline__ void load_queries(u32 (&q)[DEPTHS][4], const Queries& where, const __half* all, int num_heads) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int d = 0; d < DEPTHS; ++d)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = where.rows[i & 1];
      const __half* from = all + ((size_t)max(row, 0) * num_heads + where.heads[i & 1]) * HEAD_SIZE;
      q[d][i] = row < 0 ? 0 : *(const u32*)(from + 16 * d + 8 * (i >> 1) + 2 * t);
    }
}

// Decode: one row. Grid: (any number of blocks that share out the splits, kv heads, rows); one warp. Shared memory:
// static, 34 KiB at most. Assumes at most 16 heads in a group. partials: float [rows][heads][max_splits][HEAD_SIZE + 2],
// unnormalised output, then the sum and the maximum; `combine` reads them.
extern "C" __global__ void __launch_bounds__(32) attend_row(float* partials, int max_splits, const void* q, const void* keys, const void* values, const int* positions, const int* row_seats, const int* page_tables, int pitch, int num_heads) {
  __shared__ Tile tiles[2];
  const int row = blockIdx.z, kv_head = blockIdx.y, num_kv_heads = gridDim.y, group = num_heads / num_kv_heads;
  const int last = positions[row], limits[2] = {last, last};
  if (blockIdx.x * SPLIT_TOKENS > last) return;
  const int* pages = page_tables + (size_t)row_seats[row] * pitch;
  Queries where;
  find_queries(where, 0, row, 1, group, kv_head);
  u32 queries[DEPTHS][4];
  load_queries(queries, where, (const __half*)q, num_heads);
  for (int split = blockIdx.x; split * SPLIT_TOKENS <= last; split += gridDim.x) {
    Partial p;
    attend_split<32>(p, queries, tiles, (const __half*)keys, (const __half*)values, pages, kv_head, num_kv_heads, split,
                     last, limits);
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (where.rows[r] < 0) continue;
      float* to = partials + (((size_t)row * num_heads + where.heads[r]) * max_splits + split) * (HEAD_SIZE + 2);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        *(float2*)(to + 8 * c + 2 * t) = make_float2(p.out[c][2 * r], p.out[c][2 * r + 1]);
      if (t == 0) *(float2*)(to + HEAD_SIZE) = make_float2(p.sum[r], p.best[r]);
    }
  }
}

// Joins the splits of decode rows. Grid: (heads, rows), HEAD_SIZE threads rounded up to warps.
// out: float [rows][heads * HEAD_SIZE], or null. values, records: the same as a product takes it (matmul.cuh), or null;
// only for rows of whole units and heads of whole blocks of 32. Float16 needs no scale: it is what values are stored as.
extern "C" __global__ void __launch_bounds__(128) combine(float* out, const float* partials, int max_splits, const int* positions, u8* values, void* records, int halves) {
  const int head = blockIdx.x, row = blockIdx.y, d = threadIdx.x, last = positions[row];
  if (d >= HEAD_SIZE) return;
  const size_t cell = (size_t)row * gridDim.x + head;
  const float* from = partials + cell * max_splits * (HEAD_SIZE + 2);
  float best = MINUS_INFINITY, sum = 0, total = 0;
  for (int split = 0; split * SPLIT_TOKENS <= last; ++split, from += HEAD_SIZE + 2) {
    float weight_total, weight_split;
    weigh(best, from[HEAD_SIZE + 1], best, weight_total, weight_split);
    total = join(total, weight_total, from[d], weight_split);
    sum = join(sum, weight_total, from[HEAD_SIZE], weight_split);
  }
  const float v = __fdiv_rn(total, sum);
  if (out) out[cell * HEAD_SIZE + d] = v;
  if (!values) return;
  const size_t size = (size_t)gridDim.x * HEAD_SIZE;
  const int i = head * HEAD_SIZE + d;
  if (halves) {
    ((__half*)values)[row * size + place_of_half(i)] = __float2half_rn(v);
    if (i == 0) ((float*)records)[row] = 1.0f;
  } else {
    quantise_block(v, i >> 5, i & 31, values + row * size, (Record*)records + row * (size / 32));
  }
}

// Prompt chunks: tiles [count] of (first row, number of rows), contiguous rows of one sequence, at most
// 64 / group of them. Grid: (tiles, kv heads); four warps. Shared memory: static, 34 KiB at most.
// out: float [rows][heads * HEAD_SIZE].
extern "C" __global__ void __launch_bounds__(128) attend_chunk(float* out, const int2* chunks, const void* q, const void* keys, const void* values, const int* positions, const int* row_seats, const int* page_tables, int pitch, int num_heads) {
  __shared__ Tile tiles[2];
  const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, group = num_heads / num_kv_heads;
  const int2 chunk = chunks[blockIdx.x];
  const int last = positions[chunk.x + chunk.y - 1];
  const int* pages = page_tables + (size_t)row_seats[chunk.x] * pitch;
  Queries where;
  find_queries(where, (threadIdx.x >> 5) * QUERIES, chunk.x, chunk.y, group, kv_head);
  const int limits[2] = {where.rows[0] < 0 ? last : positions[where.rows[0]],
                         where.rows[1] < 0 ? last : positions[where.rows[1]]};
  u32 queries[DEPTHS][4];
  load_queries(queries, where, (const __half*)q, num_heads);
  Partial total;
  clear(total);
  for (int split = 0; split * SPLIT_TOKENS <= last; ++split) {
    Partial p;
    attend_split<128>(p, queries, tiles, (const __half*)keys, (const __half*)values, pages, kv_head, num_kv_heads, split,
                      last, limits);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float weight_total, weight_split;
      weigh(total.best[r], p.best[r], total.best[r], weight_total, weight_split);
      total.sum[r] = join(total.sum[r], weight_total, p.sum[r], weight_split);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) total.out[c][e] = join(total.out[c][e], weight_total, p.out[c][e], weight_split);
    }
  }
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (where.rows[r] < 0) continue;
    float* to = out + ((size_t)where.rows[r] * num_heads + where.heads[r]) * HEAD_SIZE;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      *(float2*)(to + 8 * c + 2 * t) = make_float2(__fdiv_rn(total.out[c][2 * r], total.sum[r]),
                                                   __fdiv_rn(total.out[c][2 * r + 1], total.sum[r]));
  }
}
