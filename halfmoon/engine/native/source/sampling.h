/* The next token of each row of logits: penalties, temperature, top-k, min-p, top-p and the draw of ../../sampler.py;
 * and log-probabilities.
 *
 * A row is one thread's. What is added up is added in groups of GROUP numbers, within chunks, in the order of the
 * tokens: a row's token depends on neither other rows nor threads. Less likely tokens are left out without sorting: the
 * least weight that is kept is searched for among the bits of its number.
 */
#pragma once

#define GROUP 16        /* numbers that are added to different sums, whatever LANES is */
#define CHUNK 1024      /* numbers that are added in float32, before their sums are in float64 */
#define THRESHOLDS 7    /* that a pass over the weights tries at once */
#define WHOLE_PASSES 3  /* over all weights, before those in question are put together */
#define NO_TOKEN (-1)

typedef struct {
  const float *logits;
  const int64_t *ids; /* [num_ids], the prompt's and the output's tokens; only read where there are penalties */
  int64_t num_ids, num_prompt;
  uint64_t seed, position;
  int64_t top_k; /* 0: any number */
  double top_p, min_p, temperature; /* temperature 0: the likeliest token */
  double repetition_penalty, presence_penalty, frequency_penalty;
} draw_t;

/* Log-probabilities that are wanted of a row: the token's, and the largest ones. */
typedef struct {
  const float *logits;
  int64_t token, num_top;
  double *logprob, *top; /* [1], [num_top] */
  int64_t *top_ids;      /* [num_top], NO_TOKEN behind the last one */
} logprobs_t;

typedef struct {
  const draw_t *draws;
  const logprobs_t *wanted;
  int64_t num_rows, vocab_size, num_tasks;
  float *room; /* [num_tasks, ROOMS, padded vocab_size] */
  int64_t *tokens;
} sampling_args;

#define ROOMS 3

static int64_t padded(int64_t size) { return ceil_div(size, CHUNK) * CHUNK; }

/* The sums of GROUP numbers' worth of lanes, in pairs. */
INLINE double sum_of_group(const f32v *lanes) {
  float numbers[GROUP];
  double sums[GROUP];
  memcpy(numbers, lanes, sizeof numbers);
  for (int i = 0; i < GROUP; i++) sums[i] = numbers[i];
  for (int half = GROUP / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  return sums[0];
}

/* The first of the largest logits, and that one; NO_TOKEN if it is not finite, or one is not a number. */
static int64_t likeliest(const float *logits, int64_t size, float *most) {
  int64_t best = 0;
  i32v strange = {};
  *most = -INFINITY;
  for (int64_t begin = 0; begin < size; begin += CHUNK) {
    const int64_t end = begin + part_size(begin, size, CHUNK);
    f32v largest = splat(-INFINITY);
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
      const f32v x = load_f32(logits + i);
      strange |= x != x;
      largest = max_f32(largest, x);
    }
    float here = max_of(largest);
    for (; i < end; i++) {
      if (logits[i] != logits[i]) return NO_TOKEN;
      if (logits[i] > here) here = logits[i];
    }
    if (here > *most) *most = here, best = begin;
  }
  for (int i = 0; i < LANES; i++)
    if (strange[i]) return NO_TOKEN;
  if (!isfinite(*most)) return NO_TOKEN;
  while (logits[best] != *most) best++;
  return best;
}

/* Divides logits above 0 by the repetition penalty and multiplies others, for tokens of prompt and output, and takes
 * the other penalties from those of the output. counts: room [size]. Returns 0 for a token outside the vocabulary. */
static int penalise(const draw_t *draw, float *logits, int32_t *counts, int64_t size) {
  memset(counts, 0, size * sizeof(int32_t));
  const float repetition = (float)draw->repetition_penalty;
  for (int64_t i = 0; i < draw->num_ids; i++) {
    const int64_t id = draw->ids[i];
    if (id < 0 || id >= size) return 0;
    if (!counts[id]++) logits[id] = logits[id] > 0 ? logits[id] / repetition : logits[id] * repetition;
  }
  for (int64_t i = 0; i < draw->num_ids; i++) counts[draw->ids[i]] = 0;
  for (int64_t i = draw->num_prompt; i < draw->num_ids; i++) counts[draw->ids[i]]++;
  for (int64_t i = draw->num_prompt; i < draw->num_ids; i++) {
    const int64_t id = draw->ids[i];
    if (counts[id]) logits[id] -= (float)(draw->presence_penalty + draw->frequency_penalty * counts[id]);
    counts[id] = 0;
  }
  return 1;
}

