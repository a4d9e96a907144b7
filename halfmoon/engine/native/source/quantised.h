/* Products over weights that stay in GGUF's blocks, with rows of x in eight bits.
 *
 * A weight is so much a block: scale * (code - zero) + low. Blocks are of 32 inputs; those of _K and _XS have
 * whole-numbered scales for 32 of them (Q3_K and Q6_K for 16), multiplied by those of 256. A strip holds LANES
 * columns, block after block:
 *   for each 32 or 256 inputs: scales, lows (both float16 [LANES])
 *   for each 32 inputs: their own scales, lows (int8 [LANES]), codes: four bytes of four inputs for each column in turn
 * Two codes of four bits share a byte, the second 16 inputs behind the first. Six bits are four and two, five four and
 * one, three two and one; one bit of each of eight words of codes is in a word. IQ4's four bits are places in a table.
 *
 * Sums of products are whole numbers within a block, and blocks are added in order: a row's result depends on neither
 * the other rows nor the processor, if that multiplies and adds in one rounding.
 */
#pragma once

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

/* block_kernels.py has the same order. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, NUM_FORMATS };

#define BLOCK 32
#define IS_NESTED(format) ((format) >= Q3_K)
#define HAS_TABLE(format) ((format) == IQ4_NL || (format) == IQ4_XS)
#define IS_FIVE(format) ((format) == Q5_0 || (format) == Q5_1 || (format) == Q5_K)
#define HAS_LOW(format) ((format) == Q4_1 || (format) == Q5_1 || (format) == Q4_K || (format) == Q5_K)
#define PARTS(format) ((format) == Q3_K || (format) == Q6_K ? 2 : 1) /* of a block, with a scale each */
#define LOW_BITS(format) ((format) == Q8_0 ? 8 : (format) == Q3_K ? 2 : 4)
#define HIGH_BITS(format) ((format) == Q6_K ? 2 : (format) == Q3_K || IS_FIVE(format))
#define CODE_BITS(format) (LOW_BITS(format) + HIGH_BITS(format))
#define IS_CENTRED(format) ((format) == Q8_0 || HAS_TABLE(format)) /* signed bytes + 128 */
#define ZERO(format) (IS_CENTRED(format) ? 128 : HAS_LOW(format) ? 0 : 1 << (CODE_BITS(format) - 1))
#define TILE_ROWS 8 /* most rows of x that a strip is multiplied with at once */
#define OUTER(format) (IS_NESTED(format) ? 256 : BLOCK) /* inputs that share a float16 scale */

typedef union {
  int32_t whole;
  float real;
} offset_t;

/* A block of a row of x: codes * scale. offset: -zero * sum of a part's codes, or sum of x, for weights with a low. */
typedef struct {
  int32_t codes[BLOCK / 4];
  float scale;
  offset_t offset[2];
} x_block_t;

typedef int8_t i8v __attribute__((vector_size(LANES)));

/* GCC 12 converts between bytes and words lane by lane. */
INLINE f32v load_i8(const uint8_t *p) {
  i8v x;
  memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)
  return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#elif defined(__AVX2__)
  return (f32v)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(x, i32v), f32v);
#endif
}

/* sum + a * b, in one rounding where the processor can. */
INLINE f32v fused(f32v sum, f32v a, f32v b) {
#if defined(__AVX512F__)
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

/* To the nearest whole number, ties to even. Said by name: an addition of 1.5 * 2^23 might be fused with what is before. */
INLINE i32v round_i32(f32v x) {
#if defined(__AVX512F__)
  return (i32v)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (i32v)_mm256_cvtps_epi32((__m256)x);
#else
  i32v whole;
  for (int i = 0; i < LANES; i++) whole[i] = (int32_t)lrintf(x[i]);
  return whole;
#endif
}

/* Numbers that fit. */
INLINE i8v narrow_i32(i32v x) {
#if defined(__AVX512F__)
  return (i8v)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  const __m128i bytes = _mm_packs_epi16(words, words);
  i8v out;
  memcpy(&out, &bytes, sizeof out);
  return out;
#else
  return __builtin_convertvector(x, i8v);
#endif
}

INLINE f32v load_f16(const uint8_t *p) {
#if defined(__AVX512F__)
  __m256i x;
  memcpy(&x, p, sizeof x);
  return (f32v)_mm512_cvtph_ps(x);
#elif defined(__F16C__)
  __m128i x;
  memcpy(&x, p, sizeof x);
  return (f32v)_mm256_cvtph_ps(x);
#else
  u16v x;
  memcpy(&x, p, sizeof x);
  u32v bits = __builtin_convertvector(x, u32v);
  f32v size = (f32v)((bits & 0x7fff) << 13) * 0x1p112f; /* finite ones, also the smallest */
  return (f32v)((u32v)size | (bits & 0x8000) << 16);
#endif
}

/* sum + four bytes of each lane of `codes`, unsigned, times those of x, signed. */
INLINE i32v dot_bytes(i32v sum, u32v codes, int32_t x) {
#if defined(__AVX512VNNI__) && LANES == 16
  return (i32v)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__) && LANES == 16
  const __m512i both = _mm512_set1_epi32(x), even = _mm512_srai_epi16(_mm512_slli_epi16(both, 8), 8);
  return sum + (i32v)_mm512_madd_epi16((__m512i)(codes & 0x00ff00ff), even) +
         (i32v)_mm512_madd_epi16((__m512i)(codes >> 8 & 0x00ff00ff), _mm512_srai_epi16(both, 8));
#elif defined(__AVXVNNI__) && LANES == 8
  return (i32v)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#else
  for (int byte = 0; byte < 4; byte++) sum += (i32v)(codes >> 8 * byte & 0xff) * (int8_t)(x >> 8 * byte);
  return sum;
#endif
}

