// One token for every sampled row: penalties, bias, masks, filters, the draw, log-probabilities.
//
// Owns: the layouts `Seat` and `Result`, which `sampling_layout.py` repeats. Reference: the host sampler,
// workers/sampling/sampler.py, whose order of operations this repeats. Precision: float32 for logits and weights. Only
// sums differ: a weight is a whole number of 2^-44, so that sums have no rounding and no order and every
// comparison of sums is exact; a result can differ where a sum is within 2^-26 of a limit.
//
// Nothing is sorted. Candidates are ordered by (descending value, ascending id), a 64-bit key without ties; the
// filters all keep a prefix of that order, and `find` descends to the key where a running sum reaches its
// target: by one histogram that is linear in the value, so that few of a vocabulary's logits meet in a bin and
// wait for each other there (the upper bits of a float would put all of them in some twenty), then
// within that bin by histograms of 11 (10) bits of the key at a time.
#include "prelude.cuh"

#define THREADS 1024  // one block reads a row of the vocabulary several times: as many loads in flight as it can have
#define MAX_TOP 20  // ds4.generation.MAX_TOP_LOGPROBS
#define BINS 2048
#define LEVELS 5
#define ONE 17592186044416.0f  // 2^44, the weight of the best candidate

#define DRAWS 1  // bits of Seat.needs, as in workers/sampling/seats.py
#define ADJUSTS 2
#define REPORTS 4
#define MASKED 8  // the seat's grammar mask holds for its next token

struct Seat {
  u64 stream;    // the hashed seed
  double top_p;  // 1: off
  float temperature, min_p;
  int top_k;  // the largest int: off
  int num_logprobs;
  int needs, adjust_below;
  float repetition, presence, frequency;
  int num_biases, num_suppressed, suppress_below;
  float typical_p;  // 1: off
  int unused;
};

struct Result {
  int token, ok;
  float logprob;
  int unused;
  int top_ids[MAX_TOP];
  float top_logprobs[MAX_TOP];
};

__device__ __forceinline__ bool finite(float v) { return fabsf(v) <= 3.402823466e38f; }
__device__ __forceinline__ float clamp_logit(float v) { return fminf(fmaxf(v, -3.402823466e38f), 3.402823466e38f); }
__device__ __forceinline__ bool penalised(const Seat& s) { return s.repetition != 1 || s.presence != 0 || s.frequency != 0; }
__device__ __forceinline__ int active_needs(const Seat& s, int position) {
  return position >= s.adjust_below ? s.needs & ~ADJUSTS : s.needs;
}

// A logit on the scale of the draw, 0 for the best, and its weight, a multiple of 2^-44.
__device__ __forceinline__ float scaled(float v, float best, float temperature) {
  return __fdiv_rn(__fadd_rn(v, -best), temperature);
}
__device__ __forceinline__ u64 weight(float v, float best, float temperature) {
  return (u64)(expf(scaled(v, best, temperature)) * ONE);
}

// Penalties, then bias, then suppression, then the grammar's mask, for rows that need any; on a copy, since
// log-probabilities are of the model's own logits.
// Grid: (samples). Shared memory: none. logits, adjusted: float [samples][vocab]. counts: int [seats][vocab],
// how often an id was output, the highest bit set where the prompt holds it. adjust_ids, adjust_values:
// [seats][capacity], biases first, then suppressed ids; no id is biased twice. masks: u32 [seats][vocab / 32 rounded
// up], bit set: allowed; null where no grammar is in use.
extern "C" __global__ void __launch_bounds__(1024) adjust(float* adjusted, const float* logits, const void* seats, const int* counts, const int* adjust_ids, const float* adjust_values, const u32* masks, const int* positions, const int* sample_rows, const int* sample_seats, int vocab_size, int capacity) {
  const int row = blockIdx.x, seat = sample_seats[row], position = positions[sample_rows[row]] + 1;
  const Seat& s = ((const Seat*)seats)[seat];
  const int needs = active_needs(s, position);
  if (!(needs & (ADJUSTS | MASKED))) return;
  const float* from = logits + (size_t)row * vocab_size;
  float* to = adjusted + (size_t)row * vocab_size;
  const bool penalties = needs & ADJUSTS && penalised(s);
  for (bool suppresses = position < s.suppress_below;; suppresses = false) {
    for (int i = threadIdx.x; i < vocab_size; i += THREADS) {
      float v = from[i];
      if (penalties && finite(v)) {
        const int cell = counts[(size_t)seat * vocab_size + i];
        if (cell) {
          const float count = (float)(cell & 0x7FFFFFFF);
          v = v > 0 ? __fdiv_rn(v, s.repetition) : __fmul_rn(v, s.repetition);
          v = __fadd_rn(v, -__fadd_rn(count > 0 ? s.presence : 0.0f, __fmul_rn(s.frequency, count)));
          v = clamp_logit(v);
        }
      }
      to[i] = v;
    }
    __syncthreads();
    if (needs & ADJUSTS) {
      const size_t first = (size_t)seat * capacity;
      for (int i = threadIdx.x; i < s.num_biases; i += THREADS) {
        float& v = to[adjust_ids[first + i]];
        if (finite(v)) v = clamp_logit(__fadd_rn(v, adjust_values[first + i]));
      }
      __syncthreads();
      if (suppresses)
        for (int i = threadIdx.x; i < s.num_suppressed; i += THREADS) to[adjust_ids[first + s.num_biases + i]] = MINUS_INFINITY;
    }
    if (!(needs & MASKED)) return;
    __syncthreads();
    const u32* mask = masks + (size_t)seat * ((vocab_size + 31) / 32);
    bool any = false;
    for (int i = threadIdx.x; i < vocab_size; i += THREADS) {
      if (!(mask[i >> 5] >> (i & 31) & 1)) to[i] = MINUS_INFINITY;
      any |= to[i] != MINUS_INFINITY;
    }
    // Where the mask leaves suppressed ids only, suppression gives way.
    if (__syncthreads_or(any) || !suppresses) return;
  }
}

