"""Cores and memory that this process may use: CPU affinity and its containers' limits (cgroups v1 and v2) count.

Linux reports the whole machine to `os.cpu_count` and in /proc/meminfo, whatever a container may use of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_THREADS = 4096  # of a process; far more end it: OpenMP does not report threads that it cannot start
_TOPOLOGY = Path("/sys/devices/system/cpu")
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def physical_cores() -> tuple[int, ...]:
    """Returns the first logical CPU of each physical core that this process may use. Empty where Linux is not."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _text(_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        cores.setdefault(siblings or str(cpu), cpu)
    return tuple(cores.values())


def num_cores() -> int:
    """Returns how many threads can compute at once: the physical cores, or the whole ones of a smaller CPU quota."""
    cores = len(physical_cores()) or os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(min(cores, int(quota)), 1)


def num_threads() -> int:
    """Returns how many threads a process should compute with: OMP_NUM_THREADS, or one for each core."""
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(chosen) if chosen.isdecimal() and int(chosen) > 0 else num_cores()


def cpu_quota() -> float | None:
    """Returns the CPU time per second that the containers of this process allow; None without a limit."""
    quotas = []
    for directory in _directories("cpu"):
        words = _text(directory / "cpu.max").split()
        words = words or [_text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")]
        if all(word.isdecimal() for word in words) and float(words[1]):
            quotas.append(float(words[0]) / float(words[1]))
    return min(quotas, default=None)


def free_memory_bytes() -> int:
    """Returns the memory for new allocations, page cache included: the host's, or less in a container with a limit."""
    left = map(_left_bytes, _directories("memory"))
    return min([_free_host_bytes(), *(num_bytes for num_bytes in left if num_bytes is not None)])


def _left_bytes(directory: Path) -> int | None:
    """What a cgroup's limit leaves; None without a limit."""
    limit = _text(directory / "memory.max") or _text(directory / "memory.limit_in_bytes")
    used = _text(directory / "memory.current") or _text(directory / "memory.usage_in_bytes")
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    statistics = dict(line.split() for line in _text(directory / "memory.stat").splitlines())
    files = (f"{prefix}{name}_file" for prefix in ("total_", "") for name in ("active", "inactive"))
    cached = [int(statistics[name]) for name in files if name in statistics][:2]  # total_: of v1, with its children
    return max(int(limit) - int(used) + sum(cached), 0)


def _directories(controller: str) -> Iterator[Path]:
    """The directories of this process's cgroups for a controller, from its own to the root, as far as they exist.

    In a container the root may be its own cgroup, and the path one that only the host can see.
    """
    for line in _text(_OWN_CGROUPS).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount = _CGROUPS  # v2
        elif controller in controllers.split(","):
            mount = _CGROUPS / controller
        else:
            continue
        own = mount / path.lstrip("/")
        yield from (one for one in (own, *own.parents) if one == mount or mount in one.parents)


def _free_host_bytes() -> int:
    for line in _text(_MEMINFO).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    with suppress(AttributeError, ValueError, OSError):  # these names do not exist on every system
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 << 30


def _text(file: Path) -> str:
    """The contents of a file; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
