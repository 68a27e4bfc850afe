// One token for every sampled row: penalties, bias, top_k, min_p, top_p, the draw, log-probabilities.
//
// Owns: SeatSampling's layout, together with workers/devices/cuda/sampling.py, which fills it. Runs in:
// the last two kernels of a step. Source: must agree with workers/sampling/sampler.py, the oracle, whose
// order of operations and random numbers it repeats; the search is this project's.
//
// Every filter keeps a prefix of the candidates, which are ordered by descending value, lowest id first
// among equal ones. So nothing is sorted: a prefix is a Cut, "all above this value, and so many of those equal
// to it", and a cut is found by descending through histograms of counts or of probability. Probabilities are
// summed as whole numbers (a weight of 1 is 2^62 over the vocabulary's size): such sums have no order, so
// the same row gives the same token whatever atomics do first. A weight is off by less than 2^-40.
#include "prelude.cuh"

#define SAMPLE_THREADS 512
#define BEST_THREADS 256
#define NUM_BINS 2048

#define DRAWS 1u  // as in workers/sampling/seats.py
#define ADJUSTS 2u
#define REPORTS 4u
#define COUNTS 8u  // penalties: drawn tokens are counted

// A word of `history`, per seat and token id.
#define IN_PROMPT 0x80000000u
#define SUPPRESSED 0x40000000u
#define COUNT_MASK 0x3FFFFFFFu

#define MAX_FLOAT 3.402823466e38f
#define ORDERED_MINUS_INFINITY 0x007FFFFFu
#define NOT_A_NUMBER 0xFFFFFFFFFFFFFFFFull
#define MAX_TOP 20

struct SeatSampling {
  u32 flags;
  float temperature;
  int top_k;  // the largest int: off
  float min_p;
  double top_p;
  u64 stream;  // the hashed seed
  int num_top;  // -1: no log-probabilities
  int adjust_below;  // ADJUSTS holds for tokens whose position is below
  int suppress_below;
  float repetition, presence, frequency;
};

// Larger for larger values; NaN aside. Both zeros are one value.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }
__device__ __forceinline__ bool is_nan(float x) { return (__float_as_uint(x) & 0x7FFFFFFFu) > 0x7F800000u; }
// Value and id in candidate order: the largest is the first candidate.
__device__ __forceinline__ u64 candidate(float x, int id) { return (u64)ordered(x) << 32 | (u32)~id; }
__device__ __forceinline__ float clipped(float x) { return fminf(fmaxf(x, -MAX_FLOAT), MAX_FLOAT); }

// Grid (splits, samples). Of each split of a row: its first candidate, or NOT_A_NUMBER, and its least finite value.
// Matches the first lines of HostSampler.sample.
extern "C" __global__ void __launch_bounds__(BEST_THREADS)
    row_best(u64* __restrict__ best, float* __restrict__ lowest, const float* __restrict__ logits, int vocab, int pitch) {
  __shared__ u64 cells[33];
  __shared__ float float_cells[33];
  const float* row = logits + (size_t)blockIdx.y * pitch;
  const int per_split = (vocab + gridDim.x - 1) / gridDim.x;
  const int first = blockIdx.x * per_split, end = min(first + per_split, vocab);
  u64 found = 0;
  float least = MAX_FLOAT;
  for (int i = first + threadIdx.x; i < end; i += BEST_THREADS) {
    const float x = row[i];
    const u64 mine = is_nan(x) ? NOT_A_NUMBER : candidate(x, i);
    found = mine > found ? mine : found;
    if (is_finite(x)) least = fminf(least, x);
  }
  found = block_max(found, cells);
  least = -block_max(-least, float_cells);
  if (threadIdx.x == 0) {
    best[blockIdx.y * gridDim.x + blockIdx.x] = found;
    lowest[blockIdx.y * gridDim.x + blockIdx.x] = least;
  }
}

struct Row {
  const float* logits;
  const u32* history;
  const float* bias;
  SeatSampling seat;
  int vocab;
  int position;  // that the drawn token will have
  bool adjusts;
  float best;
  float bins_a_unit;  // of value, in the first histogram
  float scale;  // of whole-number weights
};

