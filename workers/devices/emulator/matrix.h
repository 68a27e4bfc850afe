// The matrix instructions of a warp, with the fragment layouts of the PTX manual.
//
// Owns: nothing beyond the warp's operand store. Runs in: as `fibers.h`. Source: PTX ISA, sections on
// mma.m16n8k8, .m16n8k16 and ldmatrix. Sums run along k in ascending order from the accumulator;
// a GPU may round differently within one instruction, so results agree to tolerances, not to bits.
#pragma once
#include "fibers.h"

namespace emulator {

template <class To, class From> static inline To same_bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &v, sizeof to);
  return to;
}

struct Half {  // two in a register
  static constexpr int PER_WORD = 2;
  static float get(uint32_t word, int i) { return (float)same_bits<_Float16>((uint16_t)(word >> 16 * i)); }
};
struct Tensor32 {  // the instruction ignores the low 13 bits
  static constexpr int PER_WORD = 1;
  static float get(uint32_t word, int) { return same_bits<float>(word & 0xFFFFE000u); }
};

// d[16][8] += a[16][K] * b[K][8]. Lane 4g+t holds: of a, word r: row g + 8 (r & 1), inputs
// (K/2 or 0)(r >> 1) + PER_WORD t ...; of b, word r: column g, the same inputs; of d, word r: row
// g + 8 (r >> 1), column 2t + (r & 1). With two words of a (K of a single half) r >> 1 is 0.
template <class T, int K, int A, int B, class D>
static inline void multiply(D (&d)[4], const uint32_t (&a)[A], const uint32_t (&b)[B], const char* what) {
  static_assert(A == 2 * B && K == 4 * T::PER_WORD * B, "");
  Warp& w = *running->warp;
  const unsigned lane = running->lane;
  memcpy(w.operands[lane], a, 4 * A);
  memcpy(w.operands[lane] + 4, b, 4 * B);
  memcpy(w.sums[lane], d, 16);
  meet_warp(~0u, 100 + K + T::PER_WORD, what, 0, [&w](uint64_t*) {
    float left[16][K], right[8][K], sums[16][8];
    constexpr int P = T::PER_WORD;
    for (int l = 0; l < 32; ++l) {
      const int g = l >> 2, t = l & 3;
      for (int i = 0; i < P; ++i) {
        for (int r = 0; r < A; ++r) left[g + 8 * (r & 1)][(r >> 1) * 4 * P + P * t + i] = T::get(w.operands[l][r], i);
        for (int r = 0; r < B; ++r) right[g][r * 4 * P + P * t + i] = T::get(w.operands[l][4 + r], i);
      }
      for (int r = 0; r < 4; ++r) memcpy(&sums[g + 8 * (r >> 1)][2 * t + (r & 1)], &w.sums[l][r], 4);
    }
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) {
        float s = sums[i][j];
        for (int k = 0; k < K; ++k) s += left[i][k] * right[j][k];
        sums[i][j] = s;
      }
    for (int l = 0; l < 32; ++l)
      for (int r = 0; r < 4; ++r) memcpy(&w.sums[l][r], &sums[(l >> 2) + 8 * (r >> 1)][2 * (l & 3) + (r & 1)], 4);
  });
  memcpy(d, w.sums[lane], 16);
}

// N matrices of 8 x 8 16-bit values; lane 8m + i gives the address of row i of matrix m. Lane 4g+t
// receives of each matrix row g, columns 2t and 2t+1 (transposed: column g, rows 2t and 2t+1).
template <int N> static inline void load_matrices(uint32_t (&to)[N], const void* row, bool transposed) {
  Warp& w = *running->warp;
  const unsigned lane = running->lane;
  if (lane < 8 * N && ((uintptr_t)row & 15)) fail("ldmatrix: the row address %p is not 16-byte aligned", row);
  meet_warp(~0u, 200 + N + 8 * transposed, "ldmatrix", (uint64_t)(uintptr_t)row, [&w, transposed](uint64_t* rows) {
    for (int l = 0; l < 32; ++l)
      for (int m = 0; m < N; ++m)
        for (int e = 0; e < 2; ++e) {
          const int i = transposed ? 2 * (l & 3) + e : l >> 2, j = transposed ? l >> 2 : 2 * (l & 3) + e;
          memcpy((char*)&w.operands[l][m] + 2 * e, (const char*)(uintptr_t)rows[8 * m + i] + 2 * j, 2);
        }
  });
  memcpy(to, w.operands[lane], 4 * N);
}

}  // namespace emulator
