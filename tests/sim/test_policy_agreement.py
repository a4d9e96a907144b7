"""Under a KV policy, simulated workers hold as many blocks as the engine's, and take the same steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.scheduling.scheduler import Scheduler
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.sequence_queues import SequenceQueues
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.kv_policy import (
    H2O,
    SNAPKV,
    KVPolicy,
    bound_of,
    effective_policy,
    most_seen,
    num_at_once,
    num_pairs,
    parse_kv_policy,
    policy_salt,
)
from halfmoon.pb.types_pb2 import Generation
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.models import latency
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, SloTargets, WorkerGroup
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.result import OUTCOMES
from halfmoon.sim.simulation import simulate
from halfmoon.sim.worker.decode_batch import DecodeBatch
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.job_blocks import JobBlocks
from halfmoon.sim.worker.kv_memory import KvMemory
from halfmoon.sim.workloads.named_workload import named_workload
from halfmoon.sim.workloads.workload import Prefixes
from halfmoon.worker.servicers.wire import handover_tokens
from tests.sim.test_scheduler_agreement import (
    BLOCK_TOKENS,
    CLASSES,
    Rows,
    cases,
    engine_results,
    engine_times,
    simulated_results,
    simulated_times,
)

NUM_BLOCKS = 400
policies = st.builds(
    lambda early, window, chooser: str(KVPolicy(max(early, int(chooser is not None)), window, chooser)),
    *(st.integers(0, 40), st.integers(1, 40), st.sampled_from((None, SNAPKV, H2O))),
)


def engine_blocks(policy: str, prompt: int, output: int, chunk: int, block_tokens: int) -> list[int]:
    """Blocks in use in each step of one request, and of the same again, which finds what it may of the first."""
    cache = PrefixCache(BlockPool(NUM_BLOCKS), block_tokens, lambda salt: b"")
    scheduler = Scheduler(SequenceQueues(cache, block_tokens, SchedulerLimits(chunk, chunk, 4)))
    salt = policy_salt(parse_kv_policy(policy), b"")
    used = []
    for number in range(2):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        sequence = Sequence(EngineRequest(str(number), (1,) * prompt, sampling, tenant_salt=salt), number)
        scheduler.queues.add(sequence)
        while sequence.num_output < output:
            (part,) = scheduler.schedule(0.0).scheduled
            used.append(NUM_BLOCKS - cache.num_available)
            samples = part.samples
            sequence.num_computed += part.num_tokens
            cache.insert(sequence)
            scheduler.queues.blocks.drop_unseen(sequence)
            if samples:
                sequence.token_ids.append(1)
        scheduler.queues.remove(sequence)
    return used


def simulated_blocks(policy: str, prompt: int, output: int, chunk: int, block_tokens: int) -> list[int]:
    kv = KvMemory(NUM_BLOCKS, 1, is_cache=True)
    blocks, decodes = JobBlocks(kv, block_tokens), DecodeBatch(block_tokens)
    used = []
    for _ in range(2):
        num_known = {"snapkv": prompt, "h2o": 0}.get(policy.split(":")[0], prompt + output - 1)
        job = Job(0, 0.0, prompt, output, list(range(num_known // block_tokens)))
        job.keep_by(policy)
        assert blocks.admit(job)
        while job.computed < prompt:
            used.append(NUM_BLOCKS - kv.available)
            job.computed += num_at_once(job.policy, prompt, job.computed, min(chunk, prompt - job.computed))
            blocks.make_known(job, job.computed)
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


@given(policies, st.integers(1, 200), st.integers(2, 60), st.integers(5, 200), st.sampled_from([4, 8, 16]))
def test_blocks_of_a_request_are_those_of_the_engine_in_every_step(
    policy: str, prompt: int, output: int, chunk: int, block_tokens: int
) -> None:
    case = policy, prompt, output, chunk, block_tokens
    assert simulated_blocks(*case) == engine_blocks(*case)


@st.composite
def chats(draw: st.DrawFn) -> tuple[Rows, BatchLimits, list[tuple[int, ...]]]:
    """Requests that begin as earlier ones do, in part: with their prompts, or, when those have ended, their answers."""
    num, waits = draw(st.integers(2, 10)), draw(st.booleans())
    rows, prompts = Rows(), list[tuple[int, ...]]()
    for number in range(num):
        prompt: tuple[int, ...] = ()
        if number and draw(st.booleans()):
            base = draw(st.integers(0, number - 1))
            whole = prompts[base] + (1,) * rows[base][2] * waits  # the test's engine says 1 all the time
            prompt = whole[: draw(st.integers(0, len(whole)))]
        prompt += (2 + number,) * draw(st.integers(1, 50))
        at = rows[-1][0] + (1_000 if waits else draw(st.integers(1, 4))) if rows else 1
        rows.append((at, len(prompt), draw(st.integers(1, 30)), draw(st.integers(0, len(CLASSES) - 1))))
        prompts.append(prompt)
    limits = BatchLimits(draw(st.integers(10, 60)), draw(st.integers(2, 30)), draw(st.integers(2, 8)))
    return rows, limits, prompts


def test_chunks_beside_an_answer_follow_what_it_attends_to() -> None:
    """An answer behind 200 tokens, and a prompt that is computed beside it in chunks as long as its target leaves."""
    rows, limits = [(1, 200, 40, 0), (12, 40, 1, 1)], BatchLimits(64, 64, 4, follows_targets=True)
    for results in (engine_times, simulated_times):
        ends = []
        for kv_policy in (None, "sinks:0+4"):
            classes = tuple(replace(qos, kv_policy=kv_policy) for qos in CLASSES)
            ends.append(results(rows, limits, 100, classes=classes)[1][0])
        assert ends[0] > ends[1]


def prefixes_of(rows: Rows, prompts: list[tuple[int, ...]]) -> Prefixes:
    """Ids of what the prompts begin with, and of what the answers complete."""
    known: dict[tuple[int, ...], int] = {}
    asked, said = list[list[int]](), list[list[int]]()
    for (_, num_prompt, output, _), prompt in zip(rows, prompts, strict=True):
        whole = prompt + (1,) * output
        ends = range(BLOCK_TOKENS, len(whole), BLOCK_TOKENS)
        ids = [known.setdefault(whole[:end], len(known)) for end in ends]
        num_whole = num_prompt // BLOCK_TOKENS
        asked.append(ids[:num_whole])
        said.append(ids[num_whole:])
    columns = [
        (np.array([one for some in ids for one in some], dtype=np.int64), np.cumsum([0, *map(len, ids)]))
        for ids in (asked, said)
    ]
    return Prefixes(BLOCK_TOKENS, *columns[0], Prefixes(BLOCK_TOKENS, *columns[1]))


@given(chats(), st.tuples(*3 * [st.sampled_from([None, "sinks:4+8", "sinks:0+3", "snapkv:9+30", "h2o:4+8"])]))
def test_requests_find_what_the_engines_find_of_those_with_the_same_policy(
    chat: tuple[Rows, BatchLimits, list[tuple[int, ...]]], kv_policies: tuple[str | None, str | None, str | None]
) -> None:
    rows, limits, prompts = chat
    classes = tuple(replace(qos, kv_policy=one) for qos, one in zip(CLASSES, kv_policies, strict=True))
    simulated = simulated_results(rows, limits, 5_000, classes=classes, prefixes=prefixes_of(rows, prompts))
    assert simulated == engine_results(rows, limits, 5_000, classes=classes, prompts=prompts)


def test_only_requests_of_one_policy_share_what_they_computed() -> None:
    """Else the test above might compare requests that find nothing."""
    prompt = tuple(range(2, 66))
    rows = [(1 + 100 * number, 64, 4, number % 2) for number in range(4)]
    found = []
    for kv_policy in ("sinks:4+8", "snapkv:4+8", "h2o:4+8"):
        classes = (CLASSES[0], replace(CLASSES[1], kv_policy=kv_policy))
        prefixes = prefixes_of(rows, 4 * [prompt])
        results = simulated_results(rows, BatchLimits(), 500, classes=classes, prefixes=prefixes)
        found.append([cached for *_, cached in results])
    assert found == [[0, 0, 60, 60], [0, 0, 60, 32], [0, 0, 60, 0]]


@given(cases(), st.sampled_from(["sinks:0+4", "sinks:4+8", "sinks:3+13", "snapkv:4+8", "h2o:4+8"]))
def test_steps_under_a_policy_are_those_of_the_engine(case: tuple[Rows, BatchLimits, int], policy: str) -> None:
    rows, limits, num_blocks = case
    limits = replace(limits, follows_targets=False)  # simulated sequences behind their bound attend to a mean
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


@given(policies, st.integers(0, 500), st.integers(1, 500), st.sampled_from([4, 8]))
def test_forecasts_count_the_pairs_of_a_prompt_nearly_so(policy: str, known: int, new: int, block_tokens: int) -> None:
    """What a token sees grows to the mean and stays there: not half a block further, and back."""
    kept = parse_kv_policy(policy)
    sees = effective_policy(kept, known + new, known)
    forecast = latency.num_pairs(known, new, most_seen(kept, block_tokens)[0])
    assert forecast == pytest.approx(num_pairs(sees, known, new, block_tokens), abs=block_tokens**2 + new / 2)


def one_worker(kv_tokens: int, pair_s: float = 0.0) -> WorkerGroup:
    prefill, step = PrefillModel(0.001, 1e-5, pair_s), StepModel(0.002, 1e-5, 1e-6)
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


@given(policies, st.integers(32, 900))
def test_a_decode_worker_holds_as_much_of_a_second_prompt_as_the_engines(policy: str, prompt: int) -> None:
    """All but the last block of the first one's prompt where all of its KV was handed over, and nothing else."""
    kept, size = parse_kv_policy(policy), 64
    assert kept is not None
    cache = PrefixCache(BlockPool(100), size, lambda salt: b"")
    queues = SequenceQueues(cache, size, SchedulerLimits(512, 512, 4))
    held = []
    for number in range(2):
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        request = EngineRequest(str(number), (1,) * prompt, sampling, tenant_salt=policy_salt(kept, b""))
        sequence = Sequence(request, number)
        sequence.not_handed_over = kept.unseen(prompt, size)
        queues.reserve(sequence)
        held.append(sequence.num_cached)
        queues.start(sequence, 1)
        cache.insert(sequence)
        queues.remove(sequence)
    whole = np.arange(prompt // size)
    prefixes = Prefixes(size, np.concatenate([whole, whole]), np.array([0, len(whole), 2 * len(whole)]))
    workload = replace(named_workload(f"in={prompt},out=20", 0.01, 2, "poisson", 1.0, 0), prefixes=prefixes)
    groups = [replace(one_worker(1 << 20), role=role, prefix_cache=True) for role in ("prefill", "decode")]
    result = simulate(ClusterSpec(tuple(groups), kv_policy=policy), workload)
    num_kept = prompt - len(kept.unseen(prompt, size)) * size
    num_bytes = (2 * num_kept - sum(held)) * one_worker(1).latency.kv_bytes_per_token
    assert result.handover_bytes == pytest.approx(num_bytes)


def test_blocks_of_a_trace_may_be_larger_than_the_workers_and_have_any_ids() -> None:
    """A prompt of 1,024 tokens again under the same policy, and one that differs behind its first 512."""
    ids = np.array([7, 1 << 62, 7, 1 << 62, 7, 5])
    workload = named_workload("in=1024,out=2", 0.01, 3, "poisson", 1.0, 0)
    workload = replace(workload, prefixes=Prefixes(512, ids, np.array([0, 2, 4, 6])))
    cached = []
    for kv_policy in (None, "sinks:4+128", "snapkv:64+64"):
        spec = ClusterSpec((replace(one_worker(1 << 20), prefix_cache=True),), kv_policy=kv_policy)
        cached.append(simulate(spec, workload).cached_tokens.tolist())
    assert cached == [[0, 512, 512], [0, 960, 512], [0, 960, 512]]


@given(policies, st.integers(1, 200), st.integers(1, 60), st.integers(1, 40), st.booleans())
def test_a_request_is_refused_where_the_engine_refuses_it(
    policy: str, prompt: int, output: int, num_blocks: int, is_pair: bool
) -> None:
    """What a policy chooses needs room of its own."""
    size, salt = 8, policy_salt(parse_kv_policy(policy), b"")
    request = EngineRequest("r", (1,) * prompt, SamplingParams(max_tokens=output, ignore_eos=True), tenant_salt=salt)
    limits = RequestLimits(10, 10_000, num_blocks, KVLayout(1, 1, 1, "float16", size))
    try:
        limits.check(Sequence(request, 0))
        fits = prompt + output <= num_blocks * size  # the gateway counts the last token, too
    except InvalidRequest:
        fits = False
    one = one_worker(num_blocks * size)
    groups = (replace(one, role="prefill"), replace(one, role="decode")) if is_pair else (one,)
    workload = named_workload(f"in={prompt},out={output}", 1.0, 2, "poisson", 1.0, 0)
    result = simulate(ClusterSpec(groups, block_tokens=size, kv_policy=policy), workload)
    assert [OUTCOMES[code] for code in result.outcome] == 2 * ["completed" if fits else "refused"]


@pytest.mark.parametrize(("kv_policy", "outcome"), [(None, "refused"), ("sinks:64+128", "completed")])
def test_admission_counts_what_is_kept(kv_policy: str | None, outcome: str) -> None:
    """A step behind 4,000 tokens takes 6 ms, one that sees 224 of them 2 ms."""
    workload = named_workload("in=4000,out=20", 0.5, 3, "poisson", 1.0, 0)
    targets = SloTargets(tpot_s=0.004)
    spec = ClusterSpec((one_worker(1 << 20),), kv_policy=kv_policy, admission="predicted", targets=targets)
    assert {OUTCOMES[code] for code in simulate(spec, workload).outcome} == {outcome}


@pytest.mark.parametrize(
    ("kv_policy", "outcome"), [(None, "refused"), ("sinks:64+128", "completed"), ("snapkv:64+128", "refused")]
)
def test_admission_counts_what_prompts_see(kv_policy: str | None, outcome: str) -> None:
    """A prompt of 4,000 tokens takes 121 ms whole, and 50 ms where each token sees 224 at most."""
    workload = named_workload("in=4000,out=20", 0.5, 3, "poisson", 1.0, 0)
    targets = SloTargets(ttft_s=0.08)
    groups = (one_worker(1 << 20, 1e-8),)
    result = simulate(ClusterSpec(groups, kv_policy=kv_policy, admission="predicted", targets=targets), workload)
    assert {OUTCOMES[code] for code in result.outcome} == {outcome}
    assert outcome == "refused" or (result.ttft_s < 0.06).all()


def test_qos_classes_have_policies_of_their_own() -> None:
    spec = ClusterSpec((one_worker(1 << 20),), classes=(QosClass("a"), QosClass("b", kv_policy="sinks:4+64")))
    assert [qos.kv_policy for qos in spec.qos_classes] == [None, "sinks:4+64"]
    one = ClusterSpec((one_worker(1 << 20),), kv_policy="snapkv:64+64")
    assert [qos.kv_policy for qos in one.qos_classes] == ["snapkv:64+64"]
