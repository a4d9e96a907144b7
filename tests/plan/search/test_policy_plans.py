"""Plans of requests whose class keeps a part of their KV: more of them fit a worker, and steps are shorter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.kv_policy import parse_kv_policy, policy_salt
from halfmoon.plan.compose_file import compose_text
from halfmoon.plan.plan_file import parse_plan
from halfmoon.plan.planning import make_plan
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.bounds import decode_bound_per_s, prefill_bound_per_s
from halfmoon.plan.search.feasible import NoLayout, feasible_models, options
from halfmoon.sim.cluster.spec_file import read_cluster
from tests.plan.planning_problems import ONE, problem

POLICY = "sinks:64+1024"
LONG = PlanRequest("llama-3-8b", "h100", "in=7000,out=200", 5.0, 0.03, gpus_per_node=1, num_requests=40)


def test_bounds_grow_with_what_is_not_kept() -> None:
    whole, kept = problem(workload="in=7000,out=200"), problem(workload="in=7000,out=200", kv_policy=POLICY)
    model = feasible_models(whole)[ONE]
    for bound, role in ((prefill_bound_per_s, "prefill"), (decode_bound_per_s, "decode")):
        limits = whole.rules.limits[role]  # type: ignore[index]
        plain, under = (bound(model, one.workload, one.goal, limits, one.kept_kv) for one in (whole, kept))
        assert under.most_per_s > plain.most_per_s
        assert under.typical_per_s > plain.typical_per_s
        assert bound(model, whole.workload, whole.goal, limits) == plain


def test_a_plan_under_a_policy_serves_more_and_says_what_it_counts_on(tmp_path: Path) -> None:
    whole, kept = make_plan(LONG, 1), make_plan(replace(LONG, kv_policy=POLICY), 1)
    best_whole, best_kept = whole.plan.best[0], kept.plan.best[0]
    assert best_kept.goodput_per_s > 1.05 * best_whole.goodput_per_s
    (note,) = [note for note in kept.notes if "kv_policy" in note]
    assert "`halfmoon up --plan` gives to all classes" in note
    cluster = yaml.safe_load(kept.file_text)["cluster"]
    assert cluster["kv_policy"] == POLICY
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    assert read_cluster(path).kv_policy == POLICY
    assert "# It counts on kv_policy" in compose_text(parse_plan(kept.file_text, path))
    assert "kv_policy" not in yaml.safe_load(whole.file_text)["cluster"]


@pytest.mark.parametrize(("policy", "chosen"), [(None, 0), ("sinks:64+1024", 0), ("snapkv:512+64", 512)])
def test_workers_have_room_for_all_that_a_request_may_need(policy: str | None, chosen: int) -> None:
    """As the engine asks for it: an answer that is preempted is computed again from prompt and tokens."""
    asked = problem(workload="in=4000,out=200", kv_policy=policy, ttft_s=9.0)
    model, room = feasible_models(asked)[ONE], 4200 + chosen
    assert options(asked, {ONE: replace(model, kv_tokens=room)})
    with pytest.raises(NoLayout, match=f"longest request is {room:,} tokens long"):
        options(asked, {ONE: replace(model, kv_tokens=room - 1)})
    limits = RequestLimits(10, 10_000, -(-(room - 1) // 64), KVLayout(1, 1, 8, "float32", 64))
    salt = policy_salt(None if policy is None else parse_kv_policy(policy), b"")
    request = EngineRequest("a", (1,) * 4000, SamplingParams(max_tokens=200), tenant_salt=salt)
    limits.check(Sequence(request, 0))
    with pytest.raises(InvalidRequest, match="blocks of KV memory"):
        replace(limits, num_blocks=limits.num_blocks - 1).check(Sequence(request, 0))


def test_a_policy_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="write sinks:S"):
        problem(kv_policy="sinks:4")
