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

/* Fetches row i of a head, if there is one: to be read soon. Into the second-level cache: the first one can wait for so
 * few lines at a time that a thread would read a third of what memory gives it. */
INLINE void NAME(fetch_row)(const NAME(kv_format) *format, const uint8_t *rows, slots_t of, int64_t i) {
  if (i >= of.count) return;
  const uint8_t *row = rows + of.slots[i] * format->row_bytes;
  for (int64_t at = 0; at < format->row_bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
}

/* Never inlined: products beside it would lose registers, and attention of prompts 8 % of its speed. */
static __attribute__((noinline)) void NAME(fetch_rows)(const NAME(kv_format) *format, const uint8_t *rows, slots_t of) {
  for (int64_t i = 0; i < of.count; i++) NAME(fetch_row)(format, rows, of, i);
}

/* Row i of a head; zeros beyond them. */
INLINE const uint8_t *NAME(row_at)(const NAME(kv_format) *format, const uint8_t *rows, slots_t of, int64_t i) {
  static const uint32_t zeros[MAX_HEAD_DIM];
  return i < of.count ? rows + of.slots[i] * format->row_bytes : (const uint8_t *)zeros;
}

/* The scales of a head's rows times CODE_UNIT, 0 beyond; none are needed for numbers. */
static void NAME(row_scales)(const NAME(kv_format) *format, const uint8_t *head, slots_t of, float *scales) {
  const uint8_t *all = head + format->scales;
  for (int64_t key = 0; key < KEYS; key += LANES, scales += LANES) {
    const int64_t *slots = of.slots + key;
    if (of.are_in_a_row && key + LANES <= of.count) {
      store_f32(scales, load_bf16((const uint16_t *)(all + slots[0] * SCALE_BYTES)) * CODE_UNIT(format->codes));
      continue;
    }
    for (int64_t i = 0; i < LANES; i++) {
      uint16_t scale = 0;
      if (key + i < of.count) memcpy(&scale, all + slots[i] * SCALE_BYTES, sizeof scale);
      scales[i] = bf16_to_f32(scale) * CODE_UNIT(format->codes);
    }
  }
}

/* Items in a 32-bit word of a row, which has one or two numbers, or four codes. */
#define ITEMS_OF_WORD(codes) (4 / (PACKED * ((codes) == ROWS_OF_NUMBERS ? (int)sizeof(T) : 1)))

/* A word of each of LANES rows -> their items, in order: numbers, or codes / CODE_UNIT. */
INLINE void NAME(word_items)(const int codes, u32v word, u32v *items) {
  if (codes == ROWS_OF_NUMBERS) {
    items[0] = ITEMS_OF_WORD(codes) == 1 ? word : word << 16;
    if (ITEMS_OF_WORD(codes) == 2) items[1] = word & 0xffff0000;
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const u32v highest = word << (24 - 8 * i);
    const u32v number = codes == ROWS_OF_INT8 ? (u32v)__builtin_convertvector((i32v)highest >> 24, f32v)
                                              : (u32v)highest_e4m3(highest);
    if (PACKED == 1)
      items[i] = number;
    else
      items[i / 2] = i % 2 ? items[i / 2] | number : number >> 16; /* a code is a number of bfloat16 */
  }
}

#if PACKED == 2
#define PAIRS(first) (((u32v)EACH_LANE + (first)) | ((u32v)EACH_LANE + (first) + 2 * LANES) << 16)
#endif

/* The numbers from `d` on of PACKED rows, or their codes / CODE_UNIT, as items. */
INLINE void NAME(value_items)(const int codes, const int num_vectors, const uint8_t *const *rows, int64_t d, u32v *items) {
#if PACKED == 2
  if (codes == ROWS_OF_NUMBERS && num_vectors == 2) {
    const __m512i low = (__m512i)load_u32(rows[0] + 2 * d), high = (__m512i)load_u32(rows[1] + 2 * d);
    items[0] = (u32v)_mm512_permutex2var_epi16(low, (__m512i)PAIRS(0), high);
    items[1] = (u32v)_mm512_permutex2var_epi16(low, (__m512i)PAIRS(LANES), high);
    return;
  }
#endif
#pragma GCC unroll 2
  for (int j = 0; j < num_vectors; j++) {
    u32v numbers[PACKED];
#pragma GCC unroll 2
    for (int i = 0; i < PACKED; i++)
      numbers[i] = (u32v)(codes == ROWS_OF_INT8   ? load_i8(rows[i] + d + j * LANES)
                          : codes == ROWS_OF_E4M3 ? load_e4m3(rows[i] + d + j * LANES)
                                                  : LOAD((const T *)rows[i] + d + j * LANES));
    items[j] = PACKED == 1 ? numbers[0] : numbers[PACKED - 1] | numbers[0] >> 16;
  }
}

/* Calls a function that is compiled for each kind of rows. */
#define FOR_ROWS(codes, function, ...)                             \
  switch (codes) {                                                 \
    case ROWS_OF_INT8: function(ROWS_OF_INT8, __VA_ARGS__); break; \
    case ROWS_OF_E4M3: function(ROWS_OF_E4M3, __VA_ARGS__); break; \
    default: function(ROWS_OF_NUMBERS, __VA_ARGS__);               \
  }

INLINE void NAME(pack_words)(const int codes, const NAME(kv_format) *format, const uint8_t *rows, slots_t of,
                             uint32_t *packed, slots_t later) {
  const int per_word = ITEMS_OF_WORD(codes);
  const int64_t depth = format->head_dim / PACKED, num_words = depth / per_word;
  const uint32_t *words[LANES];
  for (int64_t key = 0; key < KEYS; key += LANES) {
    if (key >= of.count) {
      for (int64_t k = 0; k < depth; k++) memset(packed + k * KEYS + key, 0, LANES * 4);
      continue;
    }
    for (int i = 0; i < LANES; i++) {
      words[i] = (const uint32_t *)NAME(row_at)(format, rows, of, key + i);
      NAME(fetch_row)(format, rows, later, key + i);
    }
    uint32_t *out = packed + key;
    int64_t k = 0;
    u32v columns[LANES], items[4];
    for (; k + LANES <= num_words; k += LANES) {
      transpose(words, k, columns);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) {
        NAME(word_items)(codes, columns[j], items);
#pragma GCC unroll 4
        for (int i = 0; i < per_word; i++, out += KEYS) memcpy(out, items + i, sizeof *items);
      }
    }
    for (; k < num_words; k++) {
      for (int i = 0; i < LANES; i++) {
        uint32_t word; /* maybe of two bfloat16 */
        memcpy(&word, words[i] + k, sizeof word);
        columns[0][i] = word;
      }
      NAME(word_items)(codes, columns[0], items);
      for (int i = 0; i < per_word; i++, out += KEYS) memcpy(out, items + i, sizeof *items);
    }
  }
}

