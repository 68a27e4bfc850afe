// One quantised weight format, chosen by FORMAT (a GGML type), as the kernels see it.
//
// Owns: how a packed matrix lies in device memory; `workers/quant/repack.py` writes it and must agree.
// Runs in: every kernel that reads quantised weights. Source: the values are those of ggml's block
// formats (ggml-common.h, as the gguf package decodes them); the order is this project's.
//
// A matrix [outputs, inputs] is cut into tiles of 16 outputs and units of 64 inputs (both padded with
// zeros). A unit is what one warp takes at a time: lane 4g + t holds, of outputs g and g + 8, the inputs
// that it needs as operand A of a matrix instruction: of each 32 inputs 4t..4t+3 and 16+4t..16+4t+3.
// The planes follow one another, each [tiles][units]:
//
//     values  [lane] 8 or 16 bytes (Q8_0: [2 blocks][lane] 16); IQ2_XXS: [16 outputs][8] codes of 16 bits
//     high    [lane] 4 or 8 bytes, the values' upper bits where they have more than 4 (or 2)
//     scales  [8 g][2 outputs g, g + 8][...]
//     super   [tiles][units / 4][8 g][2] one or two float16 for 256 inputs
//
// A weight is  scale * (q - OFFSET) + min  with a scale and a min for each output and 32 or (HALVES) 16 inputs,
// both of them stored as a float16, or as a float16 of 256 inputs times a small integer.
#pragma once
#include "matmul.cuh"

#define GGML_F32 0
#define GGML_F16 1
#define GGML_Q4_0 2
#define GGML_Q4_1 3
#define GGML_Q5_0 6
#define GGML_Q5_1 7
#define GGML_Q8_0 8
#define GGML_Q2_K 10
#define GGML_Q3_K 11
#define GGML_Q4_K 12
#define GGML_Q5_K 13
#define GGML_Q6_K 14
#define GGML_IQ2_XXS 16
#define GGML_IQ4_NL 20
#define GGML_IQ4_XS 23
#define GGML_BF16 30
#define GGML_MXFP4 39

#define TILE_OUTPUTS 16

// ---- what the format is made of -------------------------------------------------------------------------
constexpr bool one_of(int a, int b = -1, int c = -1, int d = -1) {
  return FORMAT == a || FORMAT == b || FORMAT == c || FORMAT == d;
}
constexpr bool TABLE = one_of(GGML_IQ4_NL, GGML_IQ4_XS, GGML_MXFP4);  // nibbles name entries of a table
constexpr bool CODEBOOK = one_of(GGML_IQ2_XXS);
constexpr bool BYTES = one_of(GGML_Q8_0);
constexpr bool FIVE_BITS = one_of(GGML_Q5_0, GGML_Q5_1, GGML_Q5_K);
constexpr bool NIBBLES = TABLE || FIVE_BITS || one_of(GGML_Q4_0, GGML_Q4_1, GGML_Q4_K) || one_of(GGML_Q6_K);
constexpr bool PAIRS = one_of(GGML_Q2_K, GGML_Q3_K);  // two bits a value
constexpr bool HALVES = one_of(GGML_Q2_K, GGML_Q3_K, GGML_Q6_K);
constexpr bool HAS_MIN = one_of(GGML_Q4_1, GGML_Q5_1) || one_of(GGML_Q2_K, GGML_Q4_K, GGML_Q5_K);
constexpr bool SUPER_BLOCKS = HALVES || CODEBOOK || one_of(GGML_Q4_K, GGML_Q5_K, GGML_IQ4_XS);
constexpr int OFFSET = one_of(GGML_Q4_0) ? 8 : one_of(GGML_Q5_0) ? 16 : one_of(GGML_Q6_K) ? 32 : one_of(GGML_Q3_K) ? 4 : 0;

constexpr int VALUE_BYTES = BYTES ? 1024 : PAIRS || CODEBOOK ? 256 : 512;  // of a unit, as are the next three
constexpr int HIGH_BYTES = one_of(GGML_Q6_K) ? 256 : FIVE_BITS || one_of(GGML_Q3_K) ? 128 : 0;
// Of one g: two outputs with their two blocks.
constexpr int SCALE_BYTES_OF_G = one_of(GGML_Q4_1, GGML_Q5_1) ? 16 : one_of(GGML_IQ4_XS, GGML_IQ2_XXS, GGML_MXFP4) ? 4 : 8;
constexpr int SUPER_BYTES_OF_G = !SUPER_BLOCKS ? 0 : HAS_MIN ? 8 : 4;

struct Matrix {
  const u8 *values, *high, *scales, *super;
  const u32* codebook;  // IQ2_XXS: 256 entries of 8 bytes
  int num_tiles, num_units;
};

__device__ __forceinline__ Matrix open_matrix(const void* weight, const void* codebook, int num_tiles, int num_units) {
  const size_t cells = (size_t)num_tiles * num_units;
  Matrix m;
  m.values = (const u8*)weight;
  m.high = m.values + cells * VALUE_BYTES;
  m.scales = m.high + cells * HIGH_BYTES;
  m.super = m.scales + cells * (8 * SCALE_BYTES_OF_G);
  m.codebook = (const u32*)codebook;
  m.num_tiles = num_tiles;
  m.num_units = num_units;
  return m;
}

