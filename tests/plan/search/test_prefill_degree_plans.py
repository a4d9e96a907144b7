"""Plans in which several prefill workers compute one prompt: chosen where prompts are long and few, and started so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from halfmoon.errors import InvalidRequest
from halfmoon.plan.compose_file import compose_text
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.plan_file import parse_plan
from halfmoon.plan.planning import PlanResult, make_plan
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.feasible import NoLayout
from halfmoon.plan.search.goodput import holds
from halfmoon.plan.summary import summary_of
from halfmoon.plan.targets.target_map import make_map
from halfmoon.sim.cluster.spec_file import read_cluster
from halfmoon.up.config.options import up_options
from halfmoon.up.config.read import read_config
from halfmoon.up.specs.service_specs import gateway_spec
from halfmoon.up.up_options import PreparedModel

# a prompt of 7,000 tokens takes 6.7 s on one worker, 3.5 s on two and 1.9 s on four
LONG = PlanRequest(
    "llama-3-8b", "cpu", "in=7000,out=20", 4.0, 0.3, num_nodes=6, gpus_per_node=1, rate_per_s=0.05, num_requests=30,
    kv_codec="raw",
)  # fmt: skip
DENSE = replace(LONG, workload="in=512,out=64", ttft_s=1.0, rate_per_s=2.0)


def with_degree(request: PlanRequest, most: int = 4) -> PlanResult:
    return make_plan(replace(request, max_prefill_degree=most), 1)


def test_long_prompts_that_are_few_are_planned_over_several_workers() -> None:
    with pytest.raises(NoLayout, match=r"takes 6\.7 s at best .*2 idle workers together meet it: give --max-prefill-d"):
        make_plan(LONG, 1)
    found = with_degree(LONG)
    best = found.plan.best[0]
    assert (best.layout.prefill_degree, str(best.layout)) == (2, "3 prefill TP1 + 1 decode TP1, prefill degree 2")
    trial = layout_trial(found.problem, found.plan.models, best.layout)
    assert holds(trial, 0.05)
    alone = layout_trial(found.problem, found.plan.models, replace(best.layout, prefill_degree=1))
    assert not holds(alone, 0.05)
    assert summary_of(found)["layouts"][0]["prefill_degree"] == 2


def test_a_goodput_is_searched_with_and_without_sharing() -> None:
    found = with_degree(replace(LONG, rate_per_s=None))
    assert found.plan.best[0].layout.prefill_degree == 2
    relaxed = replace(LONG, rate_per_s=None, ttft_s=10.0)  # one worker does, and the others are busy
    alone, shared = make_plan(relaxed, 1).plan.best[0], with_degree(relaxed).plan.best
    assert shared[0] == alone
    assert max(rated.layout.prefill_degree for rated in shared) > 1


def test_a_lossier_codec_has_a_row_only_where_it_ranks_before() -> None:
    best = with_degree(replace(LONG, rate_per_s=None, kv_codec="auto")).plan.best
    assert [str(rated.layout) for rated in best] == ["5 prefill TP1 + 1 decode TP1, prefill degree 2"]
    slow = replace(LONG, rate_per_s=0.1, kv_codec="auto", network_gbit_per_s=1.0)
    assert [rated.layout.codec for rated in with_degree(slow).plan.best][:2] == ["int4", "int8"]


def test_short_prompts_are_planned_as_if_nobody_had_asked() -> None:
    shared, alone = with_degree(DENSE), make_plan(DENSE, 1)
    assert shared.plan.best == alone.plan.best
    assert {rated.layout.prefill_degree for rated in shared.plan.best} == {1}
    assert (shared.file_text, shared.notes) == (alone.file_text, alone.notes)


def test_a_plan_that_does_not_need_it_says_what_sharing_would_gain() -> None:
    relaxed = replace(LONG, ttft_s=10.0, rate_per_s=0.25)
    plan = make_plan(relaxed, 1)
    assert plan.plan.best[0].layout.sets[0].num > 1
    (note,) = [note for note in plan.notes if "--max-prefill-degree" in note]
    assert "longest prompt, of 7,000 tokens, in " in note
    assert "instead of 6.7" in note
    assert not any("--max-prefill-degree" in note for note in with_degree(relaxed).notes)


def test_a_plan_starts_and_simulates_its_degree(tmp_path: Path) -> None:
    found = with_degree(LONG)
    path = tmp_path / "plan.yaml"
    path.write_text(found.file_text)
    planned = parse_plan(found.file_text, path)
    assert planned.gateway.max_prefill_degree == 2
    assert "HALFMOON_GATEWAY_MAX_PREFILL_DEGREE: '2'" in compose_text(planned)
    gateway = gateway_spec(up_options(read_config(path)), PreparedModel(".", "m"))
    assert gateway.environment["HALFMOON_GATEWAY_MAX_PREFILL_DEGREE"] == "2"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(yaml.safe_load(found.file_text)["cluster"]))
    spec, unit = read_cluster(cluster), layout_trial(found.problem, found.plan.models, found.plan.best[0].layout).spec
    assert (spec.max_prefill_degree, unit.max_prefill_degree) == (2, 2)
    passes = [group.layer_passes for group in spec.groups]
    assert passes == [group.layer_passes for group in unit.groups]
    assert passes[0] >= 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gpu": "h100"}, "no workers on h100 compute prompts together"),
        ({"kv_policy": "sinks:4+1024"}, "a prompt under kv_policy sinks:4"),
        ({"max_prefill_degree": 0}, "by 1 prefill worker at least"),
    ],
)
def test_sharing_that_no_worker_does_is_refused(changed: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        make_plan(replace(LONG, **{"max_prefill_degree": 4, **changed}), 1)  # type: ignore[arg-type]


def test_a_map_has_one_worker_for_each_prompt_and_says_so() -> None:
    request = replace(LONG, num_nodes=2, num_requests=20, max_prefill_degree=2)
    found = make_map(request, (8.0,), (0.3,), 1)
    assert "in a map each prompt is computed by one worker" in found.notes
