/* y = x W^T + b over a weight packed for it, for one type T: panels of PANEL columns, as deep as the weight, stored one
 * after the other. A task is a panel and some rows; the panel stays near for all of them.
 */

typedef struct {
  const T *x, *bias;
  const uint32_t *packed;
  T *out;
  int64_t num_rows, depth, num_columns, num_panels, rows_per_task, part; /* part: of the depth, multiplied at a time */
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
  for (int64_t i = 0; i < num_rows; i++) {
    T *out = a->out + (row + i) * a->num_columns + column;
    float *of = sums + i * PANEL;
    int64_t j = 0;
    for (; j + LANES <= num_columns; j += LANES)
      STORE(out + j, a->bias ? load_f32(of + j) + LOAD(a->bias + column + j) : load_f32(of + j));
    for (; j < num_columns; j++) out[j] = FROM_FLOAT(a->bias ? of[j] + TO_FLOAT(a->bias[column + j]) : of[j]);
  }
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

/* out [num_rows, num_columns]; x: [num_rows, depth] items; bias: [num_columns] or 0. */
void NAME(linear)(const T *x, const uint32_t *packed, const T *bias, T *out, int64_t num_rows, int64_t depth,
                  int64_t num_columns, int num_threads) {
  const int64_t num_panels = (num_columns + PANEL - 1) / PANEL, num_parts = (depth + LINEAR_DEPTH - 1) / LINEAR_DEPTH;
  const int64_t part = ((depth + num_parts - 1) / num_parts + 15) / 16 * 16;
  int64_t rows = LINEAR_ROWS;
  while (num_panels * ((num_rows + rows - 1) / rows) < TASKS_PER_THREAD * num_threads && rows >= 2 * LEAST_ROWS) rows /= 2;
  NAME(linear_args) args = {x, bias, packed, out, num_rows, depth, num_columns, num_panels, rows, part};
  run_tasks(NAME(linear_task), &args, num_panels * ((num_rows + rows - 1) / rows), num_threads);
}
