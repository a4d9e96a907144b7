"""What is never planned: workers that would refuse to start, or could not hold a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.errors import Incompatible
from halfmoon.plan.planning import problem_from
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.feasible import NoLayout, feasible_models, options
from halfmoon.sim.latency_sources.model_catalogue import MODELS, is_short_name, known_shape, model_shape


def request(**changed: object) -> PlanRequest:
    values = {
        "model": "llama-3-8b",
        "gpu": "h100",
        "workload": "in=512,out=64",
        "ttft_s": 1.0,
        "tpot_s": 0.1,
        "num_requests": 20,
    }
    return PlanRequest(**(values | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "tensors"),
    [("llama-3-8b", {1, 2, 4, 8}), ("smollm2-135m", {1, 3}), ("qwen2.5-14b", {1, 2, 4, 8}), ("qwen2.5-7b", {1, 2, 4})],
)
def test_only_what_divides_heads_is_planned(model: str, tensors: set[int]) -> None:
    problem, _ = problem_from(request(model=model))
    models = feasible_models(problem)
    assert {one.parallelism.tensor for one in models} == tensors
    shape = MODELS[model]
    for one in models:
        shape.check(one.parallelism.tensor, one.parallelism.pipeline)
    with pytest.raises(Incompatible, match="exceeds the model's"):
        shape.check(1, shape.num_layers + 1)


def test_sequence_ranks_are_proposed_for_long_prompts_alone_and_to_prefill_workers() -> None:
    def found(workload: str) -> set[int]:
        problem, _ = problem_from(request(workload=workload, ttft_s=5.0))
        models = feasible_models(problem)
        chosen = options(problem, models)
        assert {one.role for one in chosen if one.kind.parallelism.sequence > 1} <= {"prefill"}
        assert all(one.bound.most_per_s > 0 for one in chosen)
        return {one.kind.parallelism.sequence for one in chosen if one.role == "prefill"}

    assert found("in=512,out=64") == {1}
    assert found("in=7000,out=64") == {1, 2, 4, 8}


@settings(max_examples=20, deadline=None)
@given(st.integers(100, 8000), st.sampled_from(["llama-3-8b", "opt-13b"]), st.sampled_from(["l40s", "a100-80g"]))
def test_every_option_holds_the_longest_request(prompt: int, model: str, gpu: str) -> None:
    problem, _ = problem_from(
        request(model=model, gpu=gpu, workload=f"in={prompt},out=9", ttft_s=60.0, tpot_s=9.0, context_tokens=9000)
    )
    models = feasible_models(problem)
    assert all(models[one.kind].kv_tokens >= prompt + 9 for one in options(problem, models))


def test_a_role_has_the_gpu_that_is_named_for_it() -> None:
    problem, _ = problem_from(request(gpu="h100:1x8,a100-80g:1x8", prefill_gpu="h100", decode_gpu="a100-80g"))
    found = {(one.role, one.kind.gpu) for one in options(problem, feasible_models(problem))}
    assert {gpu for role, gpu in found if role == "prefill"} == {"h100"}
    assert {gpu for role, gpu in found if role == "decode"} == {"a100-80g"}
    assert {gpu for role, gpu in found if role == "both"} == {"h100", "a100-80g"}


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (
            lambda: feasible_models(problem_from(request(model="llama-3.1-405b", gpus_per_node=1))[0]),
            "does not fit on 1 x h100",
        ),
        (lambda: problem_from(request(workload="in=9000,out=1")), "longer than the model's context of 8,192"),
    ],
)
def test_what_does_not_fit_is_explained(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(NoLayout.__bases__[0], match=says):
        ask()


def test_names_of_repositories_are_those_of_known_models() -> None:
    assert known_shape("meta-llama/Llama-3.1-8B-Instruct") is MODELS["llama-3.1-8b"]
    assert known_shape("meta-llama/Llama-2-70b-chat-hf") is MODELS["llama-2-70b"]
    assert model_shape("demo") is MODELS["smollm2-135m"]
    assert known_shape("someone/else") is None


def test_a_short_name_is_one_that_only_the_catalogue_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_short_name("llama-3.1-8b")
    assert is_short_name("llama-3.1-8b+awq")
    assert not any(map(is_short_name, ("demo", "meta-llama/Llama-3.1-8B-Instruct", "./llama-3.1-8b", "unheard-of")))
    (tmp_path / "llama-3.1-8b").mkdir()
    assert not is_short_name("llama-3.1-8b")
