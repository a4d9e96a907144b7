/* `product` over pairs of bfloat16 with tiles: their order is the one in which items lie anyway.
 *
 * A sum adds the products of 16 items at a time, from the first one on, so a row's bits do not depend on the others.
 */

typedef struct {
  const uint32_t *a, *b;
  int64_t a_stride, b_stride, num_steps; /* of 16 items */
  const uint32_t *b_end; /* as in product.h */
} amx_operands_t;

/* What a later step multiplies, as it begins: tiles are loaded row by row, and a processor foresees few of them. */
INLINE void amx_fetch(const int num_columns, const amx_operands_t *o, int64_t step) {
  if (!o->b_end) return;
  const uint32_t *b = o->b + step * AMX_ROWS * o->b_stride;
#pragma GCC unroll 16
  for (int i = 0; i < AMX_ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < num_columns; j++) fetch_ahead(b + i * o->b_stride + j * AMX_ITEMS, o->b_end);
}

/* 17 to 32 rows by 16 or 32 columns, of which b stays near: sums in tiles 0 to 3, a in 4 and 5, b in 6 and 7. A tile is
 * loaded anew as soon as its last product is begun. */
INLINE void amx_squares(const int num_columns, const amx_operands_t *o) {
  if (o->num_steps == 0) return;
  AMX_STREAM(4, o->a, o->a_stride * 4);
  AMX_LOAD(6, o->b, o->b_stride * 4);
  if (num_columns > 1) AMX_LOAD(7, o->b + AMX_ITEMS, o->b_stride * 4);
  AMX_STREAM(5, o->a + AMX_ROWS * o->a_stride, o->a_stride * 4);
  for (int64_t k = 1; k < o->num_steps; k++) {
    const uint32_t *a = o->a + k * AMX_ITEMS, *b = o->b + k * AMX_ROWS * o->b_stride;
    amx_fetch(num_columns, o, k);
    AMX_DOT(0, 4, 6);
    if (num_columns > 1) AMX_DOT(1, 4, 7);
    AMX_STREAM(4, a, o->a_stride * 4);
    AMX_DOT(2, 5, 6);
    AMX_LOAD(6, b, o->b_stride * 4);
    if (num_columns > 1) {
      AMX_DOT(3, 5, 7);
      AMX_LOAD(7, b + AMX_ITEMS, o->b_stride * 4);
    }
    AMX_STREAM(5, a + AMX_ROWS * o->a_stride, o->a_stride * 4);
  }
  AMX_DOT(0, 4, 6);
  if (num_columns > 1) AMX_DOT(1, 4, 7);
  AMX_DOT(2, 5, 6);
  if (num_columns > 1) AMX_DOT(3, 5, 7);
}

/* At most 16 rows by 16 to 64 columns, so that a weight is read once from front to back. */
INLINE void amx_strip(const int num_columns, const amx_operands_t *o) {
  for (int64_t k = 0; k < o->num_steps; k++) {
    const uint32_t *b = o->b + k * AMX_ROWS * o->b_stride;
    amx_fetch(num_columns, o, k);
    AMX_LOAD(4, o->a + k * AMX_ITEMS, o->a_stride * 4);
    AMX_LOAD(6, b, o->b_stride * 4);
    AMX_DOT(0, 4, 6);
    if (num_columns > 1) {
      AMX_LOAD(7, b + AMX_ITEMS, o->b_stride * 4);
      AMX_DOT(1, 4, 7);
    }
    if (num_columns > 2) {
      AMX_LOAD(6, b + 2 * AMX_ITEMS, o->b_stride * 4);
      AMX_DOT(2, 4, 6);
    }
    if (num_columns > 3) {
      AMX_LOAD(7, b + 3 * AMX_ITEMS, o->b_stride * 4);
      AMX_DOT(3, 4, 7);
    }
  }
}

/* The items of a last step that is not whole, with zeros behind them. */
typedef struct {
  uint32_t a[2 * AMX_ROWS * AMX_ITEMS] __attribute__((aligned(64)));
  uint32_t b[AMX_ROWS * 4 * AMX_ITEMS] __attribute__((aligned(64)));
} amx_tail_t;

static amx_operands_t amx_tail(amx_tail_t *tail, const uint32_t *a, int64_t a_stride, int64_t num_rows,
                               const uint32_t *b, int64_t b_stride, int64_t num_columns, int64_t depth) {
  memset(tail, 0, sizeof *tail);
  for (int64_t i = 0; i < num_rows; i++) memcpy(tail->a + i * AMX_ITEMS, a + i * a_stride, depth * 4);
  for (int64_t k = 0; k < depth; k++) memcpy(tail->b + k * 4 * AMX_ITEMS, b + k * b_stride, num_columns * AMX_ITEMS * 4);
  return (amx_operands_t){tail->a, tail->b, AMX_ITEMS, 4 * AMX_ITEMS, 1, 0};
}

