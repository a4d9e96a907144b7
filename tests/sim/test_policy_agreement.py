"""Under a KV policy, simulated workers hold as many blocks as the engine's, and take the same steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.scheduling.scheduler import Scheduler
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.kv.kv_policy import OBSERVERS, KVPolicy, parse_kv_policy, policy_salt
from halfmoon.pb.types_pb2 import Generation
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, WorkerGroup
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.simulation import simulate
from halfmoon.sim.worker.decode_batch import DecodeBatch
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.job_blocks import JobBlocks
from halfmoon.sim.worker.kept_kv import bound_of, num_pairs
from halfmoon.sim.worker.kv_memory import KvMemory
from halfmoon.sim.workloads.named_workload import named_workload
from halfmoon.worker.servicers.wire import handover_tokens
from tests.sim.test_scheduler_agreement import CLASSES, Rows, cases, engine_times, simulated_times

NUM_BLOCKS = 400
policies = st.builds(
    lambda early, window, chooses: str(KVPolicy(max(early, int(chooses)), window, chooses)),
    *(st.integers(0, 40), st.integers(1, 40), st.booleans()),
)


def engine_blocks(policy: str, prompt: int, output: int, chunk: int, block_tokens: int) -> list[int]:
    """Blocks in use in each step of one request."""
    cache = PrefixCache(BlockPool(NUM_BLOCKS), block_tokens, root=None)
    scheduler = Scheduler(cache, block_tokens, SchedulerLimits(chunk, chunk, 4))
    salt = policy_salt(parse_kv_policy(policy), b"")
    request = EngineRequest("a", (1,) * prompt, SamplingParams(max_tokens=output, ignore_eos=True), tenant_salt=salt)
    sequence = Sequence(request, 0)
    scheduler.queues.add(sequence)
    used = []
    while sequence.num_output < output:
        (part,) = scheduler.schedule(0.0).scheduled
        used.append(NUM_BLOCKS - cache.num_available)
        samples = part.samples
        sequence.num_computed += part.num_tokens
        scheduler.queues.blocks.drop_unseen(sequence)
        if samples:
            sequence.token_ids.append(1)
    return used


def simulated_blocks(policy: str, prompt: int, output: int, chunk: int, block_tokens: int) -> list[int]:
    kv = KvMemory(NUM_BLOCKS, 1, is_cache=False)
    blocks, decodes = JobBlocks(kv, block_tokens), DecodeBatch(block_tokens)
    job = Job(0, 0.0, prompt, output, [])
    job.keep_by(policy)
    assert blocks.admit(job)
    used = []
    while job.computed < prompt:
        used.append(NUM_BLOCKS - kv.available)
        job.computed = min(job.computed + chunk, prompt)
        blocks.drop_unseen(job, job.computed)
    job.generated = 1
    decodes.add(job, prompt + 1)
    while decodes.size:
        kv.take(decodes.new_blocks(0, 1))
        used.append(NUM_BLOCKS - kv.available)
        for ended in decodes.advance(0.0):
            blocks.leave(ended)
    assert kv.available == NUM_BLOCKS
    return used


@given(policies, st.integers(1, 200), st.integers(2, 60), st.integers(1, 200), st.sampled_from([4, 8, 16]))
def test_blocks_of_a_request_are_those_of_the_engine_in_every_step(
    policy: str, prompt: int, output: int, chunk: int, block_tokens: int
) -> None:
    if policy.startswith("snapkv"):  # the last tokens of a prompt, which choose, run together
        chunk = max(chunk, prompt)
        prompt = max(prompt, OBSERVERS)
        chunk = max(chunk, prompt)
    case = policy, prompt, output, max(chunk, 5), block_tokens
    assert simulated_blocks(*case) == engine_blocks(*case)


@given(cases(), st.sampled_from(["sinks:0+4", "sinks:4+8", "sinks:3+13"]))
def test_steps_under_sinks_are_those_of_the_engine(case: tuple[Rows, BatchLimits, int], policy: str) -> None:
    rows, limits, num_blocks = case
    classes = tuple(replace(qos, kv_policy=policy) for qos in CLASSES)
    assert simulated_times(rows, limits, num_blocks, classes=classes) == engine_times(
        rows, limits, num_blocks, classes=classes
    )


@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 90), st.integers(1, 60), st.sampled_from([4, 8]))
def test_pairs_of_a_prompt_are_those_that_its_tokens_see(
    early: int, window: int, cached: int, new: int, block_tokens: int
) -> None:
    """In whole blocks behind the bound, where the mean is exact."""
    policy = KVPolicy(early, window)
    most = bound_of(policy, block_tokens).most_tokens
    cached, new = most + (cached // block_tokens) * block_tokens, (new // block_tokens + 1) * block_tokens
    seen = [p + 1 - len(policy.unseen(p, block_tokens)) * block_tokens for p in range(cached, cached + new)]
    plain = new * (cached + new / 2) - sum(p + 0.5 for p in range(cached, cached + new))
    assert plain == 0
    assert num_pairs(policy, cached, new, block_tokens) == pytest.approx(sum(one - 0.5 for one in seen), abs=new / 2)
    assert num_pairs(policy, 0, most, block_tokens) == most**2 / 2
    assert num_pairs(None, cached, new, block_tokens) == new * (cached + new / 2)


def one_worker(kv_tokens: int) -> WorkerGroup:
    prefill, step = PrefillModel(0.001, 1e-5, 0.0), StepModel(0.002, 1e-5, 1e-6)
    model = LatencyModel((PrefillPiece(0, prefill),), (StepPiece(0, step),), kv_tokens, 1e5, "test")
    return WorkerGroup("both", 1, model, BatchLimits(), prefix_cache=False)


def test_a_policy_makes_room_for_more_sequences_and_shortens_their_steps() -> None:
    """Long answers to short prompts: memory for four whole ones holds all under a policy."""
    workload = named_workload("in=64,out=2000", 100.0, 16, "poisson", 1.0, 0)
    spec = ClusterSpec((one_worker(4 * 2112),), block_tokens=64)
    whole, kept = simulate(spec, workload), simulate(replace(spec, kv_policy="sinks:64+128"), workload)
    assert whole.workers.num_preempted.sum() > 0
    assert kept.workers.num_preempted.sum() == 0
    assert kept.tpot_s.max() < whole.tpot_s.max()
    few = named_workload("in=64,out=2000", 1.0, 2, "poisson", 1.0, 0)
    alone = ClusterSpec((one_worker(1 << 20),), block_tokens=64)
    whole, kept = simulate(alone, few), simulate(replace(alone, kv_policy="sinks:64+128"), few)
    seen = bound_of(KVPolicy(64, 128), 64).mean_seen
    assert kept.tpot_s.max() <= 0.002 + 2 * (1e-5 + 1e-6 * (seen + 64))
    assert whole.tpot_s.min() > kept.tpot_s.max()


@given(policies, st.integers(32, 900))
def test_as_much_is_handed_over_as_by_workers(policy: str, prompt: int) -> None:
    workload = named_workload(f"in={prompt},out=20", 1.0, 2, "poisson", 1.0, 0)
    groups = [replace(one_worker(1 << 20), role=role) for role in ("prefill", "decode")]
    spec = ClusterSpec(tuple(groups), kv_policy=policy)
    message = Generation(prompt_token_ids=[1] * prompt, tenant_salt=policy_salt(parse_kv_policy(policy), b""))
    result = simulate(spec, workload)
    assert result.outcome.tolist() == [0, 0]
    num_bytes = handover_tokens(message, spec.block_tokens) * one_worker(1).latency.kv_bytes_per_token
    assert result.handover_bytes == pytest.approx(2 * num_bytes)


def test_qos_classes_have_policies_of_their_own() -> None:
    spec = ClusterSpec((one_worker(1 << 20),), classes=(QosClass("a"), QosClass("b", kv_policy="sinks:4+64")))
    assert [qos.kv_policy for qos in spec.qos_classes] == [None, "sinks:4+64"]
    one = ClusterSpec((one_worker(1 << 20),), kv_policy="snapkv:64+64")
    assert [qos.kv_policy for qos in one.qos_classes] == ["snapkv:64+64"]