// After `adjust`: leaves of the rows that want it only what workers/sampling/typical.py leaves. The limit of the
// distance is found by halving, for the bits of distances are ordered as they are.
// Grid: (samples). Shared memory: static, 264 bytes. Arguments as `adjust` has them.
extern "C" __global__ void __launch_bounds__(1024) typical(float* adjusted, const void* seats, const int* positions, const int* sample_rows, const int* sample_seats, int vocab_size) {
  __shared__ u64 cells[33];
  const int row = blockIdx.x, position = positions[sample_rows[row]] + 1;
  const Seat& s = ((const Seat*)seats)[sample_seats[row]];
  const int needs = active_needs(s, position);
  if (!(needs & ADJUSTS) || !(needs & DRAWS) || s.typical_p >= 1) return;
  float* x = adjusted + (size_t)row * vocab_size;
  const float temperature = s.temperature;
  float best = MINUS_INFINITY;
  bool broken = false;
  for (int i = threadIdx.x; i < vocab_size; i += THREADS) {
    broken |= x[i] != x[i];
    best = fmaxf(best, x[i]);
  }
  best = block_max(best, (float*)cells);
  if (__syncthreads_or(broken) || !finite(best)) return;
  u64 mass = 0;
  double moment = 0;
  for (int i = threadIdx.x; i < vocab_size; i += THREADS) {
    const u64 own = weight(x[i], best, temperature);
    mass += own;
    if (own) moment += (double)own * (double)scaled(x[i], best, temperature);
  }
  mass = block_sum(mass, cells);
  moment = block_sum(moment, (double*)cells);
  const float mean = (float)(moment / (double)mass);
  const auto distance = [=](float v) { return __float_as_uint(fabsf(__fadd_rn(scaled(v, best, temperature), -mean))); };
  u64 target = (u64)ceil((double)s.typical_p * (double)mass);
  target = target < 1 ? 1 : target > mass ? mass : target;
  u32 low = 0, high = 0x7F800000u;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    u64 sum = 0;
    for (int i = threadIdx.x; i < vocab_size; i += THREADS)
      if (distance(x[i]) <= middle) sum += weight(x[i], best, temperature);
    if (block_sum(sum, cells) >= target) high = middle;
    else low = middle + 1;
  }
  for (int i = threadIdx.x; i < vocab_size; i += THREADS)
    if (!weight(x[i], best, temperature) || distance(x[i]) > low) x[i] = MINUS_INFINITY;
}

// ---- the order of candidates ------------------------------------------------------------------------------
// Ascending keys are descending values, then ascending ids; -0 counts as 0.
__device__ __forceinline__ u64 key_of(float v, int id) {
  const u32 bits = __float_as_uint(v + 0.0f);
  return (u64)(bits >> 31 ? bits : bits ^ 0x7FFFFFFFu) << 32 | (u32)id;
}
__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}
// workers/sampling/uniform.py, bit for bit
__device__ __forceinline__ double uniform(u64 stream, int position) {
  return (double)(mix(stream + (u64)(position + 1) * 0x9E3779B97F4A7C15ull) >> 11) * 1.1102230246251565e-16;
}

