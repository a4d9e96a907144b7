/* Work for several threads: a team of this library's own, whose threads nobody waits for unless they have work.
 *
 * The caller and the team's threads claim tasks one by one, so a thread that has no core costs nothing: the others claim
 * what it would have done. (OpenMP waits for every thread at the end of every region, and stops spinning as soon as a
 * second thread of the process has used it.) Between calls threads spin for a bounded time, giving their core to
 * whoever wants it, and then sleep.
 */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#define MAX_THREADS 256
#define TASKS_PER_THREAD 8       /* at least, where work can be cut so, for threads to end together */
#define STRETCHES_PER_THREAD 2   /* long ones, since memory is read in order within them */
#define SHARES_OF_EXCESS 32      /* a thread may have that part of its share more for their sake */
#define SPIN_NS 200000          /* a step's gaps between two calls are shorter */
#define SPINS_BEFORE_YIELD 100
#define LAST_SPINS 10000        /* of the caller, while the others end their last tasks */
#define STACK_BYTES (4 << 20)   /* attention's tiles lie there */
#define NEAR_BYTES (1 << 20)    /* that fit into the second-level cache beside all else */
#define CLOSED 0xffffffffu      /* a claim that no thread can make */

typedef void (*task_function)(void *args, long index);

typedef struct {
  /* Half the number of a job, and the next of its tasks. Whoever counts it up runs that task. */
  _Alignas(64) atomic_ullong claim;
  _Alignas(64) atomic_long num_done;
  /* Of the job; they change while the claim is CLOSED. Stored to release and loaded to acquire: a thread that reads the
   * next job's finds the claim CLOSED afterwards, in whatever order its processor makes stores visible. */
  _Alignas(64) _Atomic(task_function) task;
  _Atomic(void *) args;
  atomic_long num_tasks;
  atomic_int num_members; /* threads of the job, the caller's included */
  _Alignas(64) atomic_int num_asleep;
  atomic_flag is_busy;
  pthread_mutex_t sleep;
  pthread_cond_t wake;
  int num_started; /* threads, besides callers */
} team_t;