/* Without an instruction for four bytes, two products are added in 16 bits. Those of codes below 64 may be added
 * further, SHORT_SUMS times: 8 * 2 * 15 * 127, 4 * 2 * 31 * 127 and 2 * 2 * 63 * 127 fit. Larger ones are multiplied
 * as signed numbers, IS_SIGNED: 2 * 128 * 127. GCC 12 would add products last, and keep all in memory until then. */
#if defined(__AVX2__) && !defined(__AVXVNNI__) && LANES == 8
#define KEPT_IN_ORDER(sum) __asm__("" : "+x"(sum))
#define SHORT_SUMS(format) (IS_CENTRED(format) ? 0 : (format) == Q6_K ? 2 : HIGH_BITS(format) ? 4 : 8)
#define IS_SIGNED(format) IS_CENTRED(format)
INLINE i32v add_pairs(i32v pairs, u32v codes, int32_t x) {
  pairs = (i32v)_mm256_add_epi16((__m256i)pairs, _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x)));
  KEPT_IN_ORDER(pairs);
  return pairs;
}
INLINE i32v sum_of_pairs(i32v pairs) { return (i32v)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
INLINE i32v dot_signed(i32v sum, u32v codes, int32_t x) { /* codes - 128 */
  const __m256i numbers = (__m256i)(codes ^ 0x80808080);
  const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(x), numbers);
  sum += sum_of_pairs((i32v)_mm256_maddubs_epi16(_mm256_abs_epi8(numbers), signed_x));
  KEPT_IN_ORDER(sum);
  return sum;
}
#else
#define SHORT_SUMS(format) 0
#define IS_SIGNED(format) 0
#define add_pairs(pairs, codes, x) (pairs)
#define sum_of_pairs(pairs) (pairs)
#define dot_signed dot_bytes
#endif

/* What IQ4's codes stand for, + 128 (ggml-common.h: kvalues_iq4nl). */
static const uint8_t iq4_table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

INLINE u32v look_up(u32v places) {
#if defined(__AVX512BW__) && LANES == 16
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)iq4_table));
  return (u32v)_mm512_shuffle_epi8(table, (__m512i)places);
#elif defined(__AVX2__) && LANES == 8
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)iq4_table));
  return (u32v)_mm256_shuffle_epi8(table, (__m256i)places);
#else
  uint8_t bytes[sizeof places];
  memcpy(bytes, &places, sizeof bytes);
  for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = iq4_table[bytes[i]];
  memcpy(&places, bytes, sizeof bytes);
  return places;
#endif
}

/* Two bits of each of inputs 4 * j to 4 * j + 3 of a block. */
INLINE u32v two_bits(const uint8_t *bits, int j) {
  return load_u32(bits + j / 4 * 4 * LANES) >> 2 * (j % 4) & 0x03030303;
}

/* Inputs 4 * j to 4 * j + 3 of a block. */
INLINE u32v load_codes(const int format, const uint8_t *codes, int j) {
  if (format == Q8_0) return load_u32(codes + j * 4 * LANES);
  const uint8_t *high = codes + LOW_BITS(format) * 4 * LANES;
  u32v low;
  if (LOW_BITS(format) == 2) {
    low = two_bits(codes, j);
  } else {
    low = load_u32(codes + j % 4 * 4 * LANES);
    low = (j < 4 ? low : low >> 4) & 0x0f0f0f0f;
  }
  if (HAS_TABLE(format)) return look_up(low);
  if (HIGH_BITS(format) == 2) return low | two_bits(high, j) << 4;
  if (HIGH_BITS(format) == 0) return low;
  const int place = LOW_BITS(format);
  const u32v bits = load_u32(high);
  return low | ((j < place ? bits << (place - j) : bits >> (j - place)) & (0x01010101 << place));
}

