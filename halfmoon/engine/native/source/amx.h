/* Tiles: registers of up to 16 rows of 64 bytes, and the product of two in bfloat16 or in bytes (AMX).
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

/* a: four signed bytes to an item, as many items as its rows hold; b: as many rows. */
static void emulate_dot_bytes(int sums, int a, int b) {
  for (int i = 0; i < emulated.config.rows[sums]; i++)
    for (int k = 0; k < emulated.config.row_bytes[a] / 4; k++)
      for (int j = 0; j < AMX_ITEMS; j++)
        for (int byte = 0; byte < 4; byte++)
          emulated.items[sums][i][j] += (uint32_t)((int8_t)(emulated.items[a][i][k] >> 8 * byte) *
                                                   (int8_t)(emulated.items[b][k][j] >> 8 * byte));
}

/* Reads memory behind the compiler's back, as the intrinsics do: what it does not see being read it may leave out. */
#define EMULATE_UNSEEN(function, x, from, y)                                                                         \
  do {                                                                                                               \
    int64_t first = (int64_t)(x), third = (int64_t)(y);                                                              \
    const void *second = (from);                                                                                     \
    __asm__ volatile("movq %%rsp, %%rbx\n\t"                                                                         \
                     "leaq -128(%%rsp), %%rsp\n\tandq $-64, %%rsp\n\t"                                               \
                     "call *%4\n\tmovq %%rbx, %%rsp"                                                                  \
                     : "+D"(first), "+S"(second), "+d"(third), "+m"(emulated)                                        \
                     : "r"(function)                                                                                 \
                     : "rax", "rbx", "rcx", "r8", "r9", "r10", "r11", "cc", "memory", EMULATE_VECTORS);              \
  } while (0)
#define EMULATE_VECTORS                                                                                              \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
      "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",    \
      "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#define CONFIG_TILES(config) EMULATE_UNSEEN(emulate_config, config, 0, 0)
#define LOAD_TILE(tile, from, stride) EMULATE_UNSEEN(emulate_load, tile, from, stride)
#define STREAM_TILE LOAD_TILE
#define AMX_RELEASE() emulate_config(0)
#define AMX_ZERO(tile) memset(emulated.items[tile], 0, sizeof emulated.items[tile])
#define AMX_STORE emulate_store
#define AMX_DOT emulate_dot
#define AMX_DOT_BYTES emulate_dot_bytes

#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(HAS_BF16_DOT) && defined(__linux__)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023 /* Linux, Documentation/arch/x86/xstate.rst */
#define XFEATURE_XTILEDATA 18

/* Whether the kernel lets this process use tiles. Every processor with one of the two products has the other. */
static int ask_for_amx(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }

#define CONFIG_TILES _tile_loadconfig
#define LOAD_TILE _tile_loadd
#define STREAM_TILE _tile_stream_loadd
#define AMX_RELEASE _tile_release
#define AMX_ZERO _tile_zero
#define AMX_STORE _tile_stored
#define AMX_DOT _tile_dpbf16ps
#define AMX_DOT_BYTES _tile_dpbssd
#endif

#ifdef HAS_AMX
/* GCC's intrinsics do not tell the compiler that they read memory (amxtileintrin.h, 12 to 15): it would leave out, or
 * put behind them, stores of what only they read. AMX_STORE's does tell it: one has to stand between loads and anything
 * that overwrites what they read. */
#define WRITTEN(read)                  \
  do {                                 \
    __asm__ volatile("" ::: "memory"); \
    read;                              \
  } while (0)
#define AMX_CONFIG(config) WRITTEN(CONFIG_TILES(config))
#define AMX_LOAD(tile, from, stride) WRITTEN(LOAD_TILE(tile, from, stride))
#define AMX_STREAM(tile, from, stride) WRITTEN(STREAM_TILE(tile, from, stride)) /* need not stay in the first cache */

static int amx_is_permitted;
__attribute__((constructor)) static void permit_amx(void) { amx_is_permitted = ask_for_amx(); }

/* How this thread's tiles are configured: above 0 for numbers (amx_product.h), below for bytes (amx_quantised.h). */
static _Thread_local int64_t tiles_now;

/* Once a task's last product is done. */
static void release_tiles(void) {
  if (tiles_now) AMX_RELEASE();
  tiles_now = 0;
}
#endif
