/* y = x W^T + b over a weight in strips (quantised.h), and rows of such a weight, for one type T. x may be what rows.h
 * makes of its argument: it is in eight bits before it was ever stored, with the same results.
 */

/* Several tiles use a task's strips in turn: these and a tile of x fit into the first-level cache. For a single tile
 * each thread reads long stretches of memory. */
#define STRIPS_BYTES 24576
#define QUANTISED_ROWS 64  /* of a task; a multiple of the largest tile */

typedef struct {
  const void *x; /* of T; float32 if it is added to the residual; 0 if nothing is */
  const T *bias;
  const uint8_t *strips;
  x_block_t *blocks; /* x in eight bits, tile after tile, each [blocks, rows] */
  void *out;
  int64_t num_rows, num_inputs, num_columns, strips_per_task;
  int format, kind; /* kind: SUMS_… of linear.h */
  const T *norm; /* 0, or x is the norm of x + residual by these weights [num_inputs] */
  float *residual;
  float eps;
  int is_gated; /* x is [num_rows, 2 * num_inputs], gate and up */
} NAME(quantised_args);

static void NAME(quantise_task)(void *data, long task) {
  const NAME(quantised_args) *a = data;
  const int64_t size = a->num_inputs, num_blocks = size / BLOCK, first = task * TILE_ROWS;
  const int64_t rows = tile_rows(first, a->num_rows);
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
      f32v x[BLOCK / LANES];
      for (int v = 0; v < BLOCK / LANES; v++) x[v] = LOAD(of + block * BLOCK + v * LANES);
      quantise_block(x, a->blocks + first * num_blocks + block * rows + i, ZERO(a->format), HAS_LOW(a->format),
                     PARTS(a->format));
    }
  }
}

static int64_t NAME(quantised_end)(const NAME(quantised_args) *a, int64_t row) {
  return a->num_rows - row < QUANTISED_ROWS ? a->num_rows : row + QUANTISED_ROWS;
}

static void NAME(quantised_task)(void *data, long task) {
  const NAME(quantised_args) *a = data;
  const int64_t num_strips = (a->num_columns + LANES - 1) / LANES, bytes = strip_bytes(a->format, a->num_inputs);
  const int64_t num_groups = (num_strips + a->strips_per_task - 1) / a->strips_per_task;
  const int64_t row = task / num_groups * QUANTISED_ROWS, end = NAME(quantised_end)(a, row);
  const int64_t first = task % num_groups * a->strips_per_task;
  const int64_t last = num_strips - first < a->strips_per_task ? num_strips : first + a->strips_per_task;
  for (int64_t tile = row; tile < end; tile += TILE_ROWS) {
    const int64_t rows = tile_rows(tile, end);
    for (int64_t strip = first; strip < last; strip++) {
      const int64_t column = strip * LANES, left = a->num_columns - column;
      float sums[TILE_ROWS * LANES] __attribute__((aligned(64)));
      quantised_product(a->format, (int)rows, a->blocks + tile * (a->num_inputs / BLOCK), a->strips + strip * bytes,
                        sums, a->num_inputs);
      for (int64_t i = 0; i < rows; i++)
        NAME(store_sums)(NAME(sums_at)(a->out, (tile + i) * a->num_columns + column, a->kind), sums + i * LANES,
                         a->bias ? a->bias + column : 0, left < LANES ? left : LANES, a->kind);
    }
  }
}

/* out [num_rows, num_columns], of a `kind` of linear.h; x: [num_rows, num_inputs]; bias: [num_columns] or 0;
 * room: [num_rows, num_inputs / 32] x_block_t. */
void NAME(quantised_linear)(const void *x, const uint8_t *strips, const T *bias, void *out, x_block_t *room, int format,
                            int64_t num_rows, int64_t num_inputs, int64_t num_columns, int kind, const T *norm,
                            float *residual, float eps, int is_gated, int num_threads) {
  const int64_t num_chunks = (num_rows + QUANTISED_ROWS - 1) / QUANTISED_ROWS;
  const int64_t num_strips = (num_columns + LANES - 1) / LANES, fitting = STRIPS_BYTES / strip_bytes(format, num_inputs);
  const int64_t share = (num_strips + 2 * num_threads - 1) / (2 * num_threads);
  const int64_t strips_per_task = num_rows <= TILE_ROWS ? share : fitting > 1 ? fitting : 1;
  NAME(quantised_args) args = {x, bias, strips, room, out, num_rows, num_inputs, num_columns, strips_per_task, format,
                               kind, norm, residual, eps, is_gated};
  run_tasks(NAME(quantise_task), &args, (num_rows + TILE_ROWS - 1) / TILE_ROWS, num_threads);
  run_tasks(NAME(quantised_task), &args, num_chunks * ((num_strips + strips_per_task - 1) / strips_per_task),
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
