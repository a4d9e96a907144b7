"""Where the threads of a host's workers compute, and how they wait. Measured in docs/log/up.md and docs/log/vllm.md."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from halfmoon.policy.view.worker_view import Role
from halfmoon.up.up_options import UpOptions

VLLM_CORES = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's own variable, which it reads on CPUs alone
_TOPOLOGY = Path("/sys/devices/system/cpu")


def thread_environment(options: UpOptions, role: Role, index: int, chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the `index`th worker of a role; `chosen`: its own options.

    A worker alone on its cores is a fifth faster if its threads spin for a moment. Workers that share cores would take
    them from each other by spinning; those with vLLM get cores of their own, since vLLM binds its threads.
    """
    num_workers = options.num_prefill + options.num_decode + options.num_both
    if chosen.get("--engine") != "vllm":
        return {"GOMP_SPINCOUNT": "1000"} if num_workers == 1 else {"OMP_WAIT_POLICY": "PASSIVE"}
    if num_workers == 1:
        return {}
    before = {"prefill": 0, "decode": options.num_prefill, "both": options.num_prefill + options.num_decode}
    num_ranks = int(chosen.get("--tensor-parallel", 1))
    is_here = options.on == "this-host" and VLLM_CORES not in os.environ
    ranks = core_lists(physical_cores(), before[role] + index, num_workers, num_ranks) if is_here else ""
    return {"GOMP_SPINCOUNT": "1000"} | ({VLLM_CORES: ranks} if ranks else {})


def core_lists(cores: Sequence[int], worker: int, num_workers: int, num_ranks: int) -> str:
    """Returns the cores of each rank of one worker, in vLLM's notation. Empty where there are too few."""
    own = core_share(cores, worker, num_workers)
    if len(cores) < num_workers or len(own) < num_ranks:
        return ""
    return "|".join(",".join(map(str, core_share(own, rank, num_ranks))) for rank in range(num_ranks))


def physical_cores(topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """Returns the first logical CPU of each physical core that this process may use. Empty where Linux is not."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in allowed:
        file = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.setdefault(file.read_text().strip() if file.exists() else str(cpu), cpu)
    return tuple(cores.values())


def core_share(cores: Sequence[int], worker: int, num_workers: int) -> Sequence[int]:
    """Returns the cores of one worker of several; all of them where there are fewer cores than workers."""
    if len(cores) < num_workers:
        return cores
    first, last = (len(cores) * at // num_workers for at in (worker, worker + 1))
    return cores[first:last]
