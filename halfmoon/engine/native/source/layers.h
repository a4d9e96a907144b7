/* All layers of a Llama in one call, for one type T: what rows.h, linear.h and attention.h compute, in the order of
 * ../../models/llama.py, with the same results.
 */

#ifndef LAYER_TYPES
#define LAYER_TYPES

typedef struct {
  const void *packed, *bias; /* bias: [num_columns] or 0 */
  int64_t num_inputs, num_columns;
  int64_t format; /* of quantised.h; below 0: numbers, as linear.h packs them */
} matrix_t;

typedef struct {
  const void *input_norm, *mlp_norm;
  const void *q_norm, *k_norm; /* of each head, or 0 */
  matrix_t qkv, output, gate_up, down;
} layer_t;

typedef struct {
  float *residual;                  /* [num_tokens, hidden_size] */
  void *normed, *heads, *attended;  /* room: [num_tokens, hidden_size; q, k and v heads; q heads] */
  void *gate_up, *gated;            /* room: [num_tokens, 2 * inner; inner] */
  x_block_t *blocks;                /* room for the widest x in eight bits */
  const void *cos, *sin;
  const int64_t *positions, *slots;
  const segment_t *segments;
  const run_t *runs;
  const task_t *tasks;
  float *partials;
  atomic_long *done;
  uint8_t *kv;
  int64_t kv_layer_bytes, kv_values_bytes, kv_head_bytes;
  int64_t num_layers, num_tokens, num_tasks, num_heads, num_kv_heads, head_dim, hidden_size, table_stride;
  float eps, scale;
  int codes, num_threads; /* codes: what rows of KV are (codes.h) */
  /* Called before layer i attends where calls[i] has bit 1, and after it where it has bit 2. Ends the step if it returns
     anything but 0. */
  int (*between)(int64_t layer, int is_stored);
  const uint8_t *calls; /* [num_layers], or 0: nothing is called */
  const volatile int *asked; /* or 0. While it is not 0, every layer calls before it attends */
} layers_step_t;
#endif

typedef struct {
  T *heads;
  const T *q_norm, *k_norm;
  int64_t num_rows, num_heads, num_kv_heads, head_dim, stride;
  float eps;
} NAME(head_norm_args);

static void NAME(head_norm_task)(void *data, long task) {
  const NAME(head_norm_args) *a = data;
  for (int64_t row = first_row(task), end = end_row(task, a->num_rows); row < end; row++)
    for (int64_t head = 0; head < a->num_heads + a->num_kv_heads; head++) {
      T *x = a->heads + row * a->stride + head * a->head_dim;
      NAME(norm_row)(x, head < a->num_heads ? a->q_norm : a->k_norm, x, a->head_dim, a->eps);
    }
}

static void NAME(multiply)(const layers_step_t *s, const matrix_t *m, const T *x, void *out, int kind) {
  if (m->format >= 0)
    NAME(quantised_linear)(x, m->packed, m->bias, out, s->blocks, (int)m->format, s->num_tokens, m->num_inputs,
                           m->num_columns, kind, 0, 0, 0, 0, s->num_threads);
  else
    NAME(linear)(x, m->packed, m->bias, out, s->num_tokens, m->num_inputs * (int64_t)sizeof(T) / 4, m->num_columns,
                 kind, 0, s->num_threads);
}

/* s->normed = the norm of the residual. */
static void NAME(norm_residual)(const layers_step_t *s, const T *norm) {
  NAME(add_rms_norm)(0, s->residual, norm, s->normed, s->num_tokens, s->hidden_size, s->eps, s->num_threads);
}

/* out = the product with the norm of the residual. */
static void NAME(multiply_normed)(const layers_step_t *s, const matrix_t *m, const T *norm, T *out) {
  if (m->format >= 0) {
    NAME(quantised_linear)(0, m->packed, m->bias, out, s->blocks, (int)m->format, s->num_tokens, m->num_inputs,
                           m->num_columns, SUMS_ROUNDED, norm, s->residual, s->eps, 0, s->num_threads);
    return;
  }
  NAME(norm_residual)(s, norm);
  NAME(multiply)(s, m, s->normed, out, SUMS_ROUNDED);
}

/* The perceptron, added to the residual. silu(gate) * up is made where gate_up's sums are, or where down takes it into
 * eight bits, or between the two. */
static void NAME(add_perceptron)(const layers_step_t *s, const layer_t *layer) {
  const matrix_t *m = &layer->gate_up, *down = &layer->down;
  const int64_t inner = down->num_inputs;
  if (m->format < 0 && NAME(can_gate)(s->num_tokens, inner, s->num_threads)) {
    NAME(norm_residual)(s, layer->mlp_norm);
    NAME(linear)(s->normed, m->packed, m->bias, s->gated, s->num_tokens, m->num_inputs * (int64_t)sizeof(T) / 4, inner,
                 SUMS_ROUNDED, 1, s->num_threads);
    NAME(multiply)(s, down, s->gated, s->residual, SUMS_ADDED);
    return;
  }
  NAME(multiply_normed)(s, m, layer->mlp_norm, s->gate_up);
  if (down->format >= 0) {
    NAME(quantised_linear)(s->gate_up, down->packed, down->bias, s->residual, s->blocks, (int)down->format,
                           s->num_tokens, inner, down->num_columns, SUMS_ADDED, 0, 0, 0, 1, s->num_threads);
    return;
  }
  NAME(silu_mul)(s->gate_up, s->gated, s->num_tokens, inner, s->num_threads);
  NAME(multiply)(s, down, s->gated, s->residual, SUMS_ADDED);
}

void NAME(run_layers)(const layer_t *layers, const layers_step_t *s) {
  T *heads = s->heads;
  const int64_t stride = (s->num_heads + 2 * s->num_kv_heads) * s->head_dim;
  T *k = heads + s->num_heads * s->head_dim, *v = k + s->num_kv_heads * s->head_dim;
  for (int64_t i = 0; i < s->num_layers; i++) {
    const layer_t *layer = layers + i;
    NAME(multiply_normed)(s, &layer->qkv, layer->input_norm, heads);
    if (layer->q_norm) {
      NAME(head_norm_args) args = {heads, layer->q_norm, layer->k_norm, s->num_tokens, s->num_heads, s->num_kv_heads,
                                   s->head_dim, stride, s->eps};
      run_tasks(NAME(head_norm_task), &args, num_row_tasks(s->num_tokens), s->num_threads);
    }
    NAME(rotate)(heads, s->cos, s->sin, s->positions, s->num_tokens, s->num_heads + s->num_kv_heads, s->head_dim, stride,
                 s->table_stride, s->num_threads);
    uint8_t *kv = s->kv + i * s->kv_layer_bytes;
    if (s->calls && (s->calls[i] & 1 || (s->asked && *s->asked)) && s->between(i, 0)) return;
    NAME(attend)(heads, k, v, kv, kv + s->kv_values_bytes, s->attended, s->slots, s->segments, s->runs, s->tasks,
                 s->partials, s->done, s->num_tokens, s->num_tasks, stride, stride, stride, s->kv_head_bytes,
                 s->num_kv_heads, s->num_heads / s->num_kv_heads, s->head_dim, s->scale, s->codes, s->num_threads);
    if (s->calls && s->calls[i] & 2 && s->between(i, 1)) return;
    NAME(multiply)(s, &layer->output, s->attended, s->residual, SUMS_ADDED);
    NAME(add_perceptron)(s, layer);
  }
}
