/* GGUF's blocks, as a file holds them row by row, packed into strips (quantised.h). */
#pragma once

/* 32 inputs of one column. The scales of a nested format are of type int8. */
typedef struct {
  uint8_t codes[BLOCK], inner[2], inner_low;
  uint16_t outer, outer_low; /* float16 */
} block_t;

static const int gguf_bytes[NUM_FORMATS] = {18, 20, 34, 144, 210}; /* of OUTER inputs */

static uint16_t u16_at(const uint8_t *p) { uint16_t x; memcpy(&x, p, sizeof x); return x; }

/* Block `index` of the OUTER inputs at p, as ggml-quants.c (llama.cpp) reads it. */
static void read_block(int format, const uint8_t *p, int index, block_t *out) {
  const uint8_t *codes = p + (format == Q4_1 ? 4 : 2), *scales = p + 4;
  out->outer = u16_at(format == Q6_K ? p + 208 : p);
  out->outer_low = HAS_LOW(format) ? u16_at(p + 2) : 0;
  for (int k = 0; k < BLOCK; k++) {
    if (format == Q4_0 || format == Q4_1) out->codes[k] = codes[k % 16] >> (k < 16 ? 0 : 4) & 15;
    if (format == Q8_0) out->codes[k] = codes[k] ^ 128; /* signed + 128 */
    if (format == Q4_K) out->codes[k] = p[16 + index / 2 * 32 + k] >> (index % 2 ? 4 : 0) & 15;
    if (format == Q6_K) { /* 128 inputs are four blocks */
      const int half = index / 4, quarter = index % 4;
      const int low = p[half * 64 + quarter % 2 * 32 + k] >> (quarter < 2 ? 0 : 4) & 15;
      out->codes[k] = low | (p[128 + half * 32 + k] >> 2 * quarter & 3) << 4;
    }
  }
  if (format == Q4_K) {
    out->outer_low ^= 0x8000; /* it is subtracted */
    const int late = index - 4;
    out->inner[0] = index < 4 ? scales[index] & 63 : (scales[index + 4] & 15) | scales[late] >> 6 << 4;
    out->inner_low = index < 4 ? scales[index + 4] & 63 : scales[index + 4] >> 4 | scales[index] >> 6 << 4;
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
        if (format == Q8_0)
          of_column[word * 4 * LANES] = code;
        else
          of_column[word % 4 * 4 * LANES] |= (code & 15) << (word < 4 ? 0 : 4);
        if (format == Q6_K) of_column[(4 + word / 4) * 4 * LANES] |= code >> 4 << 2 * (word % 4);
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
