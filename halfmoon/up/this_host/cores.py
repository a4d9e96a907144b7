"""Where the threads of a host's workers compute, and how they wait. Measured in docs/log/up.md and docs/log/vllm.md."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from halfmoon.host_limits import num_cores, num_threads, physical_cores
from halfmoon.policy.view.worker_view import Role
from halfmoon.up.up_options import UpOptions

VLLM_CORES = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's own variable, which it reads on CPUs alone
_NUM_THREADS = "OMP_NUM_THREADS"
_LEAST_THREADS = 2  # a prompt on one core takes twice as long, while the other workers' cores may be idle


def thread_environment(options: UpOptions, role: Role, index: int, chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the `index`th worker of a role; `chosen`: its own options.

    Workers divide the cores of this host. The threads of our kernels wait as they should by themselves, torch's sleep.
    Those of vLLM spin for a moment, and get cores of their own, since vLLM binds them, unless a CPU quota is smaller
    than this host: which cores are free is then unknown.
    """
    num_workers = options.num_prefill + options.num_decode + options.num_both
    before = {"prefill": 0, "decode": options.num_prefill, "both": options.num_prefill + options.num_decode}
    place = before[role] + index
    is_here = options.on == "this-host"
    if chosen.get("--engine") != "vllm":
        return {"OMP_WAIT_POLICY": "PASSIVE"} | (_thread_count(place, num_workers, chosen) if is_here else {})
    if num_workers == 1:
        return {}
    num_ranks = int(chosen.get("--tensor-parallel", 1))
    cores = physical_cores()
    is_bound = is_here and VLLM_CORES not in os.environ and num_cores() >= len(cores)
    ranks = core_lists(cores, place, num_workers, num_ranks) if is_bound else ""
    return {"GOMP_SPINCOUNT": "1000"} | ({VLLM_CORES: ranks} if ranks else {})


def _thread_count(place: int, num_workers: int, chosen: Mapping[str, str]) -> dict[str, str]:
    """The threads of all ranks of a worker: those that its options name, or its share of the cores."""
    if "--num-threads" in chosen:
        num_ranks = math.prod(int(chosen.get(f"--{one}-parallel", 1)) for one in ("tensor", "pipeline", "sequence"))
        return {_NUM_THREADS: str(int(chosen["--num-threads"]) * num_ranks)}
    if _NUM_THREADS in os.environ:
        return {_NUM_THREADS: str(num_threads())}
    share = num_cores() * (place + 1) // num_workers - num_cores() * place // num_workers
    return {_NUM_THREADS: str(min(max(share, _LEAST_THREADS), num_cores()))}


def threads_text(environments: Mapping[str, Mapping[str, str]]) -> str:
    """Returns what each worker computes with, by name, from its environment; empty if that is not known."""
    parts = []
    for name, environment in environments.items():
        if bound := environment.get(VLLM_CORES):
            parts.append(f"{name} on {bound}")
        elif threads := environment.get(_NUM_THREADS):
            parts.append(f"{name} {threads}")
    return f"threads on {num_cores()} cores: {', '.join(parts)}" if parts else ""


def core_lists(cores: Sequence[int], worker: int, num_workers: int, num_ranks: int) -> str:
    """Returns the cores of each rank of one worker, in vLLM's notation. Empty where there are too few."""
    own = core_share(cores, worker, num_workers)
    if len(cores) < num_workers or len(own) < num_ranks:
        return ""
    return "|".join(",".join(map(str, core_share(own, rank, num_ranks))) for rank in range(num_ranks))


def core_share(cores: Sequence[int], worker: int, num_workers: int) -> Sequence[int]:
    """Returns the cores of one worker of several; all of them where there are fewer cores than workers."""
    if len(cores) < num_workers:
        return cores
    first, last = (len(cores) * at // num_workers for at in (worker, worker + 1))
    return cores[first:last]
