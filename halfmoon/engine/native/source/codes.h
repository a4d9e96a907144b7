/* What rows of KV are, and their codes as numbers: int8, or e4m3 (OCP, 8-bit floating point, section 5).
 *
 * A code of e4m3 has its sign, four bits of exponent and three of mantissa where float16 has them, seven bits further
 * up, with another bias: read as float16 it is 1/256 of its value, its subnormals included. The scale of the row makes
 * up for that. The two codes for NaN, which no row has, read as +-480.
 */
#pragma once

#include "quantised.h"

enum { ROWS_OF_NUMBERS, ROWS_OF_INT8, ROWS_OF_E4M3 };

#define SCALE_BYTES 2
#define LARGEST_CODE(rows) ((rows) == ROWS_OF_E4M3 ? 448.0f : 127.0f)
#define BELOW_SCALE(rows) ((rows) == ROWS_OF_E4M3 ? 0x7fffff : 0xffff) /* bits of a float32 that a scale has not */
#define CODE_UNIT(rows) ((rows) == ROWS_OF_E4M3 ? 256.0f : 1.0f) /* the value of what the loads give as 1 */
#define LARGEST_BITS 0x7e800000 /* float32: 2^126; a row with larger numbers is scaled for this one */

/* The codes of e4m3 in the highest bytes of words -> their values / 256. */
INLINE f32v highest_e4m3(u32v words) {
#ifdef __AVX512F__
  const __m512i halves = _mm512_and_si512((__m512i)((i32v)words >> 17), _mm512_set1_epi32(0xbf80));
  return (f32v)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m256i halves = _mm256_and_si256((__m256i)((i32v)words >> 17), _mm256_set1_epi32(0xbf80));
  return (f32v)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
  const u32v magnitude = words >> 24 & 0x7f;
  const f32v normal = (f32v)((magnitude << 20) + (112 << 23)); /* the bias of float32, less that of e4m3 and 8 */
  const f32v subnormal = (f32v)((magnitude << 20) + (113 << 23)) - 0x1p-14f;
  return (f32v)((u32v)choose((i32v)(magnitude < 8), subnormal, normal) | (words & 0x80000000));
#endif
}

/* LANES codes of e4m3 -> their values / 256. */
INLINE f32v load_e4m3(const uint8_t *p) {
#if defined(__AVX512F__)
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
  return (f32v)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xbfff)));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
  return (f32v)_mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xbfff)));
#else
  typedef uint8_t u8v __attribute__((vector_size(LANES)));
  u8v codes;
  memcpy(&codes, p, sizeof codes);
  return highest_e4m3(__builtin_convertvector(codes, u32v) << 24);
#endif
}

/* Numbers below 464 -> codes of e4m3, rounded to nearest, ties to even, as numbers of eight bits. */
INLINE i32v round_e4m3(f32v x) {
  const i32v sign = (i32v)((u32v)x >> 24) & 0x80;
  const f32v magnitude = (f32v)((i32v)x & 0x7fffffff);
  /* Adding 2^20 times the power of two below it, which is at least 2^-6, leaves three bits of mantissa. */
  const f32v magic = (f32v)(max_i32((i32v)x & 0x7f800000, (i32v){} + (121 << 23)) + (20 << 23));
  const f32v rounded = (magnitude + magic) - magic;
  const i32v normal = ((i32v)rounded >> 20) - (120 << 3);
  const i32v subnormal = round_i32(rounded * 512.0f);
  const i32v is_small = rounded < 0x1p-6f;
  return ((subnormal & is_small) | (normal & ~is_small)) - sign;
}