struct Scratch {
  u64 sums[BINS];
  u32 counts[BINS];
  u64 cells[33];
  u64 warp_sums[THREADS / 32];
  u64 before;
  u32 digit, count;
};

__device__ __forceinline__ u64 block_min(u64 v, Scratch& s) { return ~block_max(~v, s.cells); }

// Ascending bins of descending values: what `find` looks at first.
struct Line {
  float best, bins_a_unit;
};
__device__ __forceinline__ int bin_of(const Line& line, float v) {
  return (int)fminf(__fmul_rn(__fadd_rn(line.best, -v), line.bins_a_unit), (float)(BINS - 1));
}

// The smallest key whose running sum of `measure(value)` over candidates with keys up to `cutoff` reaches
// `target` >= 1, and what the sum is there. The whole sum must reach it. Called by all threads alike.
template <class Measure>
__device__ __forceinline__ u64 find(const float* x, int vocab_size, const Line& line, u64 cutoff, u64 target,
                                    u64& reached, Scratch& s, Measure measure) {
  constexpr int PER_THREAD = BINS / THREADS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 prefix = 0, mask = 0, before = 0;
  int first_bin = -1;
#pragma unroll 1
  for (int level = -1; level < LEVELS; ++level) {
    // The line, then 11, 11 and 10 bits of the value, then twice 10 of the id.
    const int bits = level < 2 ? 11 : 10, shift = level < 2 ? 53 - 11 * level : level == 2 ? 32 : level == 3 ? 10 : 0;
    for (int b = threadIdx.x; b < BINS; b += THREADS) s.sums[b] = s.counts[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab_size; i += THREADS) {
      const u64 key = key_of(x[i], i);
      if (key > cutoff || (key & mask) != prefix) continue;
      const int on_line = bin_of(line, x[i]);
      if (level >= 0 && on_line != first_bin) continue;
      const u64 amount = measure(x[i]);
      if (!amount) continue;
      const u32 bin = level < 0 ? (u32)on_line : (u32)(key >> shift) & ((1u << bits) - 1);
      atomicAdd(&s.sums[bin], amount);
      if (level >= 0) atomicAdd(&s.counts[bin], 1u);
    }
    __syncthreads();
    u64 own = 0;
#pragma unroll
    for (int b = 0; b < PER_THREAD; ++b) own += s.sums[threadIdx.x * PER_THREAD + b];
    u64 through = own;  // the sum up to and with this thread's bins
#pragma unroll
    for (int by = 1; by < 32; by <<= 1) {
      const u64 other = __shfl_up_sync(ALL_LANES, through, by);
      if (lane >= by) through += other;
    }
    if (lane == 31) s.warp_sums[warp] = through;
    __syncthreads();
    for (int w = 0; w < warp; ++w) through += s.warp_sums[w];
    through += before;
    if (through >= target && through - own < target) {  // true for one thread
      u64 sum = through - own;
      int b = threadIdx.x * PER_THREAD;
      while (sum + s.sums[b] < target) sum += s.sums[b++];
      s.digit = b;
      s.before = sum;
      s.count = s.counts[b];
    }
    __syncthreads();
    if (level < 0) {
      first_bin = (int)s.digit;
    } else {
      prefix |= (u64)s.digit << shift;
      mask |= (u64)((1u << bits) - 1) << shift;
    }
    before = s.before;
    const bool alone = s.count == 1;
    __syncthreads();
    if (alone) break;
  }
  u64 found = ~0ull;
  for (int i = threadIdx.x; i < vocab_size; i += THREADS) {
    const u64 key = key_of(x[i], i);
    if (key <= cutoff && (key & mask) == prefix && bin_of(line, x[i]) == first_bin && measure(x[i])) found = key;
  }
  found = block_min(found, s);
  reached = before + measure(x[(u32)found]);
  return found;
}

// The best candidate's key, and whether its logit is a number that can be drawn: no NaN in the row, no infinity.
// `least` is the lowest finite logit.
__device__ __forceinline__ u64 best_of(const float* x, int vocab_size, Scratch& s, bool& ok, float& least) {
  u64 best = ~0ull;
  bool broken = false;
  least = 3.402823466e38f;
  for (int i = threadIdx.x; i < vocab_size; i += THREADS) {
    const float v = x[i];
    broken |= v != v;
    if (finite(v)) least = fminf(least, v);
    const u64 key = key_of(v, i);
    if (v == v && key < best) best = key;
  }
  best = block_min(best, s);
  least = -block_max(-least, (float*)s.cells);
  const bool any_broken = __syncthreads_or(broken);
  ok = !any_broken && best != ~0ull && finite(x[(u32)best]);
  return best == ~0ull ? 0 : best;
}

