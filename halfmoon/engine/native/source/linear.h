/* y = x W^T + b over a weight packed for it, for one type T: panels of PANEL columns, as deep as the weight, stored one
 * after the other. A task is some rows and a panel, which stays near for all of them, or several panels for few rows.
 */

/* What becomes of sums. */
#ifndef SUMS_ROUNDED
#define SUMS_ROUNDED 0 /* out is of T */
#define SUMS_WIDE 1    /* out is float32 */
#define SUMS_ADDED 2   /* out is float32, and they are added to what is there */
#endif

/* out [num_columns]: what `kind` makes of sums + bias, which may be 0. */
INLINE void NAME(store_sums)(void *out, const float *sums, const T *bias, int64_t num_columns, const int kind) {
  T *rounded = out;
  float *wide = out;
  int64_t j = 0;
  for (; j + LANES <= num_columns; j += LANES) {
    const f32v sum = bias ? load_f32(sums + j) + LOAD(bias + j) : load_f32(sums + j);
    if (kind == SUMS_ROUNDED)
      STORE(rounded + j, sum);
    else
      store_f32(wide + j, kind == SUMS_ADDED ? sum + load_f32(wide + j) : sum);
  }
  for (; j < num_columns; j++) {
    const float sum = bias ? sums[j] + TO_FLOAT(bias[j]) : sums[j];
    if (kind == SUMS_ROUNDED)
      rounded[j] = FROM_FLOAT(sum);
    else
      wide[j] = kind == SUMS_ADDED ? sum + wide[j] : sum;
  }
}

/* Where a row of `store_sums` begins. */
INLINE void *NAME(sums_at)(void *out, int64_t index, int kind) {
  return kind == SUMS_ROUNDED ? (void *)((T *)out + index) : (void *)((float *)out + index);
}

typedef struct {
  const T *x, *bias;
  const uint32_t *packed;
  void *out;
  int64_t num_rows, depth, num_columns, num_panels, panels_per_task, rows_per_task;
  int64_t part; /* of the depth, multiplied at a time */
  int kind;
  int is_gated; /* out is silu(gate) * up, SUMS_ROUNDED; weight and bias have num_columns of gate, then of up */
} NAME(linear_args);

/* sums [num_rows, PANEL] = x * panel. end: of the panels to be fetched, or 0. */
INLINE void NAME(multiply_panel)(const NAME(linear_args) *a, const uint32_t *x, const uint32_t *panel,
                                 const uint32_t *end, int64_t num_rows, float *sums) {
  for (int64_t k = 0; k < a->depth; k += a->part)
    LINEAR_PRODUCT(num_rows, PANEL, x + k, a->depth, panel + k * PANEL, PANEL, sums, PANEL,
                   part_size(k, a->depth, a->part), k > 0, end);
}

/* out [PANEL] = silu(gate) * up, of sums that are rounded to T first, as if they had been stored. */
static void NAME(store_gated)(T *out, const float *gate, const float *up, const T *gate_bias, const T *up_bias) {
  T gate_up[2 * PANEL] __attribute__((aligned(64)));
  NAME(store_sums)(gate_up, gate, gate_bias, PANEL, SUMS_ROUNDED);
  NAME(store_sums)(gate_up + PANEL, up, up_bias, PANEL, SUMS_ROUNDED);
  NAME(silu_row)(gate_up, out, PANEL);
}

/* Of the rows from `row` on the columns from `column` on; end: the one behind those of this task. */
static void NAME(linear_panel)(const NAME(linear_args) *a, int64_t row, int64_t column, int64_t end) {
  const int64_t num_rows = part_size(row, a->num_rows, a->rows_per_task);
  const uint32_t *x = (const uint32_t *)(a->x) + row * a->depth, *panel = a->packed + column * a->depth;
  const uint32_t *panels_end = num_rows >= FETCHING_ROWS ? a->packed + end * a->depth : 0;
  const T *bias = a->bias ? a->bias + column : 0;
  float sums[LINEAR_ROWS * PANEL] __attribute__((aligned(64))), up[LINEAR_ROWS * PANEL] __attribute__((aligned(64)));
  const int64_t gate = a->num_columns * a->depth; /* of which up lies behind */
  NAME(multiply_panel)(a, x, panel, panels_end, num_rows, sums);
  if (a->is_gated) NAME(multiply_panel)(a, x, panel + gate, panels_end ? panels_end + gate : 0, num_rows, up);
  END_PRODUCTS();
  const int64_t num_columns = part_size(column, a->num_columns, PANEL);
  for (int64_t i = 0; i < num_rows; i++) {
    void *out = NAME(sums_at)(a->out, (row + i) * a->num_columns + column, a->kind);
    if (i + ROWS_AHEAD < num_rows)
      fetch_to_write(NAME(sums_at)(out, ROWS_AHEAD * a->num_columns, a->kind),
                     num_columns * (a->kind == SUMS_ROUNDED ? sizeof(T) : sizeof(float)));
    if (a->is_gated)
      NAME(store_gated)(out, sums + i * PANEL, up + i * PANEL, bias, bias ? bias + a->num_columns : 0);
    else
      NAME(store_sums)(out, sums + i * PANEL, bias, num_columns, a->kind);
  }
}

static void NAME(linear_task)(void *data, long task) {
  const NAME(linear_args) *a = data;
  const int64_t num_groups = ceil_div(a->num_panels, a->panels_per_task), first = task % num_groups * a->panels_per_task;
  const int64_t end = first + part_size(first, a->num_panels, a->panels_per_task);
  for (int64_t panel = first; panel < end; panel++)
    NAME(linear_panel)(a, task / num_groups * a->rows_per_task, panel * PANEL, end * PANEL);
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

/* Whether `linear` can have is_gated without threads that wait for the others: a task is twice as long. */
INLINE int NAME(can_gate)(int64_t num_rows, int64_t num_columns, int num_threads) {
  const int64_t num_tasks = num_columns / PANEL * ceil_div(num_rows, LEAST_ROWS);
  return num_columns % PANEL == 0 && num_tasks >= TASKS_PER_THREAD * num_threads;
}

/* out [num_rows, num_columns], of which `kind` and `is_gated` say what it is; x: [num_rows, depth] items; bias:
 * [num_columns, twice as many if gated] or 0. */
void NAME(linear)(const T *x, const uint32_t *packed, const T *bias, void *out, int64_t num_rows, int64_t depth,
                  int64_t num_columns, int kind, int is_gated, int num_threads) {
  const int64_t num_panels = ceil_div(num_columns, PANEL), num_parts = ceil_div(depth, LINEAR_DEPTH);
  const int64_t part = ceil_div(ceil_div(depth, num_parts), 16) * 16;
  const int64_t rows = rows_of_tasks(num_rows, depth * 4, num_panels, LINEAR_ROWS, LEAST_ROWS, num_threads);
  const int64_t panels = num_rows <= LEAST_ROWS ? stretch_of(num_panels, num_threads) : 1;
  NAME(linear_args) args = {x, bias, packed, out, num_rows, depth, num_columns, num_panels, panels, rows, part, kind,
                            is_gated};
  run_tasks(NAME(linear_task), &args, ceil_div(num_panels, panels) * ceil_div(num_rows, rows), num_threads);
}
