/* y = x W^T + b over a weight in strips (quantised.h), and rows of such a weight, for one type T. x may be what rows.h
 * makes of its argument: it is in eight bits before it was ever stored, with the same results.
 */

#define STRIPS_BYTES 24576 /* that tiles use in turn: these and a tile of x fit into the first-level cache */
#define QUANTISED_ROWS 64  /* of a task without tiles, and the most whose task has a long stretch of strips */

_Static_assert(QUANTISED_ROWS % TILE_ROWS == 0 && QUANTISED_ROWS <= TILED_ROWS, "its rows fit either way");

typedef struct {
  const void *x; /* of T; float32 if it is added to the residual; 0 if nothing is */
  const T *bias;
  const uint8_t *strips;
  x_block_t *blocks; /* x in eight bits, tile after tile, each [blocks, rows] */
  x_tile_t *tiles;   /* 0, or the same memory, for products by tiles: [num_rows / 16, blocks] */
  void *out;
  int64_t num_rows, num_inputs, num_columns, strips_per_task, strips_together, rows_per_task;
  int format, kind; /* kind: SUMS_… of linear.h */
  const T *norm; /* 0, or x is the norm of x + residual by these weights [num_inputs] */
  float *residual;
  float eps;
  int is_gated; /* x is [num_rows, 2 * num_inputs], gate and up */
} NAME(quantised_args);

/* The rows of a tile, since all of its scales are in one line of the cache; of those that only fill it up nothing but
 * scales, which are 0. */
static void NAME(quantise_task)(void *data, long task) {
  const NAME(quantised_args) *a = data;
  const int64_t most = a->tiles ? AMX_ROWS : TILE_ROWS, size = a->num_inputs, num_blocks = size / BLOCK;
  const int64_t first = task * most, rows = part_size(first, a->num_rows, most);
  x_tile_t *tiles = a->tiles ? a->tiles + task * num_blocks : 0;
  T made[size];
  for (int64_t i = 0; i < rows; i++) {
    const int64_t row = first + i;
    const T *of = (const T *)a->x + row * size * (a->is_gated ? 2 : 1);
    if (a->norm) {
      NAME(add_norm_row)(row_of(a->x, row, size), a->residual + row * size, a->norm, made, size, a->eps);
      of = made;
    }
    if (a->is_gated) NAME(silu_row)(of, made, size), of = made;
    for (int64_t block = 0; block < num_blocks; block++) {
      x_block_t *alone = a->blocks + first * num_blocks + block * rows + i;
      offset_t of_tile[2], *offset = tiles ? of_tile : alone->offset;
      int8_t *codes = tiles ? tiles[block].codes[i] : (int8_t *)alone->codes;
      float *scale = tiles ? tiles[block].scales + i : &alone->scale;
      f32v x[BLOCK / LANES];
      for (int v = 0; v < BLOCK / LANES; v++) x[v] = LOAD(of + block * BLOCK + v * LANES);
      quantise_block(x, codes, scale, offset, ZERO(a->format), HAS_LOW(a->format), PARTS(a->format));
      if (tiles) tiles[block].lows[i] = HAS_LOW(a->format) ? offset[0].real : 0;
    }
  }
  for (int64_t i = rows; tiles && i < most; i++)
    for (int64_t block = 0; block < num_blocks; block++) tiles[block].scales[i] = tiles[block].lows[i] = 0;
}

/* sums: [num_rows, num_columns], `stride` apart, of the columns from `column` on. */
static void NAME(store_rows)(const NAME(quantised_args) *a, int64_t row, int64_t num_rows, int64_t column,
                             int64_t num_columns, const float *sums, int64_t stride) {
  const int64_t num_bytes = num_columns * (a->kind == SUMS_ROUNDED ? sizeof(T) : sizeof(float));
  for (int64_t i = 0; i < num_rows; i++) {
    void *out = NAME(sums_at)(a->out, (row + i) * a->num_columns + column, a->kind);
    if (i + ROWS_AHEAD < num_rows) fetch_to_write(NAME(sums_at)(out, ROWS_AHEAD * a->num_columns, a->kind), num_bytes);
    NAME(store_sums)(out, sums + i * stride, a->bias ? a->bias + column : 0, num_columns, a->kind);
  }
}