/* weights [padded(size)] = e^((logits - most) / temperature), 1 at most; 0 below 2^-126 and behind the last. */
static void weigh(const float *logits, int64_t size, float most, double temperature, float *weights) {
  const float factor = (float)(LOG2_E / temperature);
  for (int64_t i = 0; i < padded(size); i += LANES) {
    f32v x = splat(-INFINITY);
    if (i + LANES <= size)
      x = load_f32(logits + i);
    else if (i < size)
      memcpy(&x, logits + i, (size - i) * sizeof(float));
    const f32v power = (x - most) * factor, least = splat(-126.0f);
    store_f32(weights + i, choose(power >= least, exp2_f32(max_f32(least, power)), splat(0)));
  }
}

/* masses[j] = the sum of the weights that are at least thresholds[j], or their number. size: of whole chunks. */
static void add_masses(const float *weights, int64_t size, const int32_t *thresholds, int by_count, double *masses) {
  f32v least[THRESHOLDS];
  for (int j = 0; j < THRESHOLDS; j++) least[j] = (f32v)((i32v){} + thresholds[j]), masses[j] = 0;
  for (int64_t begin = 0; begin < size; begin += CHUNK) {
    f32v sums[THRESHOLDS][GROUP / LANES] = {};
    for (int64_t i = begin; i < begin + CHUNK; i += GROUP)
#pragma GCC unroll 2
      for (int v = 0; v < GROUP / LANES; v++) {
        const f32v weight = load_f32(weights + i + v * LANES), one = by_count ? splat(1) : weight;
#pragma GCC unroll 8
        for (int j = 0; j < THRESHOLDS; j++) sums[j][v] += (f32v)((i32v)one & (weight >= least[j]));
      }
    for (int j = 0; j < THRESHOLDS; j++) masses[j] += sum_of_group(sums[j]);
  }
}

/* Which tokens are kept: those of larger weight than `bits` is the number of, and the first `num_equal` of that weight. */
typedef struct {
  int32_t bits;
  int64_t num_equal;
} cut_t;

