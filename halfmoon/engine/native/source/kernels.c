/* The CPU kernels of the engine, for float32 and bfloat16. Compiled on the machine that runs them (../compiler.py). */

#include "vector.h"

#include "amx.h"

#include "team.h"

#include "attention_plan.h"

#include "sampling.h"

#include "quantised.h"

#include "amx_quantised.h"

#include "codes.h"

#include "quantised_pack.h"

/* rows.h: a task is so many rows. */
#define ROWS_PER_TASK 32
#define ROWS_AHEAD 16 /* how far ahead rows are fetched that lie too far apart for the processor to foresee */

static int64_t num_row_tasks(int64_t num_rows) { return (num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK; }
static int64_t first_row(long task) { return task * ROWS_PER_TASK; }
static int64_t end_row(long task, int64_t num_rows) {
  return num_rows < first_row(task + 1) ? num_rows : first_row(task + 1);
}
static const float *row_of(const float *rows, int64_t row, int64_t size) { return rows ? rows + row * size : 0; }
/* Never inlined: the compiler may fuse its products in one place and not in another. */
static __attribute__((noinline)) float sum_of_squares(const float *x, int64_t size) {
  float sum = 0;
  for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
  return sum;
}
static void fetch_to_write(const void *memory, int64_t num_bytes) {
  for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch((const char *)memory + at, 1);
}

/* linear.h */
#define PANEL 64
#define LINEAR_ROWS 96      /* most rows of a task */
#define LINEAR_DEPTH 1024   /* items of a panel that are multiplied before the next ones */
#define LEAST_ROWS 32       /* of a task, if there are as many */
#define FETCHING_ROWS 2     /* from which on panels are fetched; a processor that reads for one row foresees enough */

/* float32 */
#define T float
#define NAME(x) x##_f32
#define LOAD load_f32
#define STORE store_f32
#define TO_FLOAT(x) (x)
#define FROM_FLOAT(x) (x)
#define PACKED 1
#define ITEMS(items, row, size) memcpy(items, row, (size) * 4)
#define STORE_ITEMS(row, j, x) store_f32((row) + (j) * LANES, x)
#define EXP2 exp2_f32 /* of what STORE_ITEMS stores */
#define DOT(sum, item, row) ((sum) + (f32v)((u32v){} + (item)) * (f32v)(row))
#define PRODUCT NAME(product)
#define LINEAR_PRODUCT NAME(fetching_product)
#define END_PRODUCTS() /* after the last one of a task */
#define BLOCK_ROWS 48  /* rows whose scores stay near until they are used */
#define NUM_BLOCKS 1   /* of which there are scores at a time */
#include "rows.h"
#include "product.h"
#include "kv_rows.h"
#include "attention.h"
#include "linear.h"
#include "quantised_linear.h"
#include "layers.h"
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
#undef STORE_ITEMS
#undef EXP2
#undef DOT
#define PACKED 2
#define ITEMS(items, row, size) memcpy(items, row, (size) * 2)
#define STORE_ITEMS(row, j, x) store_bf16((uint16_t *)(row) + (j) * LANES, x)
#define EXP2 exp2_bf16
#define DOT(sum, item, row) \
  ((f32v)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_epi32((int)(item)), (__m512bh)(row)))
#else
#define ITEMS(items, row, size) widen_bf16((float *)(items), row, size)

static void widen_bf16(float *items, const void *numbers, int64_t size) {
  const uint16_t *row = numbers;
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES) store_f32(items + d, load_bf16(row + d));
  for (; d < size; d++) items[d] = bf16_to_f32(row[d]);
}
#endif
#include "rows.h"
#include "product.h"
#ifdef HAS_AMX
#include "amx_product.h"
#undef PRODUCT
#undef END_PRODUCTS
#undef BLOCK_ROWS
#undef NUM_BLOCKS
#undef PANEL
#undef LINEAR_ROWS
#undef LINEAR_DEPTH
#undef LINEAR_PRODUCT
#undef FETCHING_ROWS
#define PRODUCT product_fastest
#define LINEAR_PRODUCT fetching_product_fastest
#define END_PRODUCTS release_tiles
#define BLOCK_ROWS 32
#define NUM_BLOCKS 3
#define PANEL 32          /* with the depth: 40 KiB, in the first-level cache while tiles of rows pass */
#define LINEAR_ROWS 512
#define LINEAR_DEPTH 320
#define FETCHING_ROWS 1
#endif
#include "kv_rows.h"
#include "attention.h"
#ifndef HAS_BF16_DOT
#include "widened.h"
#undef LINEAR_PRODUCT
#define LINEAR_PRODUCT product_widened
#endif
#include "linear.h"
#include "quantised_linear.h"
#include "layers.h"

/* What multiplies bfloat16, in the words of /proc/cpuinfo; empty where numbers are widened to float32 first. */
const char *bf16_instructions(void) {
#ifdef HAS_AMX
  if (amx_is_permitted) return "amx_bf16";
#endif
#ifdef HAS_BF16_DOT
  return "avx512_bf16";
#else
  return "";
#endif
}
