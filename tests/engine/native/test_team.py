"""The kernels' threads: one team for a process, whoever calls, and none of torch's OpenMP pools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.native import compiler
from halfmoon.engine.native.compiler import compiled
from halfmoon.engine.native.library import NativeLibrary

NUM_CALLS = 200


def library(num_threads: int) -> NativeLibrary:
    return NativeLibrary(compiled(default_cache_dir()), torch.float32, num_threads)


def norms(kernels: NativeLibrary, x: torch.Tensor) -> bool:
    expected = torch.nn.functional.rms_norm(x, x.shape[1:], torch.ones(x.shape[1]), 1e-6)
    results = [kernels.rms_norm(x, torch.ones(x.shape[1]), 1e-6) for _ in range(NUM_CALLS)]
    return all(torch.allclose(result, expected, atol=1e-5) for result in results)


def test_each_task_runs_once_with_more_threads_than_cores() -> None:
    assert norms(library(5), torch.randn(700, 48))


def test_callers_at_once_all_get_their_own_results() -> None:
    inputs = [torch.randn(300 + index, 32) for index in range(4)]
    right: list[bool] = []
    threads = [threading.Thread(target=lambda x=x: right.append(norms(library(3), x))) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * len(inputs)


def test_a_child_process_has_a_team_of_its_own() -> None:
    kernels = library(3)
    assert norms(kernels, torch.randn(300, 32))
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads are the parent's
        is_right = kernels.num_team_threads == 0 and norms(kernels, torch.randn(300, 32))
        os._exit(0 if is_right and kernels.num_team_threads >= 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


JOBS = """
#include "vector.h"

#include "team.h"

static void count(void *args, long index) { ((long *)args)[index]++; }

int main(void) {
  for (int job = 0; job < 20000; job++) {
    long counts[7] = {0};
    const long num_tasks = 2 + job % 6;
    run_tasks(count, counts, num_tasks, 3);
    for (long i = 0; i < num_tasks; i++)
      if (counts[i] != 1) return 1;
  }
  return 0;
}
"""


def test_its_threads_rely_on_no_order_that_only_some_processors_keep(tmp_path: Path) -> None:
    """ThreadSanitizer knows the order that C guarantees, which is what ARM keeps, whatever it runs on."""
    (tmp_path / "jobs.c").write_text(JOBS)
    source = Path(compiler.__file__).parent / "source"
    command = [*compiler._compilers()[0], "-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{source}"]
    built = subprocess.run([*command, "jobs.c", "-o", "jobs"], cwd=tmp_path, capture_output=True, check=False)
    if built.returncode != 0:
        pytest.skip("this compiler has no ThreadSanitizer")
    finished = subprocess.run([str(tmp_path / "jobs")], capture_output=True, text=True, timeout=120, check=False)
    if "unexpected memory mapping" in finished.stderr:
        pytest.skip("ThreadSanitizer does not know this kernel's layout of addresses")
    assert finished.returncode == 0, finished.stderr


STRETCHES = """
#include "vector.h"

#include "team.h"

int main(void) {
  for (int threads = 1; threads <= 16; threads++)
    for (int64_t num = 0; num < 3000; num++) {
      const int64_t stretch = stretch_of(num, threads), share = ceil_div(num, threads);
      if (stretch < 1 || ceil_div(ceil_div(num, stretch), threads) * stretch > share + share / 32) return 1;
      if (share >= 32 && 4 * stretch <= share) return 2;
    }
  return 0;
}
"""


def test_stretches_are_long_whatever_divides_a_weight_and_leave_no_thread_much_more(tmp_path: Path) -> None:
    (tmp_path / "stretches.c").write_text(STRETCHES)
    source = Path(compiler.__file__).parent / "source"
    command = [*compiler._compilers()[0], "-std=gnu11", "-O1", "-w", "-pthread", f"-I{source}", "stretches.c"]
    subprocess.run([*command, "-o", "stretches"], cwd=tmp_path, check=True)
    assert subprocess.run([str(tmp_path / "stretches")], check=False).returncode == 0


WORKER = """
import json, os, sys, threading

from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.warm_up_steps import warm_up_steps

def in_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]

def num_threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    drawn = SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True)
    engine.add(EngineRequest("a", tuple(range(3, 120)), drawn))
    while engine.has_work():
        engine.step()
    return num_threads() - 1  # without the thread that asks, which ends

config = EngineConfig(num_blocks=64, block_tokens=8, num_threads=3, load_threads=1, weights="dummy")
before = num_threads()
engine = in_thread(lambda: Engine(prepare_checkpoint(sys.argv[1]), config))
in_thread(lambda: warm_up_steps(engine))
print(json.dumps([in_thread(compute) - before for _ in range(3)]))
"""


def test_a_worker_computes_with_one_team_and_without_openmp(tmp_path: Path) -> None:
    """Loading, first steps and computing are different threads', as in a worker; each OpenMP pool would add two."""
    many_logits = 70_000  # torch divides a row of these among threads
    config = LlamaConfig(vocab_size=many_logits, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == [2, 2, 2]
