/* Causal attention over paged keys and values, for one type T: tiles of up to MAX_ROWS query rows by 64 keys with a
 * running softmax (Dao et al., FlashAttention-2, section 3.1). A task is a KV head and some rows of a sequence; the
 * parts of a single row's keys may be tasks of their own, which the last one to end merges (flash-decoding).
 *
 * A row's result has the same bits in any batch, chunk and blocks: tiles and parts begin at fixed positions of the
 * sequence, each part has its own running softmax, and parts are merged in order, by `fold` alone.
 */

typedef struct {
  const T *q;
  const uint8_t *keys, *values; /* [num_kv_heads, num_slots] rows */
  T *out;
  const segment_t *segments;
  const run_t *runs;
  const task_t *tasks;
  float *partials;   /* [num_parts, group, head_dim + 2] */
  atomic_long *done; /* [num_parts], zero; those at each first_part count its finished parts */
  int64_t q_stride, out_stride, kv_head_bytes, head_dim, group;
  float scale;
  NAME(kv_format) format; /* of keys and values */
} NAME(attend_args);

typedef struct {
  uint32_t q[MAX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));     /* [rows, depth] items */
  uint32_t keys[KEYS * MAX_HEAD_DIM] __attribute__((aligned(64)));      /* [depth, KEYS] items */
  uint32_t values[KEYS * MAX_HEAD_DIM] __attribute__((aligned(64)));    /* [KEYS / PACKED, head_dim] items */
  float scores[NUM_BLOCKS][BLOCK_ROWS * KEYS] __attribute__((aligned(64))); /* then probabilities, as items */
  float out[MAX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));      /* of the part, like sums and most */
  f32v sums[MAX_ROWS];
  float most[MAX_ROWS]; /* what powers of two are relative to: the part's largest score but for MOST_ABOVE */
  float merged_most[MAX_ROWS], merged_sums[MAX_ROWS]; /* of the parts before */
  float merged_out[MAX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
  int64_t slots[2][KEYS]; /* of these keys and the next, by turns */
  float key_scales[KEYS] __attribute__((aligned(64))), value_scales[KEYS] __attribute__((aligned(64))); /* of codes */
} NAME(tile);

/* Rescales a row's earlier sums to a new maximum. */
static __attribute__((noinline, cold)) void NAME(raise_most)(NAME(tile) *tile, int64_t row, int64_t head_dim, float most) {
  const float before = tile->most[row];
  tile->most[row] = most;
  if (before == -INFINITY) return; /* nothing is there yet */
  const float fade = exp2f(before - most);
  tile->sums[row] *= fade;
  for (float *out = tile->out + row * head_dim, *end = out + head_dim; out < end; out += LANES)
    store_f32(out, load_f32(out) * fade);
}

/* One row's scores -> probabilities over its first `visible` keys. Scores and `most` are powers of two; a maximum that is
 * little exceeded stays, so that nothing waits for this tile's maximum (Zadouri et al., FlashAttention-4, conditional
 * rescaling). */
INLINE void NAME(soften)(NAME(tile) *tile, float *scores, int64_t row, int64_t visible, int64_t head_dim, float scale,
                         const int has_scales, const int is_masked) {
  const i32v lanes = EACH_LANE;
  f32v s[KEYS / LANES], most = splat(-INFINITY);
#pragma GCC unroll 8
  for (int j = 0; j < KEYS / LANES; j++) {
    s[j] = load_f32(scores + j * LANES);
    if (has_scales) s[j] *= load_f32(tile->key_scales + j * LANES);
    if (is_masked) s[j] = choose(lanes + j * LANES < (int32_t)visible, s[j], splat(-INFINITY));
    most = max_f32(most, s[j]);
  }
  most *= scale;
  if (__builtin_expect(any_above(most, tile->most[row] + MOST_ABOVE), 0))
    NAME(raise_most)(tile, row, head_dim, max_of(most));
  f32v sum = tile->sums[row]; /* not in memory: scores might lie there, for all the compiler knows */
  const f32v largest = splat(tile->most[row]);
#pragma GCC unroll 8
  for (int j = 0; j < KEYS / LANES; j++) {
    f32v p = EXP2(s[j] * scale - largest);
    if (is_masked) p = choose(lanes + j * LANES < (int32_t)visible, p, splat(0));
    sum += p;
    STORE_ITEMS(scores, j, has_scales ? p * load_f32(tile->value_scales + j * LANES) : p);
  }
  tile->sums[row] = sum;
}