// The logit after penalties, bias and suppression; rounded as NumPy rounds it.
__device__ __forceinline__ float value(const Row& row, int i) {
  float x = row.logits[i];
  if (!row.adjusts) return x;
  const u32 word = row.history[i];
  if (row.seat.flags & COUNTS && word & (IN_PROMPT | COUNT_MASK) && is_finite(x)) {
    const float count = (float)(word & COUNT_MASK);
    x = x > 0.0f ? __fdiv_rn(x, row.seat.repetition) : __fmul_rn(x, row.seat.repetition);
    const float charge = __fadd_rn(count > 0.0f ? row.seat.presence : 0.0f, __fmul_rn(row.seat.frequency, count));
    x = clipped(__fadd_rn(x, -charge));
  }
  const float bias = row.bias[i];
  if (bias != 0.0f && is_finite(x)) x = clipped(__fadd_rn(x, bias));
  if (word & SUPPRESSED && row.position < row.seat.suppress_below) x = MINUS_INFINITY;
  return x;
}
__device__ __forceinline__ float weight(const Row& row, float x) {
  return expf(__fdiv_rn(__fadd_rn(x, -row.best), row.seat.temperature));
}
// Ascending bins of descending values, linear in the value so that few values share one.
__device__ __forceinline__ int linear_bin(const Row& row, float x) {
  return (int)fminf(__fmul_rn(__fadd_rn(row.best, -x), row.bins_a_unit), (float)(NUM_BINS - 1));
}

struct Cut {
  u32 key;  // ordered value: everything above is kept
  u64 ties;  // and so many of those equal to it, lowest ids first
};
enum Measure { TOP_K, TOP_P, DRAW };

struct Workspace {
  u64 bins[NUM_BINS];
  u64 cells[33];
  u64 before;
  int bin;
};

// Sum of the values of the threads before this one; `total` of all.
__device__ __forceinline__ u64 scan(u64 v, u64* cells, u64& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 sum = v;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u64 other = __shfl_up_sync(ALL_LANES, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) cells[warp] = sum;
  __syncthreads();
  u64 before = 0;
  total = 0;
  for (int w = 0; w < SAMPLE_THREADS / 32; ++w) {
    if (w < warp) before += cells[w];
    total += cells[w];
  }
  __syncthreads();
  return before + sum - v;
}

// What a value counts for: 1 for top_k, else its weight; nothing where min_p drops it.
__device__ __forceinline__ u64 amount(const Row& row, float x, Measure by) {
  if (by == TOP_K && row.seat.min_p <= 0.0f) return 1;
  const float w = weight(row, x);
  if (w < row.seat.min_p) return 0;
  return by == TOP_K ? 1 : (u64)(w * row.scale);
}

// One value's part in the histogram of `level`. Levels 1 to 3 look only at values that share what was found:
// the linear bin, then the key's upper 11 bits, then 11 more.
__device__ __forceinline__ void put(
    const Row& row, Workspace& work, float x, u64 times, Measure by, int level, int bin0, u32 prefix) {
  const u32 key = ordered(x);
  int bin = linear_bin(row, x);
  if (level) {
    if (bin != bin0) return;
    if (level == 1) bin = NUM_BINS - 1 - (int)(key >> 21);
    if (level == 2) {
      if (key >> 21 != prefix >> 21) return;
      bin = NUM_BINS - 1 - (int)(key >> 10 & 2047u);
    }
    if (level == 3) {
      if (key >> 10 != prefix >> 10) return;
      bin = 1023 - (int)(key & 1023u);
    }
  }
  const u64 mine = times * amount(row, x, by);
  if (mine) atomicAdd(&work.bins[bin], mine);
}

