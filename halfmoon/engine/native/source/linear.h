/* y = x W^T + b over a weight packed for it, for one type T: panels of PANEL columns, as deep as the weight, stored one
 * after the other. A task is a panel and some rows; the panel stays near for all of them.
 */

/* out [num_columns] = sums + bias, which may be 0; out is float32 if `is_wide`, else rounded to T. */
INLINE void NAME(store_sums)(void *out, const float *sums, const T *bias, int64_t num_columns, int is_wide) {
  T *rounded = out;
  float *wide = out;
  int64_t j = 0;
  for (; j + LANES <= num_columns; j += LANES) {
    const f32v sum = bias ? load_f32(sums + j) + LOAD(bias + j) : load_f32(sums + j);
    if (is_wide)
      store_f32(wide + j, sum);
    else
      STORE(rounded + j, sum);
  }
  for (; j < num_columns; j++) {
    const float sum = bias ? sums[j] + TO_FLOAT(bias[j]) : sums[j];
    if (is_wide)
      wide[j] = sum;
    else
      rounded[j] = FROM_FLOAT(sum);
  }
}

/* Where a row of `store_sums` begins. */
INLINE void *NAME(sums_at)(void *out, int64_t index, int is_wide) {
  return is_wide ? (void *)((float *)out + index) : (void *)((T *)out + index);
}

typedef struct {
  const T *x, *bias;
  const uint32_t *packed;
  void *out;
  int64_t num_rows, depth, num_columns, num_panels, rows_per_task, part; /* part: of the depth, multiplied at a time */
  int is_wide;
} NAME(linear_args);

static void NAME(linear_task)(void *data, long task) {
  const NAME(linear_args) *a = data;
  const int64_t column = task % a->num_panels * PANEL, row = task / a->num_panels * a->rows_per_task;
  const int64_t num_rows = a->num_rows - row < a->rows_per_task ? a->num_rows - row : a->rows_per_task;
  const uint32_t *x = (const uint32_t *)(a->x) + row * a->depth, *panel = a->packed + column * a->depth;
  float sums[LINEAR_ROWS * PANEL] __attribute__((aligned(64)));
  for (int64_t k = 0; k < a->depth; k += a->part)
    LINEAR_PRODUCT(num_rows, PANEL, x + k, a->depth, panel + k * PANEL, PANEL, sums, PANEL,
                   a->depth - k < a->part ? a->depth - k : a->part, k > 0);
  const int64_t num_columns = a->num_columns - column < PANEL ? a->num_columns - column : PANEL;
  for (int64_t i = 0; i < num_rows; i++)
    NAME(store_sums)(NAME(sums_at)(a->out, (row + i) * a->num_columns + column, a->is_wide), sums + i * PANEL,
                     a->bias ? a->bias + column : 0, num_columns, a->is_wide);
}

/* The width in which `pack_linear` stores columns. */
int64_t NAME(panel_columns)(void) { return PANEL; }

/* weight [num_columns, depth] items -> packed [num_panels, depth, PANEL], zero beyond the last column. */
void NAME(pack_linear)(const uint32_t *weight, uint32_t *packed, int64_t num_columns, int64_t depth) {
  for (int64_t column = 0; column < num_columns; column += PANEL)
    for (int64_t k = 0; k < depth; k++)
      for (int64_t j = 0; j < PANEL; j++)
        packed[column * depth + k * PANEL + j] = column + j < num_columns ? weight[(column + j) * depth + k] : 0;
}

/* out [num_rows, num_columns], float32 if `is_wide`; x: [num_rows, depth] items; bias: [num_columns] or 0. */
void NAME(linear)(const T *x, const uint32_t *packed, const T *bias, void *out, int64_t num_rows, int64_t depth,
                  int64_t num_columns, int is_wide, int num_threads) {
  const int64_t num_panels = (num_columns + PANEL - 1) / PANEL, num_parts = (depth + LINEAR_DEPTH - 1) / LINEAR_DEPTH;
  const int64_t part = ((depth + num_parts - 1) / num_parts + 15) / 16 * 16;
  int64_t rows = LINEAR_ROWS;
  while (num_panels * ((num_rows + rows - 1) / rows) < TASKS_PER_THREAD * num_threads && rows >= 2 * LEAST_ROWS) rows /= 2;
  NAME(linear_args) args = {x, bias, packed, out, num_rows, depth, num_columns, num_panels, rows, part, is_wide};
  run_tasks(NAME(linear_task), &args, num_panels * ((num_rows + rows - 1) / rows), num_threads);
}