INLINE float weight_of(int32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
INLINE int32_t bits_of(float x) { int32_t bits; memcpy(&bits, &x, sizeof bits); return bits; }

/* The weights whose bits are from `low` on and below `high`, and zeros up to whole chunks. Returns how many. */
static int64_t collect(const float *weights, int64_t size, int32_t low, int32_t high, float *into) {
  int64_t count = 0;
  for (int64_t i = 0; i < size; i += LANES) {
    const i32v bits = (i32v)load_f32(weights + i), is_in = (bits >= low) & (bits < high);
    if (!any_above((f32v)(is_in & (i32v)splat(1)), 0)) continue;
    for (int lane = 0; lane < LANES; lane++) {
      into[count] = weights[i + lane];
      count += is_in[lane] & 1;
    }
  }
  memset(into + count, 0, (padded(count) - count) * sizeof(float));
  return padded(count);
}

/* The fewest tokens, likeliest first and of equal ones the first, whose weights reach `wanted`, or whose number does.
 * num_whole: see WHOLE_PASSES. near: room of as many weights. */
static cut_t find_cut(const float *weights, int64_t size, double wanted, int by_count, int num_whole, float *near) {
  int32_t low = 0, high = bits_of(1.0f) + 1, tried[THRESHOLDS]; /* what is at least `low` reaches it; not so `high` */
  double above = 0, base = 0, masses[THRESHOLDS];               /* of what is at least `high` */
  static const int32_t octaves[THRESHOLDS] = {24, 15, 11, 8, 6, 4, 2};
  for (int pass = 0; high - low > 1; pass++) {
    if (pass == num_whole) {
      size = collect(weights, size, low ? low : 1, high, near);
      weights = near, base = above;
    }
    for (int j = 0; j < THRESHOLDS; j++)
      tried[j] = pass ? low + 1 + (int32_t)((int64_t)(high - low - 1) * j / THRESHOLDS) : (127 - octaves[j]) << 23;
    add_masses(weights, size, tried, by_count, masses);
    for (int j = 0; j < THRESHOLDS; j++)
      if (base + masses[j] >= wanted)
        low = tried[j];
      else if (tried[j] < high)
        high = tried[j], above = base + masses[j];
  }
  const double missing = by_count ? wanted - above : ceil((wanted - above) / weight_of(low));
  return (cut_t){low, low == 0 || missing < 1 ? 1 : missing > 1e15 ? (int64_t)1e15 : (int64_t)missing};
}

/* Makes zeros of the weights that are not kept. */
static void keep(float *weights, int64_t size, cut_t cut) {
  const f32v one = splat(1);
  for (int64_t i = 0; i < size; i += LANES) {
    const f32v weight = load_f32(weights + i);
    const i32v is_equal = (i32v)weight == cut.bits;
    store_f32(weights + i, (f32v)((i32v)weight & ((i32v)weight >= cut.bits)));
    if (!any_above((f32v)((i32v)one & is_equal), 0)) continue;
    for (int lane = 0; lane < LANES; lane++)
      if (is_equal[lane] && cut.num_equal-- <= 0) weights[i + lane] = 0;
  }
}

/* sums [size / CHUNK]: of each chunk. Returns their sum. */
static double add_chunks(const float *weights, int64_t size, double *sums) {
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += CHUNK) {
    f32v lanes[GROUP / LANES] = {};
    for (int64_t i = begin; i < begin + CHUNK; i += GROUP)
      for (int v = 0; v < GROUP / LANES; v++) lanes[v] += load_f32(weights + i + v * LANES);
    total += sums[begin / CHUNK] = sum_of_group(lanes);
  }
  return total;
}

/* The token whose share of the sum of weights, in order, contains `wanted`. */
static int64_t share_at(const float *weights, int64_t size, const double *sums, double wanted) {
  int64_t chunk = 0, i;
  double before = 0;
  for (; chunk + 1 < size / CHUNK && before + sums[chunk] <= wanted; chunk++) before += sums[chunk];
  for (i = chunk * CHUNK; i < size; i++) /* into the next chunk where roundings differ */
    if ((before += weights[i]) > wanted) return i;
  while (i > 0 && weights[--i] <= 0);
  return i;
}

/* The number in [0, 1) for (seed, position): the first of Philox 4x64-10 (Salmon et al., 2011), as NumPy makes it. */
double uniform_number(uint64_t seed, uint64_t position) {
  uint64_t counter[4] = {position + 1, 0, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; round++) {
    const unsigned __int128 a = (unsigned __int128)0xD2E7470EE14C6C93 * counter[0];
    const unsigned __int128 b = (unsigned __int128)0xCA5A826395121157 * counter[2];
    const uint64_t next[4] = {(uint64_t)(b >> 64) ^ counter[1] ^ key[0], (uint64_t)b,
                              (uint64_t)(a >> 64) ^ counter[3] ^ key[1], (uint64_t)a};
    memcpy(counter, next, sizeof counter);
    key[0] += 0x9E3779B97F4A7C15, key[1] += 0xBB67AE8584CAA73B;
  }
  return (double)(counter[0] >> 11) * 0x1p-53;
}

/* room: of this task. */
static int64_t draw_token(const draw_t *draw, int64_t size, float *room) {
  const int64_t num = padded(size);
  float *weights = room, *near = weights + num, *penalised = near + num, most;
  const float *logits = draw->logits;
  if (draw->repetition_penalty != 1 || draw->presence_penalty != 0 || draw->frequency_penalty != 0) {
    memcpy(penalised, logits, size * sizeof(float));
    if (!penalise(draw, penalised, (int32_t *)near, size)) return NO_TOKEN;
    logits = penalised;
  }
  const int64_t best = likeliest(logits, size, &most);
  if (best == NO_TOKEN || draw->temperature == 0) return best;
  weigh(logits, size, most, draw->temperature, weights);
  const int has_top_k = draw->top_k > 0 && draw->top_k < size;
  if (has_top_k) keep(weights, num, find_cut(weights, num, (double)draw->top_k, 1, WHOLE_PASSES, near));
  if (draw->min_p > 0) keep(weights, num, (cut_t){bits_of((float)draw->min_p), size});
  double sums[num / CHUNK], total = add_chunks(weights, num, sums);
  if (draw->top_p < 1) {
    keep(weights, num, find_cut(weights, num, draw->top_p * total, 0, has_top_k ? 0 : WHOLE_PASSES, near));
    total = add_chunks(weights, num, sums);
  }
  return share_at(weights, num, sums, uniform_number(draw->seed, draw->position) * total);
}

