/* Row-wise operations of a layer between its matrix products, for one type T. */

typedef struct {
  const T *x, *weight;
  float *residual;    /* instead of x, or 0 */
  const float *added; /* [num_rows, size], to be added to the residual; or 0 */
  T *out;
  int64_t num_rows, size, x_stride;
  float eps;
} NAME(norm_args);

static float NAME(norm_scale)(f32v squares, float tail, int64_t size, float eps) {
  return 1.0f / sqrtf((sum_of(squares) + tail) / (float)size + eps);
}

/* out [size] = norm(x) * weight. */
static void NAME(norm_row)(const T *x, const T *weight, T *out, int64_t size, float eps) {
  f32v squares = splat(0);
  float tail = 0;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares += LOAD(x + i) * LOAD(x + i);
  for (; i < size; i++) tail += TO_FLOAT(x[i]) * TO_FLOAT(x[i]);
  const float scale = NAME(norm_scale)(squares, tail, size, eps);
  for (i = 0; i + LANES <= size; i += LANES) STORE(out + i, LOAD(x + i) * scale * LOAD(weight + i));
  for (; i < size; i++) out[i] = FROM_FLOAT(TO_FLOAT(x[i]) * scale * TO_FLOAT(weight[i]));
}

/* out [size] = norm(x + residual) * weight; residual is overwritten with the sum. Neither is ever rounded to T. x may be
 * 0: nothing is added. */
static void NAME(add_norm_row)(const float *x, float *residual, const T *weight, T *out, int64_t size, float eps) {
  f32v squares = splat(0);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    f32v sum = load_f32(residual + i);
    if (x) store_f32(residual + i, sum = load_f32(x + i) + sum);
    squares += sum * sum;
  }
  const int64_t whole = i;
  for (; x && i < size; i++) residual[i] += x[i];
  const float tail = whole < size ? sum_of_squares(residual + whole, size - whole) : 0;
  const float scale = NAME(norm_scale)(squares, tail, size, eps);
  for (i = 0; i + LANES <= size; i += LANES) STORE(out + i, load_f32(residual + i) * scale * LOAD(weight + i));
  for (; i < size; i++) out[i] = FROM_FLOAT(residual[i] * scale * TO_FLOAT(weight[i]));
}

static void NAME(norm_task)(void *data, long task) {
  const NAME(norm_args) *a = data;
  for (int64_t row = first_row(task), end = end_row(task, a->num_rows); row < end; row++)
    if (a->residual)
      NAME(add_norm_row)(row_of(a->added, row, a->size), a->residual + row * a->size, a->weight,
                         a->out + row * a->size, a->size, a->eps);
    else
      NAME(norm_row)(a->x + row * a->x_stride, a->weight, a->out + row * a->size, a->size, a->eps);
}

/* out [num_rows, size] = norm(x) * weight; x may have a row stride. */
void NAME(rms_norm)(const T *x, const T *weight, T *out, int64_t num_rows, int64_t size, int64_t x_stride, float eps,
                    int num_threads) {
  NAME(norm_args) args = {x, weight, 0, 0, out, num_rows, size, x_stride, eps};
  run_tasks(NAME(norm_task), &args, num_row_tasks(num_rows), num_threads);
}

/* out [num_rows, size] = norm(x + residual) * weight; residual is overwritten with x + residual. x may be 0. */
void NAME(add_rms_norm)(const float *x, float *residual, const T *weight, T *out, int64_t num_rows, int64_t size,
                        float eps, int num_threads) {
  NAME(norm_args) args = {0, weight, residual, x, out, num_rows, size, 0, eps};
  run_tasks(NAME(norm_task), &args, num_row_tasks(num_rows), num_threads);
}

typedef struct {
  const T *gate_up;
  T *out;
  int64_t num_rows, size;
} NAME(silu_args);

/* out [size] = silu(gate) * up; gate: [2 * size], up behind it. */
static void NAME(silu_row)(const T *gate, T *out, int64_t size) {
  const T *up = gate + size;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    f32v g = LOAD(gate + i);
    STORE(out + i, g / (1.0f + exp_f32(-g)) * LOAD(up + i));
  }
  for (; i < size; i++) {
    float g = TO_FLOAT(gate[i]);
    out[i] = FROM_FLOAT(g / (1.0f + expf(-g)) * TO_FLOAT(up[i]));
  }
}

static void NAME(silu_task)(void *data, long task) {
  const NAME(silu_args) *a = data;
  for (int64_t row = first_row(task), end = end_row(task, a->num_rows); row < end; row++)
    NAME(silu_row)(a->gate_up + row * 2 * a->size, a->out + row * a->size, a->size);
}

/* out [num_rows, size] = silu(gate) * up; gate_up: [num_rows, 2 * size]. */
void NAME(silu_mul)(const T *gate_up, T *out, int64_t num_rows, int64_t size, int num_threads) {
  NAME(silu_args) args = {gate_up, out, num_rows, size};
  run_tasks(NAME(silu_task), &args, num_row_tasks(num_rows), num_threads);
}

typedef struct {
  T *x;
  const T *cos, *sin;
  const int64_t *positions;
  int64_t num_rows, num_heads, head_dim, x_stride, table_stride;
} NAME(rotate_args);

static void NAME(rotate_task)(void *data, long task) {
  const NAME(rotate_args) *a = data;
  const int64_t half = a->head_dim / 2;
  for (int64_t row = first_row(task), end = end_row(task, a->num_rows); row < end; row++) {
    const T *cos = a->cos + a->positions[row] * a->table_stride, *sin = a->sin + a->positions[row] * a->table_stride;
    for (int64_t head = 0; head < a->num_heads; head++) {
      T *low = a->x + row * a->x_stride + head * a->head_dim, *high = low + half;
      int64_t i = 0;
      for (; i + LANES <= half; i += LANES) {
        f32v x = LOAD(low + i), y = LOAD(high + i), c = LOAD(cos + i), s = LOAD(sin + i);
        STORE(low + i, x * c - y * s);
        STORE(high + i, y * c + x * s);
      }
      for (; i < half; i++) {
        float x = TO_FLOAT(low[i]), y = TO_FLOAT(high[i]), c = TO_FLOAT(cos[i]), s = TO_FLOAT(sin[i]);
        low[i] = FROM_FLOAT(x * c - y * s);
        high[i] = FROM_FLOAT(y * c + x * s);
      }
    }
  }
}

/* Rotates x [num_rows, num_heads, head_dim] by halves in place; cos, sin: [context, head_dim / 2] by row stride. */
void NAME(rotate)(T *x, const T *cos, const T *sin, const int64_t *positions, int64_t num_rows, int64_t num_heads,
                  int64_t head_dim, int64_t x_stride, int64_t table_stride, int num_threads) {
  NAME(rotate_args) args = {x, cos, sin, positions, num_rows, num_heads, head_dim, x_stride, table_stride};
  run_tasks(NAME(rotate_task), &args, num_row_tasks(num_rows), num_threads);
}
