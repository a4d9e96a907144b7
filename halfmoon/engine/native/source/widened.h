/* Products over pairs of bfloat16 without dot instructions: as floats, the low number of each pair first.
 *
 * Few rows widen a weight in registers, more rows a part of it once for all of them. All add the same products in the
 * same order, so a row's bits do not depend on the others.
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

/* c [num_rows, PANEL] (+)= items [num_rows, 2 * depth] * b [depth, PANEL]. Memory is fetched in the order in which it
 * lies, which strips of columns are not. */
INLINE void few_rows_tile(const int num_rows, const float *items, const uint32_t *b, const uint32_t *b_end, float *c,
                          int64_t c_stride, int64_t depth, int accumulate) {
  const uint32_t *line = b;
  const int num_vectors = num_rows > 3 && LANES == 8 ? 2 : 4; /* of which the sums fit into registers */
  for (int64_t column = 0; column < PANEL; column += num_vectors * LANES) {
    f32v sums[5][4];
#pragma GCC unroll 5
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 4
      for (int j = 0; j < num_vectors; j++)
        sums[i][j] = accumulate ? load_f32(c + i * c_stride + column + j * LANES) : splat(0);
    for (int64_t k = 0; k < depth; k++) {
#pragma GCC unroll 4
      for (int j = 0; j < num_vectors; j++) {
        const u32v pairs = load_u32(b + k * PANEL + column + j * LANES);
        if (j * LANES % 16 == 0) fetch_ahead(line, b_end), line += 16;
#pragma GCC unroll 5
        for (int i = 0; i < num_rows; i++) {
          const float *item = items + i * 2 * FEW_ROWS_DEPTH + 2 * k;
          sums[i][j] = sums[i][j] + (item[0] - (f32v){}) * LOW_HALF(pairs); /* - 0 changes no bit and costs nothing */
          sums[i][j] = sums[i][j] + (item[1] - (f32v){}) * HIGH_HALF(pairs);
        }
      }
    }
#pragma GCC unroll 5
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 4
      for (int j = 0; j < num_vectors; j++) store_f32(c + i * c_stride + column + j * LANES, sums[i][j]);
  }
}

/* c [num_rows, PANEL] (+)= a [num_rows, depth] * b [depth, PANEL], of 2 to FEW_ROWS - 1 rows. */
static void product_of_few_rows(int64_t num_rows, const uint32_t *a, int64_t a_stride, const uint32_t *b, float *c,
                                int64_t c_stride, int64_t depth, int accumulate, const uint32_t *b_end) {
  float items[FEW_ROWS * 2 * FEW_ROWS_DEPTH] __attribute__((aligned(64)));
  for (int64_t k = 0; k < depth; k += FEW_ROWS_DEPTH, b += FEW_ROWS_DEPTH * PANEL) {
    const int64_t part = depth - k < FEW_ROWS_DEPTH ? depth - k : FEW_ROWS_DEPTH;
    for (int64_t i = 0; i < num_rows; i++) widen_bf16(items + i * 2 * FEW_ROWS_DEPTH, a + i * a_stride + k, 2 * part);
    for (int64_t i = 0, rows; i < num_rows; i += rows) {
      const int64_t left = num_rows - i;
      rows = left <= 5 ? left : left <= 10 ? (left + 1) / 2 : 4; /* never one: its sums would wait for each other */
#define TILE(n)                                                                                                     \
  if (rows == n)                                                                                                    \
  few_rows_tile(n, items + i * 2 * FEW_ROWS_DEPTH, b, i ? 0 : b_end, c + i * c_stride, c_stride, part,               \
                accumulate || k > 0)
      TILE(2);
      TILE(3);
      TILE(4);
      TILE(5);
#undef TILE
    }
  }
}

/* As `fetching_product`, of at most LINEAR_ROWS rows and a whole panel, over pairs. */
static void product_widened(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                            const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                            int accumulate, const uint32_t *b_end) {
  if (num_rows == 1) {
    product_of_row(a, b, c, depth, accumulate);
    return;
  }
  if (num_rows < FEW_ROWS) {
    product_of_few_rows(num_rows, a, a_stride, b, c, c_stride, depth, accumulate, b_end);
    return;
  }
  float wide_a[LINEAR_ROWS * 2 * WIDENED_DEPTH] __attribute__((aligned(64)));
  float wide_b[2 * WIDENED_DEPTH * PANEL] __attribute__((aligned(64)));
  for (int64_t k = 0; k < depth; k += WIDENED_DEPTH) {
    const int64_t part = depth - k < WIDENED_DEPTH ? depth - k : WIDENED_DEPTH;
    for (int64_t i = 0; i < num_rows; i++) widen_bf16(wide_a + i * 2 * WIDENED_DEPTH, a + i * a_stride + k, 2 * part);
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
