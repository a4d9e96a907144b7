/* Cuts a step's attention into tasks, the same for every layer, and merges parts of a row's keys: for all types. */
#pragma once

#define KEYS 64       /* keys of a tile */
/* Query rows of a tile: tokens times the query heads that share a KV head. */
#ifdef HAS_AMX
#define MAX_ROWS 384
#else
#define MAX_ROWS 192
#endif
#define MAX_HEAD_DIM 256
#define MOST_ABOVE 8  /* how far scores, as powers of two, may exceed what they are relative to */
#define PART_KEYS 512    /* keys that share a running softmax, whoever computes them */

typedef struct {
  int64_t row_start, row_end; /* of the batch; the sequence's last tokens */
  int64_t run_start, run_end; /* of the runs that hold its keys, these tokens included */
} segment_t;

typedef struct {
  int64_t start, end; /* slots */
} run_t;

typedef struct {
  int64_t segment, kv_head;
  int64_t row_start, row_end;    /* of the batch */
  int64_t first_key, end_key;    /* keys visible to any of the rows here, as positions in the sequence */
  int64_t first_row_keys;        /* how many keys row_start sees; each further row sees one more */
  int64_t first_part, num_parts; /* their partial results, if several tasks share the rows */
  int64_t part;
} task_t;

/* Adds a later part of each row's keys to the earlier ones: what their powers of two are relative to, the sums of the
 * weights, and the weighted values [num_rows, head_dim]. Never inlined: the compiler may fuse other products elsewhere.
 */
static __attribute__((noinline)) void fold(int64_t num_rows, int64_t head_dim, float *most, float *sums, float *out,
                                           const float *part_most, const float *part_sums, const float *part_out) {
  for (int64_t row = 0; row < num_rows; row += LANES) {
    const int64_t count = num_rows - row < LANES ? num_rows - row : LANES;
    float fades[LANES] = {0}, weights[LANES] = {0};
    memcpy(fades, most + row, count * sizeof(float));
    memcpy(weights, part_most + row, count * sizeof(float));
    const f32v before = load_f32(fades), later = load_f32(weights), all = max_f32(before, later);
    store_f32(fades, exp2_f32(max_f32(splat(-126.0f), before - all))); /* of no keys they are infinite */
    store_f32(weights, exp2_f32(max_f32(splat(-126.0f), later - all)));
    memcpy(most + row, &all, count * sizeof(float));
    for (int64_t i = row; i < row + count; i++) {
      const float fade = fades[i - row], weight = weights[i - row];
      sums[i] = sums[i] * fade + part_sums[i] * weight;
      for (int64_t d = i * head_dim; d < (i + 1) * head_dim; d += LANES)
        store_f32(out + d, load_f32(out + d) * fade + load_f32(part_out + d) * weight);
    }
  }
}

typedef struct {
  const run_t *run;
  int64_t run_key; /* the position in the sequence of the run's first key */
} keys_t;

/* Where some keys of a sequence lie. */
typedef struct {
  const int64_t *slots; /* [count] */
  int64_t count;
  int are_in_a_row; /* one after the other in memory, as they mostly are */
} slots_t;

/* The slots of the keys from `key` on, at most KEYS and none from `end` on; calls must go up. slots: room [KEYS]. */
static slots_t slots_of(keys_t *keys, int64_t key, int64_t end, int64_t *slots) {
  const int64_t last = end - key < KEYS ? end : key + KEYS;
  slots_t found = {slots, last > key ? last - key : 0, 1};
  while (key < last) {
    const int64_t next_run_key = keys->run_key + keys->run->end - keys->run->start;
    const int64_t first_slot = keys->run->start + key - keys->run_key;
    const int64_t count = (next_run_key < last ? next_run_key : last) - key;
    found.are_in_a_row &= count <= 0 || count == found.count;
    for (int64_t i = 0; i < count; i++) slots[i] = first_slot + i;
    if (count > 0) slots += count, key += count;
    if (key >= next_run_key) keys->run_key = next_run_key, keys->run++;
  }
  return found;
}

static int64_t num_keys_of(const segment_t *segment, const run_t *runs) {
  int64_t num_keys = 0;
  for (int64_t i = segment->run_start; i < segment->run_end; i++) num_keys += runs[i].end - runs[i].start;
  return num_keys;
}

/* As many as fit into a tile, since each task packs all its keys anew; half of them where threads would wait for others. */
static int64_t tokens_of_task(const segment_t *segments, int64_t num_segments, int64_t num_kv_heads, int64_t group,
                              int64_t num_threads) {
  const int64_t most = MAX_ROWS / group;
  int64_t num_tasks = 0;
  for (int64_t s = 0; s < num_segments; s++)
    num_tasks += (segments[s].row_end - segments[s].row_start + most - 1) / most * num_kv_heads;
  return num_tasks < TASKS_PER_THREAD * num_threads && most > 1 ? most / 2 : most;
}

/* Writes the tasks, long ones first within a segment, if `tasks` is not 0. Returns their number and, in *num_parts,
 * how many partial results they share. */
int64_t plan_attention(const segment_t *segments, int64_t num_segments, const run_t *runs, int64_t num_kv_heads,
                       int64_t group, int64_t num_threads, task_t *tasks, int64_t *num_parts) {
  const int64_t tokens_per_task = tokens_of_task(segments, num_segments, num_kv_heads, group, num_threads);
  const int is_cut = num_threads > 1 && num_segments * num_kv_heads < 2 * num_threads;
  int64_t count = 0;
  *num_parts = 0;
  for (int64_t s = 0; s < num_segments; s++) {
    const segment_t *segment = segments + s;
    const int64_t num_keys = num_keys_of(segment, runs), num_rows = segment->row_end - segment->row_start;
    const int64_t parts = is_cut && num_rows == 1 ? (num_keys + PART_KEYS - 1) / PART_KEYS : 1;
    for (int64_t end = segment->row_end; end > segment->row_start; end -= tokens_per_task) {
      const int64_t start = end - tokens_per_task < segment->row_start ? segment->row_start : end - tokens_per_task;
      for (int64_t head = 0; head < num_kv_heads; head++) {
        for (int64_t part = 0; part < parts; part++, count++) {
          if (!tasks) continue;
          const int64_t last_key = num_keys - (segment->row_end - end); /* of the last row, exclusive */
          const int64_t part_end = parts > 1 && (part + 1) * PART_KEYS < last_key ? (part + 1) * PART_KEYS : last_key;
          const int64_t first_row_keys = last_key - (end - start) + 1;
          tasks[count] = (task_t){s,        head,           start,      end,   part * PART_KEYS,
                                  part_end, first_row_keys, *num_parts, parts, part};
        }
        if (parts > 1) *num_parts += parts;
      }
    }
  }
  return count;
}
