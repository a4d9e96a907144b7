/* GGUF's blocks, as a file holds them row by row, packed into strips (quantised.h). */
#pragma once

/* 32 inputs of one column. The scales of a nested format are of type int8. */
typedef struct {
  uint8_t codes[BLOCK], inner[2], inner_low;
  uint16_t outer, outer_low; /* float16 */
} block_t;

static const int gguf_bytes[NUM_FORMATS] = {18, 20, 22, 24, 34, 18, 110, 144, 176, 210, 136}; /* of OUTER inputs */

static uint16_t u16_at(const uint8_t *p) { uint16_t x; memcpy(&x, p, sizeof x); return x; }

/* Byte k % 16 of a block has inputs k and k + 16. */
static int nibble(const uint8_t *p, int k) { return p[k % 16] >> (k < 16 ? 0 : 4) & 15; }

/* Block `index` of the OUTER inputs at p, as ggml-quants.c (llama.cpp) reads it. Six-bit scales are in two pieces. */
static void read_block(int format, const uint8_t *p, int index, block_t *out) {
  const int half = index / 4, quarter = index % 4; /* of 256 inputs, each half has bytes of its own */
  const uint8_t *scales = p + 4;
  out->outer = u16_at(format == Q6_K ? p + 208 : format == Q3_K ? p + 108 : p);
  out->outer_low = HAS_LOW(format) ? u16_at(p + 2) : 0;
  for (int k = 0; k < BLOCK; k++) {
    int code = 0;
    switch (format) {
      case Q4_0: case IQ4_NL: code = nibble(p + 2, k); break;
      case Q4_1: code = nibble(p + 4, k); break;
      case Q5_0: code = nibble(p + 6, k) | (p[2 + k / 8] >> k % 8 & 1) << 4; break;
      case Q5_1: code = nibble(p + 8, k) | (p[4 + k / 8] >> k % 8 & 1) << 4; break;
      case Q8_0: code = p[2 + k] ^ 128; break; /* signed + 128 */
      case Q3_K: code = (p[32 + half * 32 + k] >> 2 * quarter & 3) | (p[k] >> index & 1) << 2; break;
      case Q4_K: code = p[16 + index / 2 * 32 + k] >> index % 2 * 4 & 15; break;
      case Q5_K: code = (p[48 + index / 2 * 32 + k] >> index % 2 * 4 & 15) | (p[16 + k] >> index & 1) << 4; break;
      case IQ4_XS: code = nibble(p + 8 + index * 16, k); break;
      default: /* Q6_K */
        code = (p[half * 64 + quarter % 2 * 32 + k] >> quarter / 2 * 4 & 15) |
               (p[128 + half * 32 + k] >> 2 * quarter & 3) << 4;
    }
    out->codes[k] = (uint8_t)code;
  }
  if (format == Q4_K || format == Q5_K) {
    out->outer_low ^= 0x8000; /* it is subtracted */
    const int late = index - 4;
    out->inner[0] = index < 4 ? scales[index] & 63 : (scales[index + 4] & 15) | scales[late] >> 6 << 4;
    out->inner_low = index < 4 ? scales[index + 4] & 63 : scales[index + 4] >> 4 | scales[index] >> 6 << 4;
  }
  if (format == IQ4_XS)
    out->inner[0] = (scales[index / 2] >> index % 2 * 4 & 15 | (u16_at(p + 2) >> 2 * index & 3) << 4) - 32;
  for (int part = 0; format == Q3_K && part < 2; part++) {
    const int place = index * 2 + part, low = p[96 + place % 8] >> place / 8 * 4 & 15;
    out->inner[part] = (low | (p[104 + place % 4] >> place / 4 * 2 & 3) << 4) - 32;
  }
  if (format == Q6_K) memcpy(out->inner, p + 192 + index * 2, 2);
}

typedef struct {
  const uint8_t *blocks;
  uint8_t *strips;
  int64_t num_columns, num_inputs;
  int format;
} pack_args;

static void pack_strip(void *data, long index) {
  const pack_args *a = data;
  const int format = a->format, outer = OUTER(format), lows = HAS_LOW(format) ? 2 : 1;
  uint8_t *strip = a->strips + index * strip_bytes(format, a->num_inputs);
  memset(strip, 0, strip_bytes(format, a->num_inputs));
  for (int64_t k = 0; k < a->num_inputs; k += BLOCK) {
    uint8_t *of_outer = strip;
    if (k % outer == 0) strip += 2 * lows * LANES;
    uint8_t *inner = strip;
    if (IS_NESTED(format)) strip += (HAS_LOW(format) ? 2 : PARTS(format)) * LANES;
    for (int c = 0; c < LANES && index * LANES + c < a->num_columns; c++) {
      const int64_t place = (index * LANES + c) * (a->num_inputs / outer) + k / outer;
      block_t block;
      read_block(format, a->blocks + place * gguf_bytes[format], (int)(k % outer / BLOCK), &block);
      if (k % outer == 0) {
        memcpy(of_outer + 2 * c, &block.outer, 2);
        if (HAS_LOW(format)) memcpy(of_outer + 2 * LANES + 2 * c, &block.outer_low, 2);
      }
      if (IS_NESTED(format)) {
        for (int part = 0; part < PARTS(format); part++) inner[part * LANES + c] = block.inner[part];
        if (HAS_LOW(format)) inner[LANES + c] = block.inner_low;
      }
      for (int i = 0; i < BLOCK; i++) { /* input i is byte i % 4 of word i / 4 */
        const int word = i / 4, code = block.codes[i];
        uint8_t *of_column = strip + 4 * c + i % 4;
        const int low_bits = LOW_BITS(format), low = code & ((1 << low_bits) - 1), high = code >> low_bits;
        uint8_t *highs = of_column + low_bits * 4 * LANES;
        if (low_bits == 8) of_column[word * 4 * LANES] = low;
        if (low_bits == 4) of_column[word % 4 * 4 * LANES] |= low << (word < 4 ? 0 : 4);
        if (low_bits == 2) of_column[word / 4 * 4 * LANES] |= low << 2 * (word % 4);
        if (HIGH_BITS(format) == 2) highs[word / 4 * 4 * LANES] |= high << 2 * (word % 4);
        if (HIGH_BITS(format) == 1) highs[0] |= high << word;
      }
    }
    strip += 4 * CODE_BITS(format) * LANES;
  }
}

int64_t packed_bytes(int format, int64_t num_columns, int64_t num_inputs) {
  return ceil_div(num_columns, LANES) * strip_bytes(format, num_inputs);
}

/* blocks: [num_columns, num_inputs] as in a GGUF file; strips: [packed_bytes]. */
void pack_blocks(const uint8_t *blocks, uint8_t *strips, int format, int64_t num_columns, int64_t num_inputs,
                 int num_threads) {
  pack_args args = {blocks, strips, num_columns, num_inputs, format};
  run_tasks(pack_strip, &args, ceil_div(num_columns, LANES), num_threads);
}
