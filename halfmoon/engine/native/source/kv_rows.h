/* Rows of K and V in memory, for one type T: head_dim numbers of T, or codes with a scale (kv/codec/scaled_rows.py). A
 * head has its rows one after the other; of codes, all scales follow all rows.
 *
 * The codes of a row are what the products read. Its scale is one number of a key, and so multiplies scores and
 * probabilities instead of every code.
 */

typedef struct {
  int codes; /* ROWS_OF_... */
  int64_t row_bytes, head_dim;
  int64_t scales; /* where those of a head begin */
} NAME(kv_format);

static NAME(kv_format) NAME(format_of)(int codes, int64_t head_dim, int64_t kv_head_bytes) {
  if (codes == ROWS_OF_NUMBERS) return (NAME(kv_format)){codes, head_dim * sizeof(T), head_dim, 0};
  return (NAME(kv_format)){codes, head_dim, head_dim, kv_head_bytes / (head_dim + SCALE_BYTES) * head_dim};
}

/* Numbers [head_dim] -> codes and a bfloat16 scale, bit for bit those of the codec. A NaN counts as 0. */
INLINE void NAME(round_row)(const T *row, uint8_t *out, uint8_t *out_scale, int64_t head_dim, const int rows) {
  i32v largest = {};
  for (int64_t d = 0; d < head_dim; d += LANES) largest = max_i32(largest, (i32v)LOAD(row + d) & 0x7fffffff);
  int32_t bits = max_of_i32(largest);
  const int is_wild = bits > LARGEST_BITS;
  if (is_wild) bits = LARGEST_BITS;
  float most;
  memcpy(&most, &bits, sizeof most);
  most /= LARGEST_CODE(rows);
  if (most < 0x1p-126f) most = 0x1p-126f;
  memcpy(&bits, &most, sizeof bits);
  bits = (bits + BELOW_SCALE(rows)) & ~BELOW_SCALE(rows); /* rounded up */
  const uint16_t scale = (uint16_t)((uint32_t)bits >> 16);
  const float inverse = 1.0f / bf16_to_f32(scale);
  for (int64_t d = 0; d < head_dim; d += LANES) {
    f32v x = LOAD(row + d);
    if (is_wild) x = min_f32(max_f32(choose(x == x, x, splat(0)), splat(-0x1p126f)), splat(0x1p126f));
    x *= inverse;
    const i8v codes = narrow_i32(rows == ROWS_OF_E4M3 ? round_e4m3(x) : round_i32(x));
    memcpy(out + d, &codes, sizeof codes);
  }
  memcpy(out_scale, &scale, sizeof scale);
}

/* Stores a row in a slot of a head. */
static void NAME(store_row)(const NAME(kv_format) *format, const T *row, uint8_t *head, int64_t slot) {
  uint8_t *out = head + slot * format->row_bytes, *scale = head + format->scales + slot * SCALE_BYTES;
  if (format->codes == ROWS_OF_INT8)
    NAME(round_row)(row, out, scale, format->head_dim, ROWS_OF_INT8);
  else if (format->codes == ROWS_OF_E4M3)
    NAME(round_row)(row, out, scale, format->head_dim, ROWS_OF_E4M3);
  else
    memcpy(out, row, format->head_dim * sizeof(T));
}

/* A row's numbers, or codes / CODE_UNIT, as items. */
INLINE void NAME(row_items)(const NAME(kv_format) *format, const uint8_t *row, uint32_t *items) {
  const int64_t num_vectors = format->head_dim / LANES;
  if (format->codes == ROWS_OF_INT8)
    for (int64_t j = 0; j < num_vectors; j++) STORE_ITEMS((float *)items, j, load_i8(row + j * LANES));
  else if (format->codes == ROWS_OF_E4M3)
    for (int64_t j = 0; j < num_vectors; j++) STORE_ITEMS((float *)items, j, load_e4m3(row + j * LANES));
  else
    ITEMS(items, row, format->head_dim);
}

/* Fetches row i of a head, if there is one: to be read soon. */
INLINE void NAME(fetch_row)(const NAME(kv_format) *format, const uint8_t *rows, slots_t of, int64_t i) {
  if (i >= of.count) return;
  const uint8_t *row = rows + of.slots[i] * format->row_bytes;
  for (int64_t at = 0; at < format->row_bytes; at += 64) __builtin_prefetch(row + at);
}

