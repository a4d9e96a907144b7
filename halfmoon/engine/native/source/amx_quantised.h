/* Products of many rows with a strip of quantised.h by tiles: x in eight bits, 16 rows of a block, times the block's
 * codes as signed bytes. What is done with the sums of a block, and in which order, is `quantised_tile`'s, so a row has
 * the same bits either way.
 */
#pragma once

#define TILED_ROWS 512    /* most rows of a task */
#define TILED_STRIPS 2    /* at a time: what it writes of a row is a line of the cache in bfloat16 */
#define TILED_COLUMNS (TILED_STRIPS * LANES)
#define LEAST_TILED 32    /* rows; with fewer, opening a strip takes longer than its products save */
#define OPENED_INPUTS 768 /* in the first-level cache while rows pass; a multiple of any OUTER */

/* A block of 16 rows of x, those of x_block_t. lows: scale * sum of codes, for weights with a low. */
typedef struct {
  int8_t codes[AMX_ROWS][BLOCK];
  float scales[AMX_ROWS], lows[AMX_ROWS];
} x_tile_t;

#ifndef HAS_AMX
#define HAS_TILES 0
#else
#define HAS_TILES amx_is_permitted

_Static_assert(OPENED_INPUTS % OUTER(Q4_K) == 0, "a strip is opened from where a float16 scale begins");
_Static_assert(LEAST_TILED % AMX_ROWS == 0 && TILED_ROWS == LEAST_TILED << 4, "whole tiles, halved four times at most");
_Static_assert(sizeof(x_tile_t) <= AMX_ROWS * sizeof(x_block_t), "both fit into the same room");

/* A strip's next inputs: codes less the zero, four of each column in a row; scales of parts and lows of blocks. */
typedef struct {
  u32v codes[OPENED_INPUTS / 4];
  f32v scales[2 * OPENED_INPUTS / BLOCK], lows[OPENED_INPUTS / BLOCK];
} opened_t;

/* Returns where the strip goes on. end: as in `quantised_tile`. */
INLINE const uint8_t *open_strip(const int format, const uint8_t *strip, const uint8_t *end, int64_t num_inputs,
                                 opened_t *out) {
  scales_t scales = {};
  u32v *codes = out->codes;
  f32v *scale = out->scales;
  for (int64_t k = 0; k < num_inputs; k += BLOCK) {
    fetch_block(format, strip, end);
    strip = read_scales(format, strip, k, &scales);
    for (int part = 0; part < PARTS(format); part++) *scale++ = scales.scale[part];
    if (HAS_LOW(format)) out->lows[k / BLOCK] = scales.low;
#pragma GCC unroll 8
    for (int j = 0; j < BLOCK / 4; j++)
      *codes++ = (u32v)_mm512_sub_epi8((__m512i)load_codes(format, strip, j), _mm512_set1_epi8((char)ZERO(format)));
    strip += 4 * CODE_BITS(format) * LANES;
  }
  return strip;
}

/* dots [16 rows, 16 columns] = x * codes of one step: a block, or a part of one. is_odd: in which tiles, so that a step
 * need not wait until the one before is added. */
INLINE void begin_step(const int format, const int is_odd, const x_tile_t *x, const opened_t *opened, int64_t step,
                       int32_t *dots) {
  const int8_t *rows = x[step / PARTS(format)].codes[0] + step % PARTS(format) * (BLOCK / PARTS(format));
  const u32v *columns = opened->codes + step * (BLOCK / 4 / PARTS(format));
#define STEP(sums, a, b)                         \
  do {                                           \
    AMX_LOAD(a, rows, BLOCK);                    \
    AMX_LOAD(b, columns, sizeof *columns);       \
    AMX_ZERO(sums);                              \
    AMX_DOT_BYTES(sums, a, b);                   \
    AMX_STORE(sums, dots, LANES * sizeof *dots); \
  } while (0)
  if (is_odd)
    STEP(1, 5, 7);
  else
    STEP(0, 4, 6);
#undef STEP
}

