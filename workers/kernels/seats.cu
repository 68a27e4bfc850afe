// What a sequence brings along when it sits down: its token history and its logit biases.
//
// Owns: nothing; the words of `history` are those of sampling.cu. Runs in: between steps. Source: this project.
#include "prelude.cuh"

#define IN_PROMPT 0x80000000u
#define SUPPRESSED 0x40000000u

// One seat's history and bias, both zero before. Any grid. `ids`: the sequence so far (num_ids, of which the
// first num_prompt are prompt), then num_bias biased ids, whose `values` are added, then num_suppressed ids.
extern "C" __global__ void __launch_bounds__(256) set_adjustments(u32* history, float* bias, const int* ids, const float* values, int num_ids, int num_prompt, int num_bias, int num_suppressed) {
  const int count = num_ids + num_bias + num_suppressed;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const int id = ids[i];
    if (i < num_prompt)
      atomicOr((int*)&history[id], (int)IN_PROMPT);
    else if (i < num_ids)
      atomicAdd(&history[id], 1u);
    else if (i < num_ids + num_bias)
      bias[id] = values[i - num_ids];
    else
      atomicOr((int*)&history[id], (int)SUPPRESSED);
  }
}