/* Rows of a head -> items [depth, KEYS], zero beyond them. Meanwhile fetches the rows `later`. */
static void NAME(pack_keys)(const NAME(kv_format) *format, const uint8_t *rows, slots_t of, uint32_t *packed,
                            slots_t later) {
  FOR_ROWS(format->codes, NAME(pack_words), format, rows, of, packed, later)
}

INLINE void NAME(pack_rows)(const int codes, const NAME(kv_format) *format, const uint8_t *rows, slots_t of,
                            uint32_t *packed, slots_t later) {
  const int64_t head_dim = format->head_dim, used = ceil_div(of.count, PACKED);
  for (int64_t i = 0; i < used; i++) {
    const uint8_t *together[PACKED];
    for (int64_t j = 0; j < PACKED; j++) {
      together[j] = NAME(row_at)(format, rows, of, i * PACKED + j); /* zeros for a key without a partner */
      NAME(fetch_row)(format, rows, later, i * PACKED + j);
    }
    u32v items[2];
    uint32_t *out = packed + i * head_dim;
    for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
      const int are_two = d + LANES < head_dim;
      if (are_two)
        NAME(value_items)(codes, 2, together, d, items);
      else
        NAME(value_items)(codes, 1, together, d, items);
      memcpy(out + d, items, sizeof *items); /* both at once would go through memory */
      if (are_two) memcpy(out + d + LANES, items + 1, sizeof *items);
    }
  }
  memset(packed + used * head_dim, 0, (KEYS / PACKED - used) * head_dim * 4);
}

/* Rows of a head -> items [KEYS / PACKED, head_dim], zero beyond them. Meanwhile fetches the rows `later`. */
static void NAME(pack_values)(const NAME(kv_format) *format, const uint8_t *rows, slots_t of, uint32_t *packed,
                              slots_t later) {
  FOR_ROWS(format->codes, NAME(pack_rows), format, rows, of, packed, later)
}
#undef PAIRS