/* A block of a task's rows begins at `row`; its last one may be shorter. */
#define SCORES_OF(row) (tile->scores[(row) / BLOCK_ROWS % NUM_BLOCKS])
#define END_OF_BLOCK(row) ((row) + BLOCK_ROWS < num_rows ? (row) + BLOCK_ROWS : num_rows)

/* A block's scores of the packed keys from `key` on. */
INLINE void NAME(score_block)(const NAME(attend_args) *a, NAME(tile) *tile, int64_t row, int64_t num_rows, int64_t key,
                              int64_t num_keys) {
  const int64_t depth = a->head_dim / PACKED;
  if (row < num_rows)
    PRODUCT(END_OF_BLOCK(row) - row, num_keys, tile->q + row * depth, depth, tile->keys + key, KEYS,
            SCORES_OF(row) + key, KEYS, depth, 0);
}

/* A block's probabilities, of its rows from `first` to `end`; first_visible: how many of the packed keys the task's first
 * token sees; less than 0 if it ends before them, more than num_keys if behind. Never inlined: the compiler may fuse its
 * products in one place and not in another. */
static __attribute__((noinline)) void NAME(soften_block)(const NAME(attend_args) *a, NAME(tile) *tile, int64_t row,
                                                         int64_t first, int64_t end, int64_t first_visible,
                                                         int64_t num_keys) {
  const int has_scales = a->format.codes != ROWS_OF_NUMBERS;
  const float scale = a->scale * LOG2_E;
  int64_t seen = first_visible + first / a->group, head = first % a->group;
  for (int64_t i = first; i < end; i++) {
    const int64_t visible = seen < 0 ? 0 : seen > num_keys ? num_keys : seen;
    float *scores = SCORES_OF(row) + (i - row) * KEYS;
    if (has_scales)
      NAME(soften)(tile, scores, i, visible, a->head_dim, scale, 1, visible < KEYS);
    else if (visible < KEYS)
      NAME(soften)(tile, scores, i, visible, a->head_dim, scale, 0, 1);
    else
      NAME(soften)(tile, scores, i, visible, a->head_dim, scale, 0, 0);
    if (++head == a->group) head = 0, seen++;
  }
}

/* Adds a block's weighted values, of the columns from `first` to `end`. */
INLINE void NAME(add_block)(const NAME(attend_args) *a, NAME(tile) *tile, int64_t row, int64_t num_rows, int64_t first,
                            int64_t end) {
  PRODUCT(END_OF_BLOCK(row) - row, end - first, (const uint32_t *)SCORES_OF(row), KEYS, tile->values + first,
          a->head_dim, tile->out + row * a->head_dim + first, a->head_dim, KEYS / PACKED, 1);
}

/* Adds packed keys to the task's rows, but for blocks of rows that see none of them. */
static void NAME(attend_rows)(const NAME(attend_args) *a, NAME(tile) *tile, int64_t num_rows, int64_t first_visible,
                              int64_t num_keys) {
  const int64_t unseeing = first_visible > 0 ? 0 : (1 - first_visible) * a->group;
  const int64_t start = unseeing / BLOCK_ROWS * BLOCK_ROWS;
  if (NUM_BLOCKS == 1 || num_rows - start <= BLOCK_ROWS) {
    for (int64_t row = start; row < num_rows; row += BLOCK_ROWS) {
      NAME(score_block)(a, tile, row, num_rows, 0, KEYS);
      NAME(soften_block)(a, tile, row, row, END_OF_BLOCK(row), first_visible, num_keys);
      NAME(add_block)(a, tile, row, num_rows, 0, a->head_dim);
    }
    return;
  }
  /* By turns, so that tiles multiply while vectors compute: a block, the one before it, and the one before that. */
  const int64_t half = (a->head_dim / 2 + LANES - 1) / LANES * LANES;
  for (int64_t row = start; row < num_rows + 2 * BLOCK_ROWS; row += BLOCK_ROWS) {
    const int64_t before = row - BLOCK_ROWS, first = before - BLOCK_ROWS;
    const int64_t num_before = before < start || before >= num_rows ? 0 : END_OF_BLOCK(before) - before;
    for (int turn = 0; turn < 4; turn++) {
      if (turn < 2)
        NAME(score_block)(a, tile, row, num_rows, turn * KEYS / 2, KEYS / 2);
      else if (first >= start)
        NAME(add_block)(a, tile, first, num_rows, turn == 2 ? 0 : half, turn == 2 ? half : a->head_dim);
      NAME(soften_block)(a, tile, before, before + turn * num_before / 4, before + (turn + 1) * num_before / 4,
                         first_visible, num_keys);
    }
  }
}
#undef SCORES_OF
#undef END_OF_BLOCK

