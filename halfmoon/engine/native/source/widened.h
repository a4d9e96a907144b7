/* Products over pairs of bfloat16 without dot instructions: as floats, the low number of each pair first.
 *
 * A single row widens both sides in registers, more rows widen a part of the weight once for all of them. Both add the
 * same products in the same order, so a row's bits do not depend on the others.
 */

#define WIDENED_DEPTH 128 /* pairs of a part, which stays in the second-level cache */
#define FEW_ROWS 16       /* fewer rows than these read a part too seldom for that */
#define FEW_ROWS_DEPTH 32 /* pairs of theirs, which stays in the first-level cache */

#define LOW_HALF(x) ((f32v)((x) << 16))
#define HIGH_HALF(x) ((f32v)((x) & 0xffff0000))

/* c [PANEL] (+)= a [depth] * b [depth, PANEL]: the weight is read in the order in which it lies. */
static void product_of_row(const uint32_t *a, const uint32_t *b, float *c, int64_t depth, int accumulate) {
  f32v sums[PANEL / LANES];
#pragma GCC unroll 8
  for (int j = 0; j < PANEL / LANES; j++) sums[j] = accumulate ? load_f32(c + j * LANES) : splat(0);
  for (int64_t k = 0; k < depth; k++) {
    const u32v item = (u32v){} + a[k];
#pragma GCC unroll 8
    for (int j = 0; j < PANEL / LANES; j++) {
      const u32v pairs = load_u32(b + k * PANEL + j * LANES);
      sums[j] = sums[j] + LOW_HALF(item) * LOW_HALF(pairs) + HIGH_HALF(item) * HIGH_HALF(pairs);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < PANEL / LANES; j++) store_f32(c + j * LANES, sums[j]);
}

/* As `product`, of at most LINEAR_ROWS rows and a whole panel, over pairs. */
static void product_widened(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                            const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                            int accumulate) {
  if (num_rows == 1) {
    product_of_row(a, b, c, depth, accumulate);
    return;
  }
  float wide_a[LINEAR_ROWS * 2 * WIDENED_DEPTH] __attribute__((aligned(64)));
  float wide_b[2 * WIDENED_DEPTH * PANEL] __attribute__((aligned(64)));
  const int64_t most = num_rows < FEW_ROWS ? FEW_ROWS_DEPTH : WIDENED_DEPTH;
  for (int64_t k = 0; k < depth; k += most) {
    const int64_t part = depth - k < most ? depth - k : most;
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