static void NAME(quantised_task)(void *data, long task) {
  const NAME(quantised_args) *a = data;
  const int64_t num_strips = ceil_div(a->num_columns, LANES), bytes = strip_bytes(a->format, a->num_inputs);
  const int64_t num_groups = ceil_div(num_strips, a->strips_per_task);
  const int64_t row = task / num_groups * a->rows_per_task, num_rows = part_size(row, a->num_rows, a->rows_per_task);
  const int64_t first = task % num_groups * a->strips_per_task;
  const int64_t last = first + part_size(first, num_strips, a->strips_per_task);
#ifdef HAS_AMX
  if (a->tiles) {
    float sums[TILED_ROWS * TILED_COLUMNS] __attribute__((aligned(64)));
    const x_tile_t *x = a->tiles + row / AMX_ROWS * (a->num_inputs / BLOCK);
    const uint8_t *end = a->strips + last * bytes;
    for (int64_t group = first; group < last; group += TILED_STRIPS) {
      const int64_t column = group * LANES, width = part_size(group, last, TILED_STRIPS) * LANES;
      for (int64_t strip = group; strip < group + width / LANES; strip++)
        tiled_product(a->format, num_rows, x, a->strips + strip * bytes, end, sums + (strip - group) * LANES,
                      a->num_inputs);
      release_tiles();
      NAME(store_rows)(a, row, num_rows, column, part_size(column, a->num_columns, width), sums, TILED_COLUMNS);
    }
    return;
  }
#endif
  float sums[TILE_ROWS * LANES] __attribute__((aligned(64)));
  for (int64_t group = first; group < last; group += a->strips_together)
    for (int64_t begin = row; begin < row + num_rows; begin += TILE_ROWS) {
      const int64_t rows = part_size(begin, row + num_rows, TILE_ROWS);
      const x_block_t *x = a->blocks + begin * (a->num_inputs / BLOCK);
      const int is_far_ahead = rows == 1 && CODE_BITS(a->format) == 8 && !HAS_TILES; /* it only reads; Intel's is not */
      const uint8_t *end = begin == row && !is_far_ahead ? a->strips + last * bytes : 0;
      for (int64_t strip = group; strip < group + part_size(group, last, a->strips_together); strip++) {
        const int64_t column = strip * LANES;
        quantised_product(a->format, (int)rows, x, a->strips + strip * bytes, end, sums, a->num_inputs);
        NAME(store_rows)(a, begin, rows, column, part_size(column, a->num_columns, LANES), sums, LANES);
      }
    }
}

/* out [num_rows, num_columns], of a `kind` of linear.h; x: [num_rows, num_inputs]; bias: [num_columns] or 0;
 * room: [num_rows up to a multiple of 16, num_inputs / 32] x_block_t. */
void NAME(quantised_linear)(const void *x, const uint8_t *strips, const T *bias, void *out, x_block_t *room, int format,
                            int64_t num_rows, int64_t num_inputs, int64_t num_columns, int kind, const T *norm,
                            float *residual, float eps, int is_gated, int num_threads) {
  const int64_t num_strips = ceil_div(num_columns, LANES), fitting = STRIPS_BYTES / strip_bytes(format, num_inputs);
  const int64_t together = fitting > 1 ? fitting : 1;
  const int is_tiled = HAS_TILES && num_rows >= LEAST_TILED;
  int64_t rows_per_task = QUANTISED_ROWS;
  int64_t strips_per_task = num_rows <= rows_per_task ? stretch_of(num_strips, num_threads) : together;
  if (is_tiled && num_rows > rows_per_task) {
    const int64_t num_groups = ceil_div(num_strips, TILED_STRIPS);
    const int64_t row_bytes = num_inputs / BLOCK * sizeof(x_tile_t) / AMX_ROWS;
    rows_per_task = rows_of_tasks(num_rows, row_bytes, num_groups, TILED_ROWS, LEAST_TILED, num_threads);
    strips_per_task = num_groups * ceil_div(num_rows, rows_per_task) < 2 * num_threads ? 1 : TILED_STRIPS;
  }
  NAME(quantised_args) args = {x, bias, strips, room, is_tiled ? (x_tile_t *)room : 0, out, num_rows, num_inputs,
                               num_columns, strips_per_task, together, rows_per_task, format, kind, norm, residual, eps,
                               is_gated};
  run_tasks(NAME(quantise_task), &args, ceil_div(num_rows, is_tiled ? AMX_ROWS : TILE_ROWS), num_threads);
  run_tasks(NAME(quantised_task), &args, ceil_div(num_rows, rows_per_task) * ceil_div(num_strips, strips_per_task),
            num_threads);
}

/* out [num_rows, num_inputs]: the weights of the columns `indices` [num_rows], as an embedding looks them up. */
void NAME(quantised_lookup)(const uint8_t *strips, const int64_t *indices, T *out, int format, int64_t num_rows,
                            int64_t num_inputs) {
  float row[num_inputs];
  for (int64_t i = 0; i < num_rows; i++) {
    const uint8_t *strip = strips + indices[i] / LANES * strip_bytes(format, num_inputs);
    quantised_column(format, strip, (int)(indices[i] % LANES), row, num_inputs);
    for (int64_t k = 0; k < num_inputs; k++) out[i * num_inputs + k] = FROM_FLOAT(row[k]);
  }
}
