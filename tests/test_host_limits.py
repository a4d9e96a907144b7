"""Cores and memory that a process may use: affinity and the limits of its containers count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from halfmoon import host_limits

GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with eight logical CPUs, two of each core, of which seven are allowed, and 16 GiB of free memory."""
    for cpu in range(8):
        write(tmp_path / f"cpu/cpu{cpu}/topology", {"thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"})
    write(tmp_path, {"meminfo": f"MemTotal: 99 kB\nMemFree: 1000 kB\nMemAvailable:    {16 << 20} kB\n"})
    monkeypatch.setattr(host_limits, "_TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(host_limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_limits, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_limits, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(1, 8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def write(directory: Path, texts: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text)


def test_without_limits_the_host_counts(host: Path) -> None:
    assert host_limits.physical_cores() == (1, 2, 3, 4)  # of two threads of a core, the first that is allowed
    assert (host_limits.num_cores(), host_limits.cpu_quota()) == (4, None)
    assert host_limits.free_memory_bytes() == 16 * GIB
    (host / "meminfo").unlink()
    assert host_limits.free_memory_bytes() > 0


def test_the_smallest_limit_on_the_way_to_the_root_counts(host: Path) -> None:
    write(host, {"own": "0::/pods/mine\n"})
    root = host / "cgroup"
    write(root / "pods/mine", {"cpu.max": "max 100000\n", "memory.max": f"{9 * GIB}\n", "memory.current": "0\n"})
    statistics = f"anon 5\nactive_file {GIB}\ninactive_file {GIB}\n"
    limited = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{5 * GIB}\n", "memory.stat": statistics}
    write(root / "pods", {"cpu.max": "250000 100000\n"} | limited)
    assert host_limits.cpu_quota() == 2.5
    assert host_limits.num_cores() == 2
    assert host_limits.free_memory_bytes() == 5 * GIB  # files in the page cache make room


def test_the_older_cgroups_and_a_path_that_only_the_host_sees(host: Path) -> None:
    write(host, {"own": "4:memory:/docker/77\n2:cpu,cpuacct:/docker/77\n0::/\n"})
    root = host / "cgroup"
    write(root / "cpu", {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"})
    statistics = f"inactive_file 1\ntotal_active_file {GIB}\ntotal_inactive_file 0\n"
    used = {"memory.usage_in_bytes": f"{2 * GIB}\n", "memory.stat": statistics}
    write(root / "memory", {"memory.limit_in_bytes": f"{3 * GIB}\n"} | used)
    assert host_limits.num_cores() == 1  # half a core is one thread
    assert host_limits.free_memory_bytes() == 2 * GIB
    write(root / "cpu", {"cpu.cfs_quota_us": "-1\n"})
    assert host_limits.num_cores() == 4


def test_chosen_threads_win(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_limits.num_threads() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "6,2")
    assert host_limits.num_threads() == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert host_limits.num_threads() == 4