/* Adds the keys in `now`, the first of which is the sequence's `first_key`, to the task's rows. Fetches the rows of
 * the keys in `next`. */
static void NAME(attend_tile)(const NAME(attend_args) *a, NAME(tile) *tile, const task_t *task, int64_t first_key,
                              slots_t now, slots_t next) {
  const int64_t num_rows = (task->row_end - task->row_start) * a->group;
  const uint8_t *keys = a->keys + task->kv_head * a->kv_head_bytes;
  const uint8_t *values = a->values + task->kv_head * a->kv_head_bytes;
  if (a->format.codes != ROWS_OF_NUMBERS) {
    NAME(row_scales)(&a->format, keys, now, tile->key_scales);
    NAME(row_scales)(&a->format, values, now, tile->value_scales);
  }
  NAME(pack_keys)(&a->format, keys, now, tile->keys, next);
  NAME(pack_values)(&a->format, values, now, tile->values, next);
  NAME(attend_rows)(a, tile, num_rows, task->first_row_keys - first_key, now.count);
}

static void NAME(write_row)(const float *sums, T *out, float total, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += LANES) STORE(out + d, load_f32(sums + d) / total);
}

/* The room of one part's results: `most` and the sum of each head, then their weighted values. */
static float *NAME(partial)(const NAME(attend_args) *a, int64_t part) {
  return a->partials + part * a->group * (a->head_dim + 2);
}

/* Stores the task's sums; the last of the tasks that share a row merges them all. */
static void NAME(merge)(const NAME(attend_args) *a, const NAME(tile) *tile, const task_t *task, T *out) {
  const int64_t group = a->group, head_dim = a->head_dim;
  float *mine = NAME(partial)(a, task->first_part + task->part);
  for (int64_t g = 0; g < group; g++) {
    mine[g] = tile->most[g];
    mine[group + g] = sum_of(tile->sums[g]);
  }
  memcpy(mine + 2 * group, tile->out, group * head_dim * sizeof(float));
  if (atomic_fetch_add(&a->done[task->first_part], 1) != task->num_parts - 1) return;
  atomic_store(&a->done[task->first_part], 0); /* for the next layer */
  float *all = NAME(partial)(a, task->first_part);
  for (int64_t i = 1; i < task->num_parts; i++) {
    const float *part = NAME(partial)(a, task->first_part + i);
    fold(group, head_dim, all, all + group, all + 2 * group, part, part + group, part + 2 * group);
  }
  for (int64_t g = 0; g < group; g++)
    NAME(write_row)(all + 2 * group + g * head_dim, out + g * head_dim, all[group + g], head_dim);
}

/* Ends a part of the keys of all rows. */
static void NAME(end_part)(NAME(tile) *tile, int64_t num_rows, int64_t head_dim, int is_first) {
  float sums[MAX_ROWS];
  for (int64_t r = 0; r < num_rows; r++) sums[r] = sum_of(tile->sums[r]);
  if (is_first) {
    memcpy(tile->merged_most, tile->most, num_rows * sizeof(float));
    memcpy(tile->merged_sums, sums, num_rows * sizeof(float));
    memcpy(tile->merged_out, tile->out, num_rows * head_dim * sizeof(float));
  } else {
    fold(num_rows, head_dim, tile->merged_most, tile->merged_sums, tile->merged_out, tile->most, sums, tile->out);
  }
}

static void NAME(begin_part)(NAME(tile) *tile, int64_t num_rows, int64_t head_dim) {
  for (int64_t r = 0; r < num_rows; r++) {
    tile->sums[r] = splat(0);
    tile->most[r] = -INFINITY;
  }
  memset(tile->out, 0, num_rows * head_dim * sizeof(float));
}