INLINE int64_t strip_bytes(const int format, int64_t num_inputs) {
  const int lows = HAS_LOW(format) ? 2 : 1;
  const int inner = IS_NESTED(format) ? (HAS_LOW(format) ? 2 : PARTS(format)) : 0;
  return num_inputs / OUTER(format) * 2 * lows * LANES + num_inputs / BLOCK * (inner + 4 * CODE_BITS(format)) * LANES;
}

/* Of LANES columns: the scale of each part of a block, its low, and the float16 ones that they are made of. */
typedef struct {
  f32v outer, outer_low, scale[2], low;
} scales_t;

/* Reads what a strip has before the codes of the block at input `k`, in turn from 0 on; returns where the codes are. */
INLINE const uint8_t *read_scales(const int format, const uint8_t *strip, int64_t k, scales_t *out) {
  if (k % OUTER(format) == 0) {
    out->outer = load_f16(strip);
    if (HAS_LOW(format)) out->outer_low = load_f16(strip + 2 * LANES);
    strip += (HAS_LOW(format) ? 4 : 2) * LANES;
  }
#pragma GCC unroll 2
  for (int part = 0; part < PARTS(format); part++) {
    out->scale[part] = IS_NESTED(format) ? out->outer * load_i8(strip) : out->outer;
    if (IS_NESTED(format)) strip += LANES;
  }
  out->low = out->outer_low;
  if (HAS_LOW(format) && IS_NESTED(format)) out->low = out->outer_low * load_i8(strip), strip += LANES;
  return strip;
}

/* A later block of the strips that end there, if that is not 0. */
INLINE void fetch_block(const int format, const uint8_t *strip, const uint8_t *end) {
  for (int64_t at = 0; at <= 4 * CODE_BITS(format) * LANES; at += 64) fetch_ahead(strip + at, end);
}

