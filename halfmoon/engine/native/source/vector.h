/* Vectors of 16 numbers with AVX-512, else of 8, which compilers split where registers are smaller. GCC and clang. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAS_BF16_DOT 1
#endif

#ifdef __AVX512F__
#define LANES 16
#define EACH_LANE {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define LANES 8
#define EACH_LANE {0, 1, 2, 3, 4, 5, 6, 7}
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (u32v){__VA_ARGS__})
#endif

/* By its bits: 0 + x would have to be computed, since 0 + -0 is 0. */
INLINE f32v splat(float x) { int32_t bits; memcpy(&bits, &x, sizeof bits); return (f32v)((i32v){} + bits); }
INLINE f32v load_f32(const float *p) { f32v x; memcpy(&x, p, sizeof x); return x; }
INLINE void store_f32(float *p, f32v x) { memcpy(p, &x, sizeof x); }
INLINE u32v load_u32(const void *p) { u32v x; memcpy(&x, p, sizeof x); return x; }

#define FETCHED_AHEAD 8192

/* Fetches the line that is so far behind `memory`, into the second-level cache, unless it is at `end` or beyond. By
 * themselves processors are far enough ahead if they do nothing but read, not if they multiply each line with several
 * rows: then memory waits for them, and they for memory. */
INLINE void fetch_ahead(const void *memory, const void *end) {
  const char *ahead = (const char *)memory + FETCHED_AHEAD;
  if (ahead < (const char *)end) __builtin_prefetch(ahead, 0, 2);
}

INLINE f32v load_bf16(const uint16_t *p) {
#if defined(__AVX2__) && LANES == 8 /* the same, which GCC 12 does half by half */
  return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
  u16v x;
  memcpy(&x, p, sizeof x);
  return (f32v)(__builtin_convertvector(x, u32v) << 16);
#endif
}

/* Rounds to nearest, ties to even, as torch does; a NaN stays one. */
INLINE void store_bf16(uint16_t *p, f32v x) {
#ifdef HAS_BF16_DOT
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  memcpy(p, &rounded, sizeof rounded);
#else
  u32v bits = (u32v)x;
  u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32v is_nan = (u32v)(x != x);
  u16v out = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), u16v);
  memcpy(p, &out, sizeof out);
#endif
}

INLINE float bf16_to_f32(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}

INLINE uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE f32v choose(i32v which, f32v yes, f32v no) { return (f32v)(((i32v)yes & which) | ((i32v)no & ~which)); }