/* sums += dots, scaled. */
INLINE void add_step(const int format, const x_tile_t *x, const opened_t *opened, int64_t step, const int32_t *dots,
                     f32v *sums) {
  const x_tile_t *block = x + step / PARTS(format);
  const f32v scale = opened->scales[step], low = HAS_LOW(format) ? opened->lows[step] : splat(0);
#pragma GCC unroll 16
  for (int i = 0; i < AMX_ROWS; i++) {
    const f32v both = scale * block->scales[i];
    sums[i] = fused(sums[i], __builtin_convertvector((i32v)load_u32(dots + i * LANES), f32v), both);
    if (HAS_LOW(format)) sums[i] = fused(sums[i], low, splat(block->lows[i]));
  }
}

/* out [16 rows, LANES], TILED_COLUMNS apart, += x * the opened inputs. */
INLINE void tiled_rows(const int format, const x_tile_t *x, const opened_t *opened, float *out, int64_t num_inputs) {
  int32_t dots[2][AMX_ROWS * LANES] __attribute__((aligned(64)));
  const int64_t num_steps = num_inputs / BLOCK * PARTS(format);
  f32v sums[AMX_ROWS];
#pragma GCC unroll 16
  for (int i = 0; i < AMX_ROWS; i++) sums[i] = load_f32(out + i * TILED_COLUMNS);
  begin_step(format, 0, x, opened, 0, dots[0]);
  for (int64_t step = 0; step < num_steps; step += 2) {
    if (step + 1 < num_steps) begin_step(format, 1, x, opened, step + 1, dots[1]);
    add_step(format, x, opened, step, dots[0], sums);
    if (step + 2 < num_steps) begin_step(format, 0, x, opened, step + 2, dots[0]);
    if (step + 1 < num_steps) add_step(format, x, opened, step + 1, dots[1], sums);
  }
#pragma GCC unroll 16
  for (int i = 0; i < AMX_ROWS; i++) store_f32(out + i * TILED_COLUMNS, sums[i]);
}

/* Tiles 4 and 5 are rows of x, 6 and 7 columns of a strip. */
static void configure_bytes(int depth) {
  if (tiles_now == -depth) return;
  tiles_now = -depth;
  amx_config_t config = {.palette = 1};
  for (int i = 0; i < NUM_AMX_TILES; i++) config.rows[i] = AMX_ROWS, config.row_bytes[i] = 64;
  config.row_bytes[4] = config.row_bytes[5] = (uint16_t)depth;
  config.rows[6] = config.rows[7] = (uint8_t)(depth / 4);
  AMX_CONFIG(&config);
}

/* out [num_rows up to a multiple of 16, TILED_COLUMNS]: of LANES columns x * strip; x: [num_rows / 16, blocks]. */
INLINE void tiled_strip(const int format, int64_t num_rows, const x_tile_t *x, const uint8_t *strip, const uint8_t *end,
                        float *out, int64_t num_inputs) {
  opened_t opened;
  configure_bytes(BLOCK / PARTS(format));
  for (int64_t i = 0; i < ceil_div(num_rows, AMX_ROWS) * AMX_ROWS; i++) store_f32(out + i * TILED_COLUMNS, splat(0));
  for (int64_t k = 0; k < num_inputs; k += OPENED_INPUTS) {
    const int64_t opening = part_size(k, num_inputs, OPENED_INPUTS);
    strip = open_strip(format, strip, end, opening, &opened);
    for (int64_t i = 0; i < num_rows; i += AMX_ROWS) {
      const x_tile_t *tile = x + i / AMX_ROWS * (num_inputs / BLOCK) + k / BLOCK;
      tiled_rows(format, tile, &opened, out + i * TILED_COLUMNS, opening);
    }
  }
}

static void tiled_product(int format, int64_t num_rows, const x_tile_t *x, const uint8_t *strip, const uint8_t *end,
                          float *out, int64_t num_inputs) {
  FOR_FORMAT(format, tiled_strip, num_rows, x, strip, end, out, num_inputs)
}
#endif
