"""The prompts of a step, where a part of one is fetched from elsewhere."""

from __future__ import annotations

import pytest

from halfmoon.sim.cluster.cluster_spec import BatchLimits
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.job_queues import JobQueues
from halfmoon.sim.worker.kv_memory import KvMemory


@pytest.mark.parametrize("num_long", [1_500, 3_000])
def test_what_was_fetched_while_a_job_waited_is_not_computed(num_long: int) -> None:
    queues = JobQueues(BatchLimits(2_048, 512, 8), KvMemory(500, 1, is_cache=True), 64, keeps_times=False)
    long, fetched = Job(0, 0.0, num_long, 1, []), Job(1, 0.0, 700, 1, list(range(10)))
    fetched.front_end, fetched.load_end = 0, 640
    queues.prompts.add(long)
    queues.prompts.add(fetched)
    first = queues.prompts.chunks(2_048, 0.0)
    assert [(chunk.job, chunk.cached, chunk.num_tokens) for chunk in first] == [(long, 0, 512), (fetched, 640, 60)]