/* The scales of a head's rows times CODE_UNIT, 0 beyond; none are needed for numbers. */
static void NAME(row_scales)(const NAME(kv_format) *format, const uint8_t *head, slots_t of, float *scales) {
  for (int64_t i = 0; i < KEYS; i++) {
    uint16_t scale = 0;
    if (i < of.count) memcpy(&scale, head + format->scales + of.slots[i] * SCALE_BYTES, sizeof scale);
    scales[i] = bf16_to_f32(scale) * CODE_UNIT(format->codes);
  }
}

/* A word of each of LANES rows -> one row of items, or two. Returns where the next ones belong. */
INLINE uint32_t *NAME(store_word)(u32v word, uint32_t *out, const int per_word) {
  if (per_word == 1) return memcpy(out, &word, sizeof word), out + KEYS;
  const u32v low = word << 16, high = word & 0xffff0000;
  memcpy(out, &low, sizeof low);
  memcpy(out + KEYS, &high, sizeof high);
  return out + 2 * KEYS;
}

/* Rows of a head -> items [depth, KEYS], zero beyond them. Meanwhile fetches the rows `later`. */
static void NAME(pack_keys)(const NAME(kv_format) *format, const uint8_t *rows, slots_t of, uint32_t *packed,
                            const uint8_t *later_rows, slots_t later) {
  const int are_numbers = format->codes == ROWS_OF_NUMBERS;
  /* Numbers are moved as they lie, 32 bits at a time: an item, or two that are parted when they are stored. */
  const int per_word = are_numbers ? 4 / (PACKED * (int)sizeof(T)) : 1;
  const int64_t depth = format->head_dim / PACKED, num_words = depth / per_word;
  uint32_t made[LANES * MAX_HEAD_DIM] __attribute__((aligned(64)));
  const uint32_t *words[LANES];
  for (int64_t key = 0; key < KEYS; key += LANES) {
    if (key >= of.count) {
      for (int64_t k = 0; k < depth; k++) memset(packed + k * KEYS + key, 0, LANES * 4);
      continue;
    }
    const int64_t valid = of.count - key < LANES ? of.count - key : LANES;
    for (int64_t i = 0; i < valid; i++) {
      const uint8_t *row = rows + of.slots[key + i] * format->row_bytes;
      NAME(fetch_row)(format, later_rows, later, key + i);
      words[i] = are_numbers ? (const uint32_t *)row : made + i * depth;
      if (!are_numbers) NAME(row_items)(format, row, made + i * depth);
    }
    for (int64_t i = valid; i < LANES; i++) words[i] = memset(made + i * depth, 0, num_words * 4);
    uint32_t *out = packed + key;
    int64_t k = 0;
    for (; k + LANES <= num_words; k += LANES) {
      u32v columns[LANES];
      transpose(words, k, columns);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) out = NAME(store_word)(columns[j], out, per_word);
    }
    for (; k < num_words; k++) {
      u32v column;
      for (int i = 0; i < LANES; i++) {
        uint32_t word; /* maybe of two bfloat16 */
        memcpy(&word, words[i] + k, sizeof word);
        column[i] = word;
      }
      out = NAME(store_word)(column, out, per_word);
    }
  }
}

/* Rows of a head -> items [KEYS / PACKED, head_dim], zero beyond them. Meanwhile fetches the rows `later`. */
static void NAME(pack_values)(const NAME(kv_format) *format, const uint8_t *rows, slots_t of, uint32_t *packed,
                              const uint8_t *later_rows, slots_t later) {
  const int64_t head_dim = format->head_dim, used = (of.count + PACKED - 1) / PACKED;
  for (int64_t i = 0; i < used; i++) {
    for (int64_t j = 0; j < PACKED; j++) NAME(fetch_row)(format, later_rows, later, i * PACKED + j);
    if (PACKED == 1) {
      NAME(row_items)(format, rows + of.slots[i] * format->row_bytes, packed + i * head_dim);
      continue;
    }
    uint32_t items[2][MAX_HEAD_DIM] __attribute__((aligned(64)));
    const void *pair[2] = {items[0], items[1]};
    for (int64_t j = 0; j < 2; j++) {
      const uint8_t *row = rows + of.slots[i * 2 + j < of.count ? i * 2 + j : 0] * format->row_bytes;
      if (i * 2 + j >= of.count)
        memset(items[j], 0, head_dim * sizeof(T)); /* a key without a partner */
      else if (format->codes)
        NAME(row_items)(format, row, items[j]);
      else
        pair[j] = row;
    }
    PAIR(packed + i * head_dim, pair[0], pair[1], head_dim);
  }
  if (used < KEYS / PACKED) memset(packed + used * head_dim, 0, (KEYS / PACKED - used) * head_dim * 4);
}
