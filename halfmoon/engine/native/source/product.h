/* Small matrix products in registers: c [rows, columns] (+)= a [rows, depth] * b [depth, columns].
 *
 * An item of a and b is 32 bits: a float or, for NAME(…) over bfloat16 with matrix units, a pair of bfloat16 that lie
 * next to each other along the depth. DOT(c, a, b) multiplies and adds one vector of them. b_end: where the memory ends
 * of which b is a part and which is read from front to back, or 0.
 */

INLINE void NAME(product_tile)(const int num_rows, const int num_vectors, const uint32_t *a, int64_t a_stride,
                               const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                               int accumulate, const uint32_t *b_end) {
  f32v sums[6][4];
#pragma GCC unroll 6
  for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; j++)
      sums[i][j] = accumulate ? load_f32(c + i * c_stride + j * LANES) : splat(0);
  for (int64_t k = 0; k < depth; k++) {
    u32v row[4];
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; j++) {
      row[j] = load_u32(b + k * b_stride + j * LANES);
      if (j * LANES % 16 == 0) fetch_ahead(b + k * b_stride + j * LANES, b_end);
    }
#pragma GCC unroll 6
    for (int i = 0; i < num_rows; i++) {
      const uint32_t item = a[i * a_stride + k];
#pragma GCC unroll 4
      for (int j = 0; j < num_vectors; j++) sums[i][j] = DOT(sums[i][j], item, row[j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; j++) store_f32(c + i * c_stride + j * LANES, sums[i][j]);
}

/* most_rows: of a tile. */
INLINE void NAME(product_columns)(const int most_rows, const int num_vectors, int64_t num_rows, const uint32_t *a,
                                  int64_t a_stride, const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride,
                                  int64_t depth, int accumulate, const uint32_t *b_end) {
  int64_t i = 0;
#define TILE(n)                                                                                                       \
  for (; n <= most_rows && i + n <= num_rows; i += n)                                                                 \
    NAME(product_tile)(n, num_vectors, a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth,    \
                       accumulate, i ? 0 : b_end)
  TILE(6);
  TILE(5);
  TILE(4);
  TILE(3);
  TILE(2);
  TILE(1);
#undef TILE
}

INLINE void NAME(product_until)(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                                const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                                int accumulate, const uint32_t *b_end) {
  int64_t j = 0;
#ifdef __AVX512F__ /* 24 sums, 4 vectors of b and an item of a: 29 of 32 registers */
  for (; j + 4 * LANES <= num_columns; j += 4 * LANES)
    NAME(product_columns)(6, 4, num_rows, a, a_stride, b + j, b_stride, c + j, c_stride, depth, accumulate, b_end);
#elif defined(__AVX__) /* few rows, as a decode's query heads, with more sums at a time: up to 12, 3 items and a vector */
  for (; num_rows <= 3 && j + 4 * LANES <= num_columns; j += 4 * LANES)
    NAME(product_columns)(3, 4, num_rows, a, a_stride, b + j, b_stride, c + j, c_stride, depth, accumulate, b_end);
#endif /* 12 sums, 2 and 1: 15 of 16 */
  for (; j + 2 * LANES <= num_columns; j += 2 * LANES)
    NAME(product_columns)(6, 2, num_rows, a, a_stride, b + j, b_stride, c + j, c_stride, depth, accumulate, b_end);
  for (; j < num_columns; j += LANES)
    NAME(product_columns)(6, 1, num_rows, a, a_stride, b + j, b_stride, c + j, c_stride, depth, accumulate, b_end);
}

static void NAME(product)(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                          const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                          int accumulate) {
  NAME(product_until)(num_rows, num_columns, a, a_stride, b, b_stride, c, c_stride, depth, accumulate, 0);
}

/* The same, fetching b. */
static void NAME(fetching_product)(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                                   const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                                   int accumulate, const uint32_t *b_end) {
  NAME(product_until)(num_rows, num_columns, a, a_stride, b, b_stride, c, c_stride, depth, accumulate, b_end);
}