// The shortest prefix of `cut` that reaches the measure's target: top_k candidates, or `share` of the weight
// that `cut` has (more than `share` for the draw). The whole block calls it and gets the same.
__device__ __forceinline__ Cut descend(const Row& row, Workspace& work, Cut cut, Measure by, double share) {
  u64 target = 0, before = 0;
  u32 prefix = 0;
  int bin0 = 0;
  for (int level = 0; level < 4; ++level) {
    for (int b = threadIdx.x; b < NUM_BINS; b += SAMPLE_THREADS) work.bins[b] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < row.vocab; i += SAMPLE_THREADS) {
      const float x = value(row, i);
      if (ordered(x) > cut.key) put(row, work, x, 1, by, level, bin0, prefix);
    }
    if (threadIdx.x == 0 && cut.ties) put(row, work, unordered(cut.key), cut.ties, by, level, bin0, prefix);
    __syncthreads();

    const int per_thread = NUM_BINS / SAMPLE_THREADS, first = threadIdx.x * per_thread;
    u64 sum = 0, total;
    for (int b = 0; b < per_thread; ++b) sum += work.bins[first + b];
    u64 reached = scan(sum, work.cells, total);
    if (level == 0) {
      if (by == TOP_K) {
        if (total <= (u64)row.seat.top_k) return cut;
        target = row.seat.top_k;
      } else {
        const double wanted = share * (double)total;
        target = by == TOP_P ? (u64)ceil(wanted) : (u64)wanted + 1;
        target = target < 1 ? 1 : target > total ? total : target;
      }
    }
    reached += before;
    if (reached < target && target <= reached + sum) {
      int b = 0;
      while (reached + work.bins[first + b] < target) reached += work.bins[first + b++];
      work.bin = first + b;
      work.before = reached;
    }
    __syncthreads();
    const int bin = work.bin;
    before = work.before;
    if (level == 0) bin0 = bin;
    if (level == 1) prefix = (u32)(NUM_BINS - 1 - bin) << 21;
    if (level == 2) prefix |= (u32)(NUM_BINS - 1 - bin) << 10;
    if (level == 3) prefix |= (u32)(1023 - bin);
    __syncthreads();
  }
  const u64 each = amount(row, unordered(prefix), by);
  return {prefix, (target - before + each - 1) / each};
}

