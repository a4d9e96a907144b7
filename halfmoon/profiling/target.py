"""The workers to be measured, as their gateway shows them, and whether they are idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from halfmoon.errors import InvalidRequest, NoCapacity, Unavailable
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.tls.http_context import unreached

_CALL = aiohttp.ClientTimeout(total=10)
_BUSY = ("num_running", "num_waiting", "num_reserved", "num_held")


@dataclass(frozen=True, slots=True)
class Target:
    """One worker."""

    worker_id: str
    role: Role
    address: str
    model: str
    fingerprint: str
    device: str
    layout: KVLayout
    kv_tokens: int
    context_tokens: int
    max_batch_tokens: int
    chunk_tokens: int
    max_running: int
    tensor_parallel: int
    pipeline_parallel: int
    num_requests: int  # on it, by its last report
    sequence_parallel: int = 1
    nests_steps: bool = False

    @property
    def host(self) -> str:
        """The host that it runs on."""
        return self.address.rpartition(":")[0]

    def can(self, work: str) -> bool:
        """Whether it takes `prefill` or `decode`."""
        return self.role in (work, "both")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A gateway and its workers."""

    url: str
    served_model: str
    workers: tuple[Target, ...]


async def fetch_cluster(session: aiohttp.ClientSession, url: str) -> Cluster:
    """Reads the cluster from the gateway. Raises Unavailable if none answers, InvalidRequest if it requires another
    token.
    """
    try:
        async with session.get(f"{url}/halfmoon/v1/cluster", timeout=_CALL) as response:
            if response.status in (401, 403):
                raise InvalidRequest(f"the gateway at {url} wants the operator token: --token", param="token")
            response.raise_for_status()
            result = await response.json()
        workers = tuple(_target(result["model_fingerprint"], one) for one in result["workers"])
        return Cluster(url, result["served_model"], workers)
    except aiohttp.ClientConnectorError as error:
        raise Unavailable(f"no halfmoon gateway answers at {url}: {unreached(error)}") from error
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        raise Unavailable(f"no halfmoon gateway of this release answers at {url}: {error!r}") from error


def choose_targets(cluster: Cluster, names: Sequence[str]) -> list[Target]:
    """The workers of these ids, or one of each role. Raises InvalidRequest, and NoCapacity for a busy worker."""
    if names:
        known = {worker.worker_id: worker for worker in cluster.workers}
        if unknown := [name for name in names if name not in known]:
            there = ", ".join(sorted(known)) or "none"
            raise InvalidRequest(f"the gateway knows no worker {unknown[0]}: there are {there}", param="worker")
        result = [known[name] for name in names]
    else:
        by_role = {worker.role: worker for worker in sorted(cluster.workers, key=_by_load, reverse=True)}
        result = list(by_role.values())
    for work in ("prefill", "decode"):
        if not any(one.can(work) for one in result):
            described = ", ".join(f"{one.worker_id} ({one.role})" for one in result) or "no worker at all"
            raise InvalidRequest(f"a profile needs a worker that takes {work}; there is {described}", param="worker")
    if spread := next((one for one in result if one.sequence_parallel > 1), None):
        raise InvalidRequest(
            f"{spread.worker_id} shares long prompts among {spread.sequence_parallel} devices, which a profile does "
            "not describe: profile a worker without --sequence-parallel",
            param="worker",
        )
    check_idle(result)
    return result


def check_idle(workers: Sequence[Target]) -> None:
    """Raises NoCapacity if other requests are on one of them."""
    for worker in workers:
        if worker.num_requests:
            raise NoCapacity(
                f"worker {worker.worker_id} is busy ({worker.num_requests} requests): their time would be mistaken "
                "for its own speed. Profile it while it is idle"
            )


def _by_load(target: Target) -> tuple[int, str]:
    return target.num_requests, target.worker_id


def _target(fingerprint: str, one: dict[str, Any]) -> Target:
    layout = KVLayout(**one["layout"])
    return Target(
        one["worker_id"],
        one["role"],
        one["address"],
        one["model"],
        fingerprint,
        one["device"],
        layout,
        one["total_blocks"] * layout.block_tokens,
        one["context_tokens"],
        one["limits"]["step_tokens"],
        one["limits"]["chunk_tokens"],
        one["limits"]["max_running"],
        max(one["parallelism"]["tensor"], 1),
        max(one["parallelism"]["pipeline"], 1),
        sum(one["load"][name] for name in _BUSY),
        one["parallelism"]["sequence"],
        one["limits"].get("nests_steps", False),  # of an older gateway
    )
