/* The CPU kernels of the engine, for float32 and bfloat16. Compiled on the machine that runs them (../compiler.py). */

#include "vector.h"

#include "team.h"

#include "attention_plan.h"

/* rows.h: a task is so many rows. */
#define ROWS_PER_TASK 32

static int64_t num_row_tasks(int64_t num_rows) { return (num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK; }
static int64_t first_row(long task) { return task * ROWS_PER_TASK; }
static int64_t end_row(long task, int64_t num_rows) {
  return num_rows < first_row(task + 1) ? num_rows : first_row(task + 1);
}

/* linear.h */
#define PANEL 64
#define LINEAR_ROWS 96
#define LINEAR_DEPTH 1024 /* items of a panel that are multiplied before the next ones */

/* float32 */
#define T float
#define NAME(x) x##_f32
#define LOAD load_f32
#define STORE store_f32
#define TO_FLOAT(x) (x)
#define FROM_FLOAT(x) (x)
#define PACKED 1
#define ITEMS(items, row, size) memcpy(items, row, (size) * 4)
#define PAIR(items, row, same_row, size) ITEMS(items, row, size)
#define LOW_ITEM(x) 0 /* never needed: every key has an item of its own */
#define STORE_ITEMS(row, j, x) store_f32((row) + (j) * LANES, x)
#define DOT(sum, item, row) ((sum) + (f32v)((u32v){} + (item)) * (f32v)(row))
#include "rows.h"
#include "product.h"
#include "attention.h"
#include "linear.h"
#undef T
#undef NAME
#undef LOAD
#undef STORE
#undef TO_FLOAT
#undef FROM_FLOAT
#undef ITEMS

/* bfloat16 */
#define T uint16_t
#define NAME(x) x##_bf16
#define LOAD load_bf16
#define STORE store_bf16
#define TO_FLOAT bf16_to_f32
#define FROM_FLOAT f32_to_bf16
#ifdef HAS_BF16_DOT
#undef PACKED
#undef PAIR
#undef LOW_ITEM
#undef STORE_ITEMS
#undef DOT
#define PACKED 2
#define ITEMS(items, row, size) memcpy(items, row, (size) * 2)
#define PAIR pair_bf16
#define LOW_ITEM(x) (x)
#define STORE_ITEMS(row, j, x) store_bf16((uint16_t *)(row) + (j) * LANES, x)
#define DOT(sum, item, row) \
  ((f32v)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_epi32((int)(item)), (__m512bh)(row)))

/* Two rows -> pairs of their items. */
static void pair_bf16(uint32_t *items, const uint16_t *low_row, const uint16_t *high_row, int64_t size) {
  for (int64_t d = 0; d < size; d += LANES) {
    u16v low, high;
    memcpy(&low, low_row + d, sizeof low);
    memcpy(&high, high_row + d, sizeof high);
    u32v both = __builtin_convertvector(low, u32v) | (__builtin_convertvector(high, u32v) << 16);
    memcpy(items + d, &both, sizeof both);
  }
}
#else
#define ITEMS(items, row, size) widen_bf16((float *)(items), row, size)

static void widen_bf16(float *items, const uint16_t *row, int64_t size) {
  for (int64_t d = 0; d < size; d += LANES) store_f32(items + d, load_bf16(row + d));
}
#endif
#include "rows.h"
#include "product.h"
#include "attention.h"
#include "linear.h"

/* Whether `linear` matches oneDNN: over bfloat16 with dot products, and without the tiles that oneDNN uses. */
int has_fast_linear_f32(void) { return 1; }
int has_fast_linear_bf16(void) {
#if defined(HAS_BF16_DOT) && !defined(__AMX_BF16__)
  return 1;
#else
  return 0;
#endif
}