// ---- one lane's part of a unit, as loaded --------------------------------------------------------------
struct Unit {
  uint4 values, more_values;  // the second only of Q8_0 (block 1) and IQ2_XXS (output g + 8)
  u32 high[2];
  u32 scales[4];
  u32 super[2];
};

// Where a unit's planes lie: in the matrix, or where they were copied to in shared memory.
struct Planes {
  const u8 *values, *high, *scales, *super;
};

__device__ __forceinline__ Planes planes_of(const Matrix& m, int tile, int unit) {
  const size_t cell = (size_t)tile * m.num_units + unit;
  Planes p;
  p.values = m.values + cell * VALUE_BYTES;
  p.high = m.high + cell * HIGH_BYTES;
  p.scales = m.scales + cell * (8 * SCALE_BYTES_OF_G);
  p.super = m.super + ((size_t)tile * (m.num_units >> 2) + (unit >> 2)) * (8 * SUPER_BYTES_OF_G);
  return p;
}

template <bool STREAMING> __device__ __forceinline__ uint4 load_values(const u8* p) {
  if constexpr (STREAMING) return load_streaming(p);
  else return *(const uint4*)p;
}

// STREAMING: from the matrix in global memory, of which values are read once.
template <bool STREAMING> __device__ __forceinline__ void read_unit(Unit& u, const Planes& p) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  if constexpr (CODEBOOK) {
    u.values = *(const uint4*)(p.values + 16 * g);
    u.more_values = *(const uint4*)(p.values + 16 * (g + 8));
  } else if constexpr (PAIRS) {
    const uint2 v = *(const uint2*)(p.values + 8 * lane);
    u.values.x = v.x;
    u.values.y = v.y;
  } else {
    u.values = load_values<STREAMING>(p.values + 16 * lane);
    if constexpr (BYTES) u.more_values = load_values<STREAMING>(p.values + 512 + 16 * lane);
  }
  if constexpr (HIGH_BYTES == 128) u.high[0] = *(const u32*)(p.high + 4 * lane);
  if constexpr (HIGH_BYTES == 256) {
    const uint2 v = *(const uint2*)(p.high + 8 * lane);
    u.high[0] = v.x;
    u.high[1] = v.y;
  }
  const u8* scales = p.scales + g * SCALE_BYTES_OF_G;
  if constexpr (SCALE_BYTES_OF_G == 16) {
    const uint4 v = *(const uint4*)scales;
    u.scales[0] = v.x, u.scales[1] = v.y, u.scales[2] = v.z, u.scales[3] = v.w;
  } else if constexpr (SCALE_BYTES_OF_G == 8) {
    const uint2 v = *(const uint2*)scales;
    u.scales[0] = v.x, u.scales[1] = v.y;
  } else {
    u.scales[0] = *(const u32*)scales;
  }
  if constexpr (SUPER_BLOCKS) {
    const u8* super = p.super + g * SUPER_BYTES_OF_G;
    if constexpr (HAS_MIN) {
      const uint2 v = *(const uint2*)super;
      u.super[0] = v.x, u.super[1] = v.y;
    } else {
      u.super[0] = *(const u32*)super;
    }
  }
}

__device__ __forceinline__ void load_unit(Unit& u, const Matrix& m, int tile, int unit) {
  read_unit<true>(u, planes_of(m, tile, unit));
}

