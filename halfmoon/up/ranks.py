"""How a rank of a worker on another host is started, by `halfmoon join` or by a cluster engine."""

from __future__ import annotations

from halfmoon.up.supervision.child import ServiceSpec


def rank_spec(name: str, worker: str, model: str, host: str, index: int) -> ServiceSpec:
    """Returns the spec of one rank of the worker that awaits its ranks at `worker` (HOST:PORT).

    `host`: a name that the ranks of one host share; `index`: this one's number among them.
    """
    own = ("--worker", worker, "--model", model, "--host", host, "--index", str(index))
    return ServiceSpec(
        name,
        ("-m", "halfmoon.worker.joined_rank", *own),
        {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"},
        restarts=True,
        cluster_role="worker",
    )