// The id of the `number`-th (from 1) value equal to `key`, in order of ids.
__device__ __forceinline__ int locate(const Row& row, Workspace& work, u32 key, u64 number) {
  const int per_thread = (row.vocab + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
  const int first = min((int)threadIdx.x * per_thread, row.vocab), end = min(first + per_thread, row.vocab);
  u64 count = 0, total;
  for (int i = first; i < end; ++i) count += ordered(value(row, i)) == key;
  u64 before = scan(count, work.cells, total);
  if (before < number && number <= before + count)
    for (int i = first; i < end; ++i)
      if (ordered(value(row, i)) == key && ++before == number) work.bin = i;
  __syncthreads();
  const int found = work.bin;
  __syncthreads();
  return found;
}

__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}
// workers/sampling/uniform.py, bit for bit.
__device__ __forceinline__ double uniform(u64 stream, int position) {
  return (double)(mix(stream + ((u64)position + 1) * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53;
}

// workers/sampling/logprobs.py: the model's own distribution, of raw logits.
__device__ __forceinline__ void report(
    const Row& row, Workspace& work, float best, int token, float* logprob, int* top_ids, float* top_logprobs) {
  u64 sum = 0;
  for (int i = threadIdx.x; i < row.vocab; i += SAMPLE_THREADS)
    sum += (u64)(expf(__fadd_rn(row.logits[i], -best)) * row.scale);
  sum = block_sum(sum, work.cells);
  const double normaliser = (double)best + log((double)sum / (double)row.scale);
  if (threadIdx.x == 0) *logprob = (float)((double)row.logits[token] - normaliser);
  u64 last = NOT_A_NUMBER;
  for (int k = 0; k < row.seat.num_top; ++k) {
    u64 found = 0;
    for (int i = threadIdx.x; i < row.vocab; i += SAMPLE_THREADS) {
      const u64 mine = candidate(row.logits[i], i);
      if (mine < last && mine > found) found = mine;
    }
    found = last = block_max(found, work.cells);
    const bool exists = (u32)(found >> 32) > ORDERED_MINUS_INFINITY;
    if (threadIdx.x == 0) {
      top_ids[k] = exists ? (int)~(u32)found : 0;
      top_logprobs[k] = exists ? (float)((double)unordered((u32)(found >> 32)) - normaliser) : MINUS_INFINITY;
    }
  }
}

// Grid (samples). Writes what the host reads (token_ids, ok, logprobs [samples], tops [samples][MAX_TOP]),
// last_token [seats] for the next step's embedding, and counts in `history` [seats][history_pitch].
// Matches HostSampler.sample: exactly but for draws that fall on the border of two candidates, where the
// last bits of exp and of the sums decide. Shared memory 17 KB.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample(int* __restrict__ token_ids, int* __restrict__ ok, float* __restrict__ logprobs, int* __restrict__ top_ids,
           float* __restrict__ top_logprobs, int* __restrict__ last_token, u32* history, const float* bias,
           const float* __restrict__ logits, const u64* __restrict__ best, const float* __restrict__ lowest,
           const int* __restrict__ sample_rows, const int* __restrict__ sample_seats, const int* __restrict__ positions,
           const SeatSampling* __restrict__ seats, int vocab, int pitch, int history_pitch, int splits) {
  __shared__ Workspace work;
  const int s = blockIdx.x, seat = sample_seats[s];
  u64 first = 0;
  float least = MAX_FLOAT;
  for (int i = 0; i < splits; ++i) {
    first = max(first, best[s * splits + i]);
    least = fminf(least, lowest[s * splits + i]);
  }
  const float raw_best = unordered((u32)(first >> 32));
  bool is_sound = first != NOT_A_NUMBER && is_finite(raw_best);
  int token = is_sound ? (int)~(u32)first : 0;

  Row row;
  row.seat = seats[seat];
  row.logits = logits + (size_t)s * pitch;
  row.history = history + (size_t)seat * history_pitch;
  row.bias = bias + (size_t)seat * history_pitch;
  row.vocab = vocab;
  row.position = positions[sample_rows[s]] + 1;
  row.adjusts = row.seat.flags & ADJUSTS && row.position < row.seat.adjust_below;
  row.best = raw_best;
  row.scale = (float)(1ull << (30 + __clz(vocab)));  // 2^62 over the next power of two
  const bool was_sound = is_sound;
  if (is_sound && row.adjusts) {
    first = 0;
    least = MAX_FLOAT;
    for (int i = threadIdx.x; i < vocab; i += SAMPLE_THREADS) {
      const float x = value(row, i);
      first = max(first, candidate(x, i));
      if (is_finite(x)) least = fminf(least, x);
    }
    first = block_max(first, work.cells);
    least = -block_max(-least, (float*)work.bins);
    row.best = unordered((u32)(first >> 32));
    is_sound = is_finite(row.best);  // else everything is suppressed
    token = (int)~(u32)first;
  }
  if (is_sound && row.seat.flags & DRAWS) {
    const float range = __fadd_rn(row.best, -least);
    row.bins_a_unit = range > 0.0f && is_finite(range) ? (NUM_BINS - 1) / range : 0.0f;
    Cut cut = {ORDERED_MINUS_INFINITY, 0};
#pragma unroll 1
    for (int by = TOP_K; by <= DRAW; ++by) {  // one call site, so that it is inlined and nothing spills
      if (by == TOP_K && row.seat.top_k >= vocab || by == TOP_P && row.seat.top_p >= 1.0) continue;
      cut = descend(row, work, cut, (Measure)by, by == DRAW ? uniform(row.seat.stream, row.position) : row.seat.top_p);
    }
    token = locate(row, work, cut.key, cut.ties);
  }
  if (is_sound && row.seat.flags & REPORTS)
    report(row, work, raw_best, token, logprobs + s, top_ids + s * MAX_TOP, top_logprobs + s * MAX_TOP);
  if (threadIdx.x == 0) {
    token_ids[s] = token;
    ok[s] = is_sound;
    last_token[seat] = token;
    if (was_sound && row.adjusts && row.seat.flags & COUNTS) history[(size_t)seat * history_pitch + token] += 1;
  }
}
