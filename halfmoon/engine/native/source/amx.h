/* Tiles: registers of up to 16 rows of 64 bytes, and the product of two in bfloat16 (AMX).
 *
 * EMULATE_AMX computes the same in plain C, for tests on machines without them: CC='cc -DEMULATE_AMX'.
 */
#pragma once

#include "vector.h"

#define AMX_ROWS 16
#define AMX_ITEMS 16 /* 32-bit items in a row: floats, or pairs of bfloat16 */
#define NUM_AMX_TILES 8

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} amx_config_t;

#if defined(EMULATE_AMX) && defined(HAS_BF16_DOT)
#define HAS_AMX 1
#include <float.h>

static int ask_for_amx(void) { return 1; }

static _Thread_local struct {
  amx_config_t config;
  uint32_t items[NUM_AMX_TILES][AMX_ROWS][AMX_ITEMS];
} emulated;

/* Denormals count as zero, in what is read and in what is written. */
INLINE float flushed(float x) { return fabsf(x) < FLT_MIN ? 0 : x; }
INLINE float number_of(uint32_t high_half) { float x; memcpy(&x, &high_half, sizeof x); return flushed(x); }

static void emulate_config(const amx_config_t *config) {
  memset(&emulated, 0, sizeof emulated);
  if (config) emulated.config = *config;
}

static void emulate_load(int tile, const void *from, int64_t stride) {
  memset(emulated.items[tile], 0, sizeof emulated.items[tile]);
  for (int i = 0; i < emulated.config.rows[tile]; i++)
    memcpy(emulated.items[tile][i], (const char *)from + i * stride, emulated.config.row_bytes[tile]);
}

static void emulate_store(int tile, void *to, int64_t stride) {
  for (int i = 0; i < emulated.config.rows[tile]; i++)
    memcpy((char *)to + i * stride, emulated.items[tile][i], emulated.config.row_bytes[tile]);
}

/* Even and odd numbers of each pair are summed apart, then added (Intel's manual, TDPBF16PS). */
static void emulate_dot(int sums, int a, int b) {
  for (int i = 0; i < emulated.config.rows[sums]; i++) {
    float even[AMX_ITEMS] = {0}, odd[AMX_ITEMS] = {0}, sum[AMX_ITEMS];
    for (int k = 0; k < AMX_ITEMS; k++) {
      const uint32_t x = emulated.items[a][i][k], *row = emulated.items[b][k];
      const float low = number_of(x << 16), high = number_of(x & 0xffff0000);
      for (int j = 0; j < AMX_ITEMS; j++) {
        even[j] = flushed(fmaf(low, number_of(row[j] << 16), even[j]));
        odd[j] = flushed(fmaf(high, number_of(row[j] & 0xffff0000), odd[j]));
      }
    }
    memcpy(sum, emulated.items[sums][i], sizeof sum);
    for (int j = 0; j < AMX_ITEMS; j++) sum[j] = flushed(sum[j] + flushed(even[j] + odd[j]));
    memcpy(emulated.items[sums][i], sum, sizeof sum);
  }
}

#define AMX_CONFIG(config) emulate_config(config)
#define AMX_RELEASE() emulate_config(0)
#define AMX_ZERO(tile) memset(emulated.items[tile], 0, sizeof emulated.items[tile])
#define AMX_LOAD emulate_load
#define AMX_STREAM emulate_load
#define AMX_STORE emulate_store
#define AMX_DOT emulate_dot

#elif defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023 /* Linux, Documentation/arch/x86/xstate.rst */
#define XFEATURE_XTILEDATA 18

/* Whether the kernel lets this process use tiles. */
static int ask_for_amx(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }

#define AMX_CONFIG _tile_loadconfig
#define AMX_RELEASE _tile_release
#define AMX_ZERO _tile_zero
#define AMX_LOAD _tile_loadd
#define AMX_STREAM _tile_stream_loadd /* what comes once: it need not stay in the first-level cache */
#define AMX_STORE _tile_stored
#define AMX_DOT _tile_dpbf16ps
#endif