static team_t team = {.is_busy = ATOMIC_FLAG_INIT, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

#define LOAD_ACQUIRE(field) atomic_load_explicit(&(field), memory_order_acquire)
#define STORE_RELEASE(field, value) atomic_store_explicit(&(field), value, memory_order_release)

static void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Runs tasks of the job that is open until none is left unclaimed. */
static void run_open_tasks(int member) {
  for (;;) {
    unsigned long long claim = atomic_load(&team.claim);
    const uint32_t index = (uint32_t)claim;
    if (index == CLOSED || index >= LOAD_ACQUIRE(team.num_tasks) || member >= LOAD_ACQUIRE(team.num_members)) return;
    const task_function task = LOAD_ACQUIRE(team.task);
    void *args = LOAD_ACQUIRE(team.args);
    /* The job has not changed in between, or this fails. */
    if (!atomic_compare_exchange_weak(&team.claim, &claim, claim + 1)) continue;
    task(args, index);
    atomic_fetch_add(&team.num_done, 1);
  }
}

static uint32_t job_now(void) { return (uint32_t)(atomic_load(&team.claim) >> 32); }

/* Waits for another job than `job`: spinning first, then asleep. */
static void await_job(uint32_t job) {
  const int64_t until_ns = now_ns() + SPIN_NS;
  for (int spins = 0; job_now() == job; spins++) {
    if (spins < SPINS_BEFORE_YIELD) {
      pause_briefly();
    } else if (now_ns() < until_ns) {
      sched_yield();
    } else {
      pthread_mutex_lock(&team.sleep);
      atomic_fetch_add(&team.num_asleep, 1);
      while (job_now() == job) pthread_cond_wait(&team.wake, &team.sleep);
      atomic_fetch_sub(&team.num_asleep, 1);
      pthread_mutex_unlock(&team.sleep);
    }
  }
}

static void *serve_team(void *data) {
  const int member = (int)(intptr_t)data;
  for (uint32_t job = job_now();;) {
    run_open_tasks(member);
    await_job(job);
    job = job_now();
  }
  return 0;
}

/* In a child process: the parent's threads did not survive the fork, in whatever they were. */
static void forget_team(void) {
  team.num_started = 0;
  atomic_store(&team.num_asleep, 0);
  atomic_flag_clear(&team.is_busy);
  pthread_mutex_init(&team.sleep, 0);
  pthread_cond_init(&team.wake, 0);
}
__attribute__((constructor)) static void expect_forks(void) { pthread_atfork(0, 0, forget_team); }

/* Starts threads until there are `num_threads` with the caller. Returns how many there are. */
static int started(int num_threads) {
  if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
  sigset_t all, before;
  pthread_attr_t attributes;
  while (team.num_started < num_threads - 1) {
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of Python */
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    const int failed = pthread_create(&thread, &attributes, serve_team, (void *)(intptr_t)(team.num_started + 1));
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (failed) break;
    team.num_started++;
  }
  return team.num_started + 1 < num_threads ? team.num_started + 1 : num_threads;
}

/* How many threads the team of this process has, besides callers. */
int num_team_threads(void) { return team.num_started; }

/* Runs task(args, 0 .. num_tasks - 1), each once, the first ones first. A second caller at the same time runs alone. */
static void run_tasks(task_function task, void *args, long num_tasks, int num_threads) {
  if (num_tasks < num_threads) num_threads = (int)num_tasks;
  if (num_threads <= 1 || num_tasks >= CLOSED || atomic_flag_test_and_set(&team.is_busy)) {
    for (long index = 0; index < num_tasks; index++) task(args, index);
    return;
  }
  const unsigned long long job = (unsigned long long)(job_now() + 1) << 32;
  atomic_store(&team.claim, (job - (1ull << 32)) | CLOSED);
  STORE_RELEASE(team.num_members, started(num_threads));
  STORE_RELEASE(team.task, task);
  STORE_RELEASE(team.args, args);
  STORE_RELEASE(team.num_tasks, num_tasks);
  atomic_store(&team.num_done, 0);
  atomic_store(&team.claim, job);
  if (atomic_load(&team.num_asleep)) {
    pthread_mutex_lock(&team.sleep);
    pthread_cond_broadcast(&team.wake);
    pthread_mutex_unlock(&team.sleep);
  }
  run_open_tasks(0);
  for (int spins = 0; atomic_load(&team.num_done) < num_tasks; spins++) {
    if (spins < LAST_SPINS)
      pause_briefly();
    else
      sched_yield();
  }
  atomic_flag_clear(&team.is_busy);
}

/* How many of `num` things that lie one after the other a task has: a thread reads them fastest in a few long stretches,
 * or in more, if otherwise it had noticeably more to do than the others. */
static int64_t stretch_of(int64_t num, int num_threads) {
  const int64_t share = ceil_div(num, num_threads), most = share + share / SHARES_OF_EXCESS;
  int64_t stretch = num > 0 ? ceil_div(num, STRETCHES_PER_THREAD * num_threads) : 1;
  while (ceil_div(ceil_div(num, stretch), num_threads) * stretch > most) stretch--;
  return stretch;
}

/* Rows of a task where as many rows are `times` tasks: `most`, or half as many and again. Down to four times `least` until
 * they stay in the second-level cache while weights pass, and to `least` until there are tasks enough for threads to end
 * together. row_bytes: what is read of a row. */
static int64_t rows_of_tasks(int64_t num_rows, int64_t row_bytes, int64_t times, int64_t most, int64_t least,
                             int num_threads) {
  int64_t rows = most;
  while (rows * row_bytes > NEAR_BYTES && rows > 4 * least) rows /= 2;
  while (times * ceil_div(num_rows, rows) < TASKS_PER_THREAD * num_threads && rows >= 2 * least) rows /= 2;
  return rows;
}