/* dots [num_rows] = x * codes of a part of a block. */
INLINE void dot_part(const int format, const int num_rows, const int part, const x_block_t *x, const uint8_t *codes,
                     i32v *dots) {
  const int first = part * 8 / PARTS(format), last = (part + 1) * 8 / PARTS(format);
  const int together = SHORT_SUMS(format) ? SHORT_SUMS(format) : 1, has_offset = !HAS_LOW(format) && !IS_SIGNED(format);
#pragma GCC unroll 8
  for (int i = 0; i < num_rows; i++) dots[i] = (i32v){} + (has_offset ? x[i].offset[part].whole : 0);
#pragma GCC unroll 8
  for (int j = first; j < last; j += together) {
    i32v pairs[TILE_ROWS] = {};
#pragma GCC unroll 8
    for (int k = j; k < j + together; k++) {
      const u32v four = load_codes(format, codes, k);
#pragma GCC unroll 8
      for (int i = 0; i < num_rows; i++) {
        if (SHORT_SUMS(format))
          pairs[i] = add_pairs(pairs[i], four, x[i].codes[k]);
        else if (IS_SIGNED(format))
          dots[i] = dot_signed(dots[i], four, x[i].codes[k]);
        else
          dots[i] = dot_bytes(dots[i], four, x[i].codes[k]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; SHORT_SUMS(format) && i < num_rows; i++) dots[i] += sum_of_pairs(pairs[i]);
  }
}

/* out [num_rows, LANES] = x * strip; x: [blocks, num_rows]; end: of the strips to be fetched, or 0. */
INLINE void quantised_tile(const int format, const int num_rows, const x_block_t *x, const uint8_t *strip,
                           const uint8_t *end, float *out, int64_t num_inputs) {
  f32v sums[TILE_ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < num_rows; i++) sums[i] = splat(0);
  scales_t scales = {};
  for (int64_t k = 0; k < num_inputs; k += BLOCK) {
    fetch_block(format, strip, end);
    strip = read_scales(format, strip, k, &scales);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS(format); part++) {
      i32v dots[TILE_ROWS];
      dot_part(format, num_rows, part, x, strip, dots);
#pragma GCC unroll 8
      for (int i = 0; i < num_rows; i++) {
        const f32v both = scales.scale[part] * x[i].scale;
        sums[i] = fused(sums[i], __builtin_convertvector(dots[i], f32v), both);
        if (HAS_LOW(format)) sums[i] = fused(sums[i], scales.low, splat(x[i].offset[0].real));
      }
    }
    strip += 4 * CODE_BITS(format) * LANES;
    x += num_rows;
  }
#pragma GCC unroll 8
  for (int i = 0; i < num_rows; i++) store_f32(out + i * LANES, sums[i]);
}

INLINE void quantised_rows(const int format, int num_rows, const x_block_t *x, const uint8_t *strip, const uint8_t *end,
                           float *out, int64_t num_inputs) {
  switch (num_rows) {
    case 8: quantised_tile(format, 8, x, strip, end, out, num_inputs); break;
    case 7: quantised_tile(format, 7, x, strip, end, out, num_inputs); break;
    case 6: quantised_tile(format, 6, x, strip, end, out, num_inputs); break;
    case 5: quantised_tile(format, 5, x, strip, end, out, num_inputs); break;
    case 4: quantised_tile(format, 4, x, strip, end, out, num_inputs); break;
    case 3: quantised_tile(format, 3, x, strip, end, out, num_inputs); break;
    case 2: quantised_tile(format, 2, x, strip, end, out, num_inputs); break;
    default: quantised_tile(format, 1, x, strip, end, out, num_inputs);
  }
}

/* Calls a function that is compiled for each format. */
#define FOR_FORMAT(format, function, ...)              \
  switch (format) {                                    \
    case Q4_0: function(Q4_0, __VA_ARGS__); break;     \
    case Q4_1: function(Q4_1, __VA_ARGS__); break;     \
    case Q5_0: function(Q5_0, __VA_ARGS__); break;     \
    case Q5_1: function(Q5_1, __VA_ARGS__); break;     \
    case Q8_0: function(Q8_0, __VA_ARGS__); break;     \
    case IQ4_NL: function(IQ4_NL, __VA_ARGS__); break; \
    case Q3_K: function(Q3_K, __VA_ARGS__); break;     \
    case Q4_K: function(Q4_K, __VA_ARGS__); break;     \
    case Q5_K: function(Q5_K, __VA_ARGS__); break;     \
    case Q6_K: function(Q6_K, __VA_ARGS__); break;     \
    default: function(IQ4_XS, __VA_ARGS__);            \
  }

static void quantised_product(int format, int num_rows, const x_block_t *x, const uint8_t *strip, const uint8_t *end,
                              float *out, int64_t num_inputs) {
  FOR_FORMAT(format, quantised_rows, num_rows, x, strip, end, out, num_inputs)
}

INLINE i32v add_i32(i32v a, i32v b) { return a + b; }
INLINE i32v max_i32(i32v a, i32v b) { return (a & (a > b)) | (b & ~(a > b)); }
INLINE int32_t sum_of_i32(i32v x) { FOLD(add_i32, x) return x[0] + (LANES == 16 ? x[LANES - 1] : 0); }
INLINE int32_t max_of_i32(i32v x) { FOLD(max_i32, x) return x[0] > x[LANES - 1] ? x[0] : x[LANES - 1]; }

/* A row of x [BLOCK] in eight bits, for weights with this zero and these parts. The largest is found by its bits, of
 * which those of a NaN are the largest: it or an infinity makes the scale, and so the row's results, not finite. */
INLINE void quantise_block(const f32v *x, int8_t codes[BLOCK], float *scale, offset_t offset[2], int zero, int has_low,
                           int num_parts) {
  i32v largest = {};
  for (int v = 0; v < BLOCK / LANES; v++) largest = max_i32(largest, (i32v)x[v] & 0x7fffffff);
  const int32_t bits = max_of_i32(largest);
  float most;
  memcpy(&most, &bits, sizeof most);
  const float inverse = most > 0x1p-120f ? 127.0f / most : 0; /* finite, so that no code is -128 */
  const f32v magic = splat(ROUNDING); /* as in exp_f32 */
  i32v totals[2] = {};
  for (int v = 0; v < BLOCK / LANES; v++) {
    const i32v whole = (i32v)(x[v] * inverse + magic) - (i32v)magic;
    const i8v narrow = narrow_i32(whole);
    memcpy(codes + v * LANES, &narrow, sizeof narrow);
    totals[v * LANES * num_parts / BLOCK] += whole;
  }
  *scale = most / 127.0f;
  for (int part = 0; part < num_parts; part++) {
    const int32_t total = sum_of_i32(totals[part]);
    if (has_low)
      offset[part].real = *scale * (float)total;
    else
      offset[part].whole = -zero * total;
  }
}

/* Columns of a strip as numbers: out [num_inputs] = the weights of one column. */
static void quantised_column(int format, const uint8_t *strip, int column, float *out, int64_t num_inputs) {
  scales_t scales = {};
  for (int64_t k = 0; k < num_inputs; k += BLOCK) {
    strip = read_scales(format, strip, k, &scales);
    for (int j = 0; j < BLOCK / 4; j++) {
      const uint32_t codes = load_codes(format, strip, j)[column];
      for (int byte = 0; byte < 4; byte++)
        out[k + 4 * j + byte] =
            scales.scale[j * PARTS(format) / 8][column] * (float)((int)(codes >> 8 * byte & 0xff) - ZERO(format)) +
            scales.low[column];
    }
    strip += 4 * CODE_BITS(format) * LANES;
  }
}