static void NAME(attend_task)(void *data, long index) {
  const NAME(attend_args) *a = data;
  const task_t *task = a->tasks + index;
  const int64_t num_tokens = task->row_end - task->row_start, num_rows = num_tokens * a->group;
  const int64_t depth = a->head_dim / PACKED, head = task->kv_head * a->group;
  NAME(tile) tile;
  for (int64_t r = 0; r < num_rows; r++) {
    const T *q = a->q + (task->row_start + r / a->group) * a->q_stride + (head + r % a->group) * a->head_dim;
    ITEMS(tile.q + r * depth, q, a->head_dim);
  }
  NAME(begin_part)(&tile, num_rows, a->head_dim);
  keys_t keys = {a->runs + a->segments[task->segment].run_start, 0};
  slots_t next = slots_of(&keys, task->first_key, task->end_key, tile.slots[0]);
  NAME(fetch_rows)(&a->format, a->keys + task->kv_head * a->kv_head_bytes, next);
  NAME(fetch_rows)(&a->format, a->values + task->kv_head * a->kv_head_bytes, next);
  for (int64_t key = task->first_key; key < task->end_key; key += KEYS) {
    if (key > task->first_key && key % PART_KEYS == 0) {
      NAME(end_part)(&tile, num_rows, a->head_dim, key == PART_KEYS);
      NAME(begin_part)(&tile, num_rows, a->head_dim);
    }
    const slots_t now = next;
    next = slots_of(&keys, key + KEYS, task->end_key, tile.slots[now.slots == tile.slots[0]]);
    NAME(attend_tile)(a, &tile, task, key, now, next);
  }
  END_PRODUCTS();
  T *out = a->out + task->row_start * a->out_stride + head * a->head_dim;
  if (task->num_parts > 1) {
    NAME(merge)(a, &tile, task, out);
    return;
  }
  const int is_merged = task->end_key > PART_KEYS;
  if (is_merged) NAME(end_part)(&tile, num_rows, a->head_dim, 0);
  const float *sums = is_merged ? tile.merged_out : tile.out;
  for (int64_t r = 0; r < num_rows; r++)
    NAME(write_row)(sums + r * a->head_dim, out + r / a->group * a->out_stride + r % a->group * a->head_dim,
                    is_merged ? tile.merged_sums[r] : sum_of(tile.sums[r]), a->head_dim);
}

typedef struct {
  const T *k, *v; /* [num_rows, num_kv_heads, head_dim], rows k_stride and v_stride apart */
  uint8_t *keys, *values;
  const int64_t *slots;
  int64_t num_rows, num_kv_heads, k_stride, v_stride, kv_head_bytes;
  NAME(kv_format) format;
} NAME(store_args);

static void NAME(store_task)(void *data, long task) {
  const NAME(store_args) *a = data;
  for (int64_t row = first_row(task), end = end_row(task, a->num_rows); row < end; row++)
    for (int64_t h = 0; h < a->num_kv_heads; h++) {
      const int64_t head = h * a->kv_head_bytes, from = h * a->format.head_dim;
      if (row + ROWS_AHEAD < end) {
        const int64_t ahead = head + a->slots[row + ROWS_AHEAD] * a->format.row_bytes;
        fetch_to_write(a->keys + ahead, a->format.row_bytes);
        fetch_to_write(a->values + ahead, a->format.row_bytes);
      }
      NAME(store_row)(&a->format, a->k + row * a->k_stride + from, a->keys + head, a->slots[row]);
      NAME(store_row)(&a->format, a->v + row * a->v_stride + from, a->values + head, a->slots[row]);
    }
}

/* Stores k and v [num_tokens, num_kv_heads, head_dim] (rows k_stride and v_stride apart) in their slots, as rows of T or
 * of codes, then out [num_tokens, num_kv_heads * group, head_dim] = softmax(q k^T * scale) v over each row's own sequence.
 */
void NAME(attend)(const T *q, const T *k, const T *v, uint8_t *keys, uint8_t *values, T *out, const int64_t *slots,
                  const segment_t *segments, const run_t *runs, const task_t *tasks, float *partials,
                  atomic_long *done, int64_t num_tokens, int64_t num_tasks, int64_t q_stride, int64_t k_stride,
                  int64_t v_stride, int64_t kv_head_bytes, int64_t num_kv_heads, int64_t group,
                  int64_t head_dim, float scale, int codes, int num_threads) {
  const NAME(kv_format) format = NAME(format_of)(codes, head_dim, kv_head_bytes);
  NAME(store_args) stored = {k, v, keys, values, slots, num_tokens, num_kv_heads, k_stride, v_stride, kv_head_bytes,
                             format};
  run_tasks(NAME(store_task), &stored, num_row_tasks(num_tokens), num_threads);
  NAME(attend_args) args = {q,        keys,     values,   out,  segments, runs, tasks, partials,
                            done,     q_stride, num_kv_heads * group * head_dim, kv_head_bytes,
                            head_dim, group,    scale, format};
  run_tasks(NAME(attend_task), &args, num_tasks, num_threads);
}
