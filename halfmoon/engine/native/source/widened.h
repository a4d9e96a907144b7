/* Products over pairs of bfloat16 without dot instructions: as floats, the low number of each pair first.
 *
 * A few rows widen both sides in registers, so that a weight is read in pairs; more rows widen a part of the weight
 * once for all of them. Both add the same products in the same order, so a row's bits do not depend on the others.
 */

#define WIDENED_ROWS 12 /* from which on a part of the weight is widened for all rows */
#define WIDENED_DEPTH 128 /* pairs of a part, which stays in the second-level cache */

#define LOW_HALF(x) ((f32v)((x) << 16))
#define HIGH_HALF(x) ((f32v)((x) & 0xffff0000))
#undef NAME
#undef DOT
#define NAME(x) x##_pairs
#define DOT(sum, item, row)                                                                                    \
  ((sum) + LOW_HALF((u32v){} + (item)) * LOW_HALF(row) + HIGH_HALF((u32v){} + (item)) * HIGH_HALF(row))
#include "product.h"
#undef NAME
#define NAME(x) x##_bf16

/* As `product`, of at most LINEAR_ROWS rows and PANEL columns, over pairs. */
static void product_widened(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                            const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                            int accumulate) {
  if (num_rows < WIDENED_ROWS) {
    product_pairs(num_rows, num_columns, a, a_stride, b, b_stride, c, c_stride, depth, accumulate);
    return;
  }
  float wide_a[LINEAR_ROWS * 2 * WIDENED_DEPTH] __attribute__((aligned(64)));
  float wide_b[2 * WIDENED_DEPTH * PANEL] __attribute__((aligned(64)));
  for (int64_t k = 0; k < depth; k += WIDENED_DEPTH) {
    const int64_t part = depth - k < WIDENED_DEPTH ? depth - k : WIDENED_DEPTH;
    for (int64_t i = 0; i < num_rows; i++) {
      const uint16_t *row = (const uint16_t *)(a + i * a_stride + k);
      float *wide = wide_a + i * 2 * WIDENED_DEPTH;
      int64_t d = 0;
      for (; d + LANES <= 2 * part; d += LANES) store_f32(wide + d, load_bf16(row + d));
      for (; d < 2 * part; d++) wide[d] = bf16_to_f32(row[d]);
    }
    for (int64_t d = 0; d < part; d++)
      for (int64_t j = 0; j < num_columns; j += LANES) {
        const u32v pairs = load_u32(b + (k + d) * b_stride + j);
        store_f32(wide_b + 2 * d * PANEL + j, LOW_HALF(pairs));
        store_f32(wide_b + (2 * d + 1) * PANEL + j, HIGH_HALF(pairs));
      }
    product_bf16(num_rows, num_columns, (const uint32_t *)wide_a, 2 * WIDENED_DEPTH, (const uint32_t *)wide_b, PANEL,
                 c, c_stride, 2 * part, accumulate || k > 0);
  }
}
