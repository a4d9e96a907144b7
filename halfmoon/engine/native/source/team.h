/* Work for several threads, on the pool of torch's own OpenMP runtime.
 *
 * A second pool would take cores from torch's, so nothing here is compiled with OpenMP: the library is given the
 * address of torch's GOMP_parallel, which both GNU's and LLVM's runtimes have.
 */
#pragma once

#include <stdatomic.h>

typedef void (*parallel_t)(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);

static parallel_t parallel = 0;

void use_openmp(parallel_t gomp_parallel) { parallel = gomp_parallel; }

typedef struct {
  void (*task)(void *args, long index);
  void *args;
  long num_tasks;
  atomic_long next;
} team_t;

static void work(void *data) {
  team_t *team = data;
  for (;;) {
    long index = atomic_fetch_add(&team->next, 1);
    if (index >= team->num_tasks) return;
    team->task(team->args, index);
  }
}

/* Runs task(args, 0 .. num_tasks - 1), each once, the first ones first. */
static void run_tasks(void (*task)(void *, long), void *args, long num_tasks, int num_threads) {
  team_t team = {task, args, num_tasks, 0};
  if (num_tasks < num_threads) num_threads = (int)num_tasks;
  if (num_threads <= 1 || !parallel)
    work(&team);
  else
    parallel(work, &team, (unsigned)num_threads, 0);
}