/* The second of two of which one is NaN, as x86 has it. */
#ifdef __AVX512F__
INLINE f32v max_f32(f32v a, f32v b) { return (f32v)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE f32v min_f32(f32v a, f32v b) { return (f32v)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
INLINE f32v max_f32(f32v a, f32v b) { return (f32v)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE f32v min_f32(f32v a, f32v b) { return (f32v)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE f32v max_f32(f32v a, f32v b) { return choose(a > b, a, b); }
INLINE f32v min_f32(f32v a, f32v b) { return choose(a < b, a, b); }
#endif

/* How many parts of `size` there are in `total`. */
INLINE int64_t ceil_div(int64_t total, int64_t size) { return (total + size - 1) / size; }
/* The size of the part that begins at `first`. */
INLINE int64_t part_size(int64_t first, int64_t total, int64_t size) {
  return total - first < size ? total - first : size;
}

#define LOG2_E 1.44269504f
#define ROUNDING 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold */

/* 2^n e^r for r in [-ln 2 / 2, ln 2 / 2]: a polynomial (Cephes, expf). shifted: n + ROUNDING. */
INLINE f32v exp_part(f32v shifted, f32v r) {
  f32v y = splat(1.9875691500e-4f) * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return (f32v)((i32v)y + (((i32v)shifted - (i32v)splat(ROUNDING)) << 23));
}

/* e^x to 2 ulp in [-87, 88], saturated outside, NaN of NaN. */
INLINE f32v exp_f32(f32v x) {
  x = max_f32(splat(-87.0f), min_f32(splat(88.0f), x)); /* in this order both keep a NaN */
  const f32v shifted = x * LOG2_E + ROUNDING, n = shifted - ROUNDING;
  return exp_part(shifted, x - n * 0.693359375f + n * 2.12194440e-4f);
}

/* 2^x to 2 ulp for finite x up to 126: 2^n, and 2^r by a minimax polynomial. It is no less than 2^-126, but with AVX-512,
 * where it goes on to 0. */
INLINE f32v exp2_f32(f32v x) {
#ifndef __AVX512F__
  x = max_f32(splat(-126.0f), x);
#endif
  const f32v shifted = x + ROUNDING, n = shifted - ROUNDING, r = x - n;
  f32v y = splat(1.5594677610e-4f) * r + 1.3406643906e-3f;
  y = y * r + 9.6176929747e-3f;
  y = y * r + 5.5503105510e-2f;
  y = y * r + 2.4022652783e-1f;
  y = y * r + 6.9314721497e-1f;
  y = y * r + 1.0f;
#ifdef __AVX512F__
  return (f32v)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  return (f32v)((i32v)y + ((i32v)shifted << 23)); /* what is above n in `shifted` leaves at the top */
#endif
}

#ifdef HAS_BF16_DOT
/* 2^x to 3e-6, for what is rounded to bfloat16: 2^n, n the next whole number below, and 2^r by a minimax polynomial. */
INLINE f32v exp2_bf16(f32v x) {
  const f32v r = (f32v)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  f32v y = splat(1.3534167869e-2f) * r + 5.2011462774e-2f;
  y = y * r + 2.4144275391e-1f;
  y = y * r + 6.9300383560e-1f;
  y = y * r + 1.0000025933f;
  return (f32v)_mm512_scalef_ps((__m512)y, (__m512)x);
}
#endif

/* Shuffles are written for 8 lanes; with 16 the same happens in both halves. */
#if LANES == 16
#define SHUFFLE_8(x, y, a, b, c, d, e, f, g, h)                                                                \
  SHUFFLE(x, y, WIDE(a), WIDE(b), WIDE(c), WIDE(d), WIDE(e), WIDE(f), WIDE(g), WIDE(h), WIDE(a) + 8, WIDE(b) + 8, \
          WIDE(c) + 8, WIDE(d) + 8, WIDE(e) + 8, WIDE(f) + 8, WIDE(g) + 8, WIDE(h) + 8)
#define WIDE(lane) ((lane) < 8 ? (lane) : (lane) + 8) /* lanes of y begin at 16 instead of 8 */
#else
#define SHUFFLE_8 SHUFFLE
#endif

#define FOLD(op, x)                                                                                            \
  x = op(x, SHUFFLE_8(x, x, 4, 5, 6, 7, 0, 1, 2, 3));                                                          \
  x = op(x, SHUFFLE_8(x, x, 2, 3, 0, 1, 6, 7, 4, 5));                                                          \
  x = op(x, SHUFFLE_8(x, x, 1, 0, 3, 2, 5, 4, 7, 6));

INLINE f32v add_f32(f32v a, f32v b) { return a + b; }
INLINE float sum_of(f32v x) { FOLD(add_f32, x) return x[0] + (LANES == 16 ? x[LANES - 1] : 0); }
INLINE float max_of(f32v x) { FOLD(max_f32, x) return x[0] > x[LANES - 1] ? x[0] : x[LANES - 1]; }

/* Whether any lane of x is above y. */
INLINE int any_above(f32v x, float y) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)x, (__m512)splat(y), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)splat(y), _CMP_GT_OQ)) != 0;
#else
  return max_of(x) > y;
#endif
}

/* LANES 32-bit items of each of LANES rows, from `first` on, as columns. */
INLINE void transpose(const uint32_t *const rows[LANES], int64_t first, u32v out[LANES]) {
  u32v a[LANES], b[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) a[i] = load_u32(rows[i] + first);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i += 2) {
    b[i] = SHUFFLE_8(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    b[i + 1] = SHUFFLE_8(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i += 4)
#pragma GCC unroll 16
    for (int j = i; j < i + 2; j++) {
      a[j] = SHUFFLE_8(b[j], b[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      a[j + 2] = SHUFFLE_8(b[j], b[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i += 8)
#pragma GCC unroll 16
    for (int j = i; j < i + 4; j++) {
      b[j] = SHUFFLE_8(a[j], a[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
      b[j + 4] = SHUFFLE_8(a[j], a[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#if LANES == 16
#pragma GCC unroll 16
  for (int j = 0; j < 8; j++) {
    out[j] = SHUFFLE(b[j], b[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    out[j + 8] = SHUFFLE(b[j], b[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
#else
#pragma GCC unroll 16
  for (int j = 0; j < LANES; j++) out[j] = b[j];
#endif
}