/* c [num_rows, 16 * num_columns] (+)= a * b. IS_SQUARE: sums 2 and 3 are those of rows 16 and up, not of columns. */
INLINE void amx_block(const int is_square, const int num_columns, int64_t num_rows, const uint32_t *a, int64_t a_stride,
                      const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth, int accumulate,
                      const uint32_t *b_end) {
  float *c2 = is_square ? c + AMX_ROWS * c_stride : c + 2 * AMX_ITEMS;
  const int has_1 = num_columns > 1, has_2 = is_square || num_columns > 2, has_3 = is_square ? has_1 : num_columns > 3;
  if (accumulate) {
    AMX_LOAD(0, c, c_stride * 4);
    if (has_1) AMX_LOAD(1, c + AMX_ITEMS, c_stride * 4);
    if (has_2) AMX_LOAD(2, c2, c_stride * 4);
    if (has_3) AMX_LOAD(3, c2 + AMX_ITEMS, c_stride * 4);
  } else {
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
  }
  const int64_t whole = depth / AMX_ITEMS, rest = depth % AMX_ITEMS;
  const amx_operands_t operands = {a, b, a_stride, b_stride, whole, b_end};
  is_square ? amx_squares(num_columns, &operands) : amx_strip(num_columns, &operands);
  if (rest) {
    amx_tail_t room;
    const amx_operands_t tail = amx_tail(&room, a + whole * AMX_ITEMS, a_stride, num_rows,
                                         b + whole * AMX_ROWS * b_stride, b_stride, num_columns, rest);
    is_square ? amx_squares(num_columns, &tail) : amx_strip(num_columns, &tail);
  }
  AMX_STORE(0, c, c_stride * 4);
  if (has_1) AMX_STORE(1, c + AMX_ITEMS, c_stride * 4);
  if (has_2) AMX_STORE(2, c2, c_stride * 4);
  if (has_3) AMX_STORE(3, c2 + AMX_ITEMS, c_stride * 4);
}

/* Sums 2 and 3 and a's second tile have `more` rows, the other sums and a's first tile `rows`. */
static void amx_rows(int64_t rows, int64_t more) {
  const int64_t wanted = rows * (AMX_ROWS + 1) + more;
  if (wanted == tiles_now) return;
  tiles_now = wanted;
  amx_config_t config = {.palette = 1};
  const int64_t of[NUM_AMX_TILES] = {rows, rows, more, more, rows, more, AMX_ROWS, AMX_ROWS};
  for (int i = 0; i < NUM_AMX_TILES; i++) config.rows[i] = (uint8_t)of[i], config.row_bytes[i] = 64;
  AMX_CONFIG(&config);
}

/* Rows by 32 at a time, all of them over two columns of tiles before the next two; `rows`: of a last, smaller square. */
INLINE void amx_all_squares(int64_t num_rows, int64_t rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                            const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                            int accumulate, const uint32_t *b_end) {
  for (int64_t j = 0; j < num_columns; j += 2 * AMX_ITEMS)
    for (int64_t i = 0; i < num_rows; i += rows) {
#define SQUARE(columns)                                                                                             \
  amx_block(1, columns, rows, a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride, depth, \
            accumulate, b_end)
      if (num_columns - j > AMX_ITEMS)
        SQUARE(2);
      else
        SQUARE(1);
#undef SQUARE
    }
}

/* As `fetching_product`; the tiles stay configured until `release_tiles`. */
static void product_amx(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride, const uint32_t *b,
                        int64_t b_stride, float *c, int64_t c_stride, int64_t depth, int accumulate,
                        const uint32_t *b_end) {
  const int64_t whole = num_rows / (2 * AMX_ROWS) * 2 * AMX_ROWS, rows = num_rows - whole;
  if (num_rows > 2 * AMX_ROWS) b_end = 0; /* multiplying takes longer than reading */
  if (whole) {
    amx_rows(AMX_ROWS, AMX_ROWS);
    amx_all_squares(whole, 2 * AMX_ROWS, num_columns, a, a_stride, b, b_stride, c, c_stride, depth, accumulate, b_end);
  }
  a += whole * a_stride, c += whole * c_stride;
  if (rows > AMX_ROWS) {
    amx_rows(AMX_ROWS, rows - AMX_ROWS);
    amx_all_squares(rows, rows, num_columns, a, a_stride, b, b_stride, c, c_stride, depth, accumulate, b_end);
  } else if (rows) {
    amx_rows(rows, rows);
    int64_t j = 0;
#define STRIP(columns)                                                                                 \
  for (; j + columns * AMX_ITEMS <= num_columns; j += columns * AMX_ITEMS)                             \
  amx_block(0, columns, rows, a, a_stride, b + j, b_stride, c + j, c_stride, depth, accumulate, b_end)
    STRIP(4);
    STRIP(2);
    STRIP(1);
#undef STRIP
  }
}

static void fetching_product_fastest(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                                     const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                                     int accumulate, const uint32_t *b_end) {
  (amx_is_permitted ? product_amx : fetching_product_bf16)(num_rows, num_columns, a, a_stride, b, b_stride, c, c_stride,
                                                           depth, accumulate, b_end);
}

static void product_fastest(int64_t num_rows, int64_t num_columns, const uint32_t *a, int64_t a_stride,
                            const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth,
                            int accumulate) {
  fetching_product_fastest(num_rows, num_columns, a, a_stride, b, b_stride, c, c_stride, depth, accumulate, 0);
}
