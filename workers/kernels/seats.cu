// What a sequence brings along when it sits down: how often its tokens occurred.
//
// Owns: nothing; `counts` [seats][vocab_size] are those of sampling.cu: how often an id was output, the highest bit
// set where the prompt holds it. Runs in: between steps. Source: this project.
// Shared memory: none. Precision: integers. Reference: workers/sampling/penalties.py, `Penalties`.
#include "prelude.cuh"

#define IN_PROMPT 0x80000000u

// Any grid of blocks of 256.
extern "C" __global__ void __launch_bounds__(256) reset_counts(u32* counts, int seat, int vocab_size) {
  u32* row = counts + (size_t)seat * vocab_size;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab_size; i += gridDim.x * blockDim.x) row[i] = 0;
}

// Any grid of blocks of 256, after `reset_counts`. ids: the sequence so far, of which the first num_prompt are prompt.
extern "C" __global__ void __launch_bounds__(256) count_history(u32* counts, int seat, int vocab_size, const int* ids, int num_ids, int num_prompt) {
  u32* row = counts + (size_t)seat * vocab_size;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_ids; i += gridDim.x * blockDim.x) {
    if (i < num_prompt) atomicOr((int*)&row[ids[i]], (int)IN_PROMPT);
    else atomicAdd(&row[ids[i]], 1u);
  }
}