/* The largest logits in falling order, of equal ones the first, and their tokens; less than num_top if fewer are finite. */
static int64_t largest(const float *logits, int64_t size, int64_t num_top, double *top, int64_t *top_ids) {
  int64_t count = 0;
  float least = -INFINITY; /* of those found, once there are num_top */
  for (int64_t begin = 0; begin < size && num_top; begin += LANES) {
    const int64_t end = begin + part_size(begin, size, LANES);
    if (end - begin == LANES && !any_above(load_f32(logits + begin), least)) continue;
    for (int64_t i = begin; i < end; i++) {
      if (!(logits[i] > least)) continue;
      int64_t place = count < num_top ? count++ : num_top - 1;
      for (; place && top[place - 1] < logits[i]; place--) top[place] = top[place - 1], top_ids[place] = top_ids[place - 1];
      top[place] = logits[i], top_ids[place] = i;
      if (count == num_top) least = (float)top[num_top - 1];
    }
  }
  return count;
}

static void find_logprobs(const logprobs_t *wanted, int64_t size, float *weights) {
  float most;
  double sums[padded(size) / CHUNK];
  if (likeliest(wanted->logits, size, &most) == NO_TOKEN) most = NAN; /* so that all are */
  weigh(wanted->logits, size, most, 1, weights);
  const double all = most + log(add_chunks(weights, padded(size), sums));
  *wanted->logprob = wanted->logits[wanted->token] - all;
  const int64_t count = largest(wanted->logits, size, wanted->num_top, wanted->top, wanted->top_ids);
  for (int64_t i = 0; i < wanted->num_top; i++)
    if (i < count)
      wanted->top[i] -= all;
    else
      wanted->top_ids[i] = NO_TOKEN;
}

static void sampling_task(void *data, long task) {
  const sampling_args *a = data;
  float *room = a->room + task * ROOMS * padded(a->vocab_size);
  for (int64_t row = task; row < a->num_rows; row += a->num_tasks)
    if (a->wanted)
      find_logprobs(a->wanted + row, a->vocab_size, room);
    else
      a->tokens[row] = draw_token(a->draws + row, a->vocab_size, room);
}

static int64_t num_sampling_tasks(int64_t num_rows, int num_threads) {
  return num_rows < num_threads ? num_rows : num_threads;
}

/* The numbers that the functions below need room for. */
int64_t sampling_room(int64_t num_rows, int64_t vocab_size, int num_threads) {
  return num_sampling_tasks(num_rows, num_threads) * ROOMS * padded(vocab_size);
}

/* tokens [num_rows] = what is drawn of each row's logits [vocab_size]; NO_TOKEN where nothing can be. */
void sample_tokens(const draw_t *draws, float *room, int64_t *tokens, int64_t num_rows, int64_t vocab_size,
                   int num_threads) {
  const int64_t num_tasks = num_sampling_tasks(num_rows, num_threads);
  sampling_args args = {draws, 0, num_rows, vocab_size, num_tasks, room, tokens};
  run_tasks(sampling_task, &args, num_tasks, num_threads);
}

/* Writes what is wanted of each row. */
void log_probabilities(const logprobs_t *wanted, float *room, int64_t num_rows, int64_t vocab_size, int num_threads) {
  const int64_t num_tasks = num_sampling_tasks(num_rows, num_threads);
  sampling_args args = {0, wanted, num_rows, vocab_size, num_tasks, room, 0};
  run_tasks(sampling_task, &args, num_tasks, num_threads);
}