// Grid: (samples). Shared memory: static, 25 KiB. Arguments as `adjust` has them; results: Result [samples];
// last_tokens: int [seats]. A row whose seat needs nothing is the arg-max of its logits, lowest id first.
// Assumes: vocab_size <= 2^18 (sums then fit), each seat at most once. Rows of `adjusted` hold what `adjust` made.
extern "C" __global__ void __launch_bounds__(1024, 1) sample(void* results, int* last_tokens, int* counts, const float* logits, const float* adjusted, const void* seats, const int* positions, const int* sample_rows, const int* sample_seats, int vocab_size) {
  __shared__ Scratch scratch;
  const int row = blockIdx.x, seat = sample_seats[row], position = positions[sample_rows[row]] + 1;
  const Seat& s = ((const Seat*)seats)[seat];
  const float* raw = logits + (size_t)row * vocab_size;
  bool ok;
  float least;
  const u64 raw_best = best_of(raw, vocab_size, scratch, ok, least);
  const int needs = ok ? active_needs(s, position) : 0;
  const float* x = raw;
  u64 chosen = raw_best;
  if (needs & (ADJUSTS | MASKED)) {
    x = adjusted + (size_t)row * vocab_size;
    chosen = best_of(x, vocab_size, scratch, ok, least);
  }
  if (needs & DRAWS && ok) {
    const float best = x[(u32)chosen], temperature = s.temperature, min_p = s.min_p;
    const auto mass = [best, temperature, min_p](float v) {
      const float w = expf(__fdiv_rn(__fadd_rn(v, -best), temperature));
      return w >= min_p ? (u64)(w * ONE) : 0;
    };
    const float range = __fadd_rn(best, -least);
    const Line line = {best, range > 0 && finite(range) ? (BINS - 1) / range : 0.0f};
    u64 cutoff = ~0ull, reached;
    if (s.top_k < vocab_size)
      cutoff = find(x, vocab_size, line, cutoff, (u64)s.top_k, reached, scratch, [](float) { return (u64)1; });
    u64 left = 0;
    for (int i = threadIdx.x; i < vocab_size; i += THREADS)
      if (key_of(x[i], i) <= cutoff) left += mass(x[i]);
    left = block_sum(left, scratch.cells);
    if (s.top_p < 1.0) {
      const double wanted = ceil(s.top_p * (double)left);
      const u64 target = wanted < 1.0 ? 1 : (u64)wanted;
      cutoff = find(x, vocab_size, line, cutoff, target < left ? target : left, left, scratch, mass);
    }
    const u64 target = (u64)(uniform(s.stream, position) * (double)left) + 1;
    chosen = find(x, vocab_size, line, cutoff, target < left ? target : left, reached, scratch, mass);
  }
  const int token = (int)(u32)chosen;
  Result& result = ((Result*)results)[row];
  if (threadIdx.x == 0) {
    result.token = token;
    result.ok = ok;
    last_tokens[seat] = token;
    if (needs & ADJUSTS && penalised(s)) counts[(size_t)seat * vocab_size + token] += 1;
  }
  if (!(needs & REPORTS && ok)) return;
  const float raw_logit = raw[(u32)raw_best];
  u64 total = 0;
  for (int i = threadIdx.x; i < vocab_size; i += THREADS) total += weight(raw[i], raw_logit, 1.0f);
  total = block_sum(total, scratch.cells);
  const double normaliser = (double)raw_logit + log((double)total / (double)ONE);
  if (threadIdx.x == 0) result.logprob = (float)((double)raw[token] - normaliser);
  u64 last = raw_best;
  for (int k = 0; k < MAX_TOP; ++k) {
    const bool asked = k < s.num_logprobs && k < vocab_size;
    if (asked && k > 0) {  // the next best after the last
      u64 next = ~0ull;
      for (int i = threadIdx.x; i < vocab_size; i += THREADS) {
        const u64 key = key_of(raw[i], i);
        if (key > last && key < next) next = key;
      }
      last = block_min(next, scratch);
    }
    if (threadIdx.x != 0) continue;
    const float v = asked && last != ~0ull ? raw[(u32)last] : MINUS_INFINITY;
    result.top_ids[k] = finite(v) ? (int)(u32)last : 0;
    result.top_logprobs[k] = finite(v) ? (float)((double)v - normaliser) : MINUS_INFINITY;
  }
}