// ---- values --------------------------------------------------------------------------------------------
#if FORMAT == GGML_MXFP4
#define TABLE_0 0x03020100u
#define TABLE_1 0x0C080604u
#define TABLE_2 0xFDFEFF00u
#define TABLE_3 0xF4F8FAFCu
#else
#define TABLE_0 0xBFAD9881u
#define TABLE_1 0xF6EADDCFu
#define TABLE_2 0x26190D01u
#define TABLE_3 0x71594535u
#endif
// Bytes that the four nibbles of `q`'s low half name in the table.
__device__ __forceinline__ u32 look_up(u32 q) {
  const u32 index = q & 0x7777u;
  const u32 low = __byte_perm(TABLE_0, TABLE_1, index), high = __byte_perm(TABLE_2, TABLE_3, index);
  return __byte_perm(low, high, 0x3210u | (q & 0x8888u) >> 1);
}
__device__ __forceinline__ u32 code_of(const Matrix& m, u32 entry) {
  const int odd = threadIdx.x & 1;
  const u32 magnitudes = m.codebook[2 * (entry & 255) + odd];
  const u32 signs = entry >> (8 + 4 * odd) & 15;
  const u32 ones = signs * 0x00204081u & 0x01010101u;  // bit i to byte i
  return (magnitudes ^ ones * 255) + ones;
}
// Operand A for block 0 or 1 of the unit: words (g, first half), (g + 8, first), (g, second), (g + 8, second).
__device__ __forceinline__ void operand(u32 (&a)[4], const Unit& u, const Matrix& m, int block) {
  if constexpr (BYTES) {
    const uint4 v = block ? u.more_values : u.values;
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  } else if constexpr (CODEBOOK) {
    // Two outputs, each with four codes of 8 inputs in the block; a lane needs halves of two of them.
    const int shift = (threadIdx.x & 2) * 8;
    const u32 first[4] = {block ? u.values.z : u.values.x, block ? u.more_values.z : u.more_values.x,
                          block ? u.values.w : u.values.y, block ? u.more_values.w : u.more_values.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = code_of(m, first[i] >> shift & 0xFFFF);
  } else if constexpr (PAIRS) {
    const u32 v = block ? u.values.y : u.values.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Word i of the operand is output i & 1, half i >> 1; fields are in the order output, half.
      const int field = 2 * (i & 1) + (i >> 1);
      a[i] = v >> 2 * field & 0x03030303u;
      if constexpr (HIGH_BYTES == 128) a[i] |= (u.high[0] >> (4 * block + field) & 0x01010101u) << 2;
    }
  } else {
    const u32 v[2] = {block ? u.values.z : u.values.x, block ? u.values.w : u.values.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = v[i & 1];
      if constexpr (TABLE) {
        a[i] = look_up(i >> 1 ? word >> 16 : word);
      } else {
        a[i] = word >> 4 * (i >> 1) & 0x0F0F0F0Fu;
        const int field = 2 * (i & 1) + (i >> 1);
        if constexpr (HIGH_BYTES == 128) a[i] |= (u.high[0] >> (4 * block + field) & 0x01010101u) << 4;
        if constexpr (HIGH_BYTES == 256) a[i] |= ((block ? u.high[1] : u.high[0]) >> 2 * field & 0x03030303u) << 4;
      }
    }
  }
}

// ---- scales --------------------------------------------------------------------------------------------
// Of one output and 16 inputs each; both halves are equal unless HALVES. Products of a float16 and an integer of at
// most 8 bits, so exact.
struct Scale {
  float scale[2], min[2];
};
__device__ __forceinline__ float low_half(u32 bits) {
  const u16 h = (u16)bits;
  return __half2float(*(const __half*)&h);
}
__device__ __forceinline__ float high_half(u32 bits) { return low_half(bits >> 16); }
__device__ __forceinline__ int signed_byte(u32 bits, int index) { return (i8)(bits >> 8 * index); }
__device__ __forceinline__ int unsigned_byte(u32 bits, int index) { return (u8)(bits >> 8 * index); }

// Of output g (0) or g + 8 (1), block 0 or 1.
__device__ __forceinline__ Scale scale_of(const Unit& u, int output, int block) {
  Scale s;
  s.min[0] = s.min[1] = 0;
  if constexpr (one_of(GGML_Q4_1, GGML_Q5_1)) {
    const u32 pair = block ? u.scales[2 * output + 1] : u.scales[2 * output];  // no index at run time: registers have none
    s.scale[0] = low_half(pair);
    s.min[0] = high_half(pair);
  } else if constexpr (one_of(GGML_Q4_K, GGML_Q5_K)) {
    s.scale[0] = low_half(u.super[output]) * unsigned_byte(u.scales[output], 2 * block);
    s.min[0] = -high_half(u.super[output]) * unsigned_byte(u.scales[output], 2 * block + 1);
  } else if constexpr (one_of(GGML_Q2_K)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int both = unsigned_byte(u.scales[output], 2 * block + i);
      s.scale[i] = low_half(u.super[output]) * (both & 15);
      s.min[i] = -high_half(u.super[output]) * (both >> 4);
    }
  } else if constexpr (one_of(GGML_Q3_K, GGML_Q6_K)) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      s.scale[i] = low_half(u.super[0] >> 16 * output) * signed_byte(u.scales[output], 2 * block + i);
  } else if constexpr (one_of(GGML_IQ4_XS, GGML_IQ2_XXS)) {
    const float eighth = CODEBOOK ? 0.125f : 1.0f;
    s.scale[0] = low_half(u.super[0] >> 16 * output) * eighth * signed_byte(u.scales[0], 2 * output + block);
  } else if constexpr (one_of(GGML_MXFP4)) {
    // 2^(e - 128), for the table holds twice the values; zero below 2^-126, where a GPU's float32 ends.
    const u32 e = unsigned_byte(u.scales[0], 2 * output + block);
    s.scale[0] = __uint_as_float(e ? (e - 1) << 23 : 0);
  } else {
    s.scale[0] = low_half(u.scales[output] >> 16 * block);
  }
  if constexpr (!HALVES) {
    s.scale[1] = s.scale[0];
    s.min[1] = s.min[0];
  }
  return s;
}

// ---- integer sums as floats ------------------------------------------------------------------------------
// An integer n with |n| < 2^22 that was added to MAGIC_BITS is, read as a float, MAGIC + n exactly: sums that start
// there need no conversion, which takes several times as long as an addition.
#define MAGIC_BITS 0x4B400000
#define MAGIC 12582912.0f
__device__ __forceinline__ float from_magic(int bits) { return __fadd_rn(__int_as_float(bits), -MAGIC); }
