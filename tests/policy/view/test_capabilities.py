"""Capabilities: what the members can do together, and when that is computed again."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.view.capabilities import RoleMasks
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import Role, WorkerView

P = WorkerView("p", "prefill", "p:1", 1_000, 10, 100, 100, prefill_model=PrefillModel(0.1, 0.01, 0.0))
D = WorkerView("d", "decode", "d:1", 1_000, 10, 50, 50, step_model=StepModel(0.1, 0.01, 0.0))
B = WorkerView("b", "both", "b:1", 1_000, 10, 80, 80, prefill_model=P.prefill_model, step_model=D.step_model)


def test_an_empty_cluster_can_do_nothing() -> None:
    known = ClusterView().capabilities
    assert (known.is_complete, known.knows_prefills, known.knows_steps) == (False, False, False)
    assert (known.least_capacity_tokens, known.most_capacity_tokens) == (math.inf, 0)


def test_both_roles_are_needed_or_one_worker_of_both() -> None:
    for workers, is_complete in (((P,), False), ((D,), False), ((P, D), True), ((B,), True)):
        assert ClusterView(workers).capabilities.is_complete == is_complete
    assert not ClusterView((P, replace(D, draining=True))).capabilities.is_complete


def test_prefill_workers_are_useless_without_a_decode_worker() -> None:
    assert ClusterView((P, B)).capabilities.useful.prefill.tolist() == [False, False]
    assert ClusterView((P, B, D)).capabilities.useful.prefill.tolist() == [True, False, False]


def test_capacity_is_that_of_present_workers() -> None:
    known = ClusterView((P, D, replace(B, draining=True))).capabilities
    assert (known.least_capacity_tokens, known.most_capacity_tokens) == (500, 1_000)


def test_load_leaves_capabilities_alone_and_everything_else_renews_them() -> None:
    view = ClusterView((P, D))
    known = view.capabilities
    view.put(replace(D, free_blocks=3, num_running=7))
    assert view.capabilities is known
    changes = (
        replace(D, draining=True),
        replace(D, total_blocks=51),
        replace(D, step_model=StepModel(0.2)),
        replace(D, worker_id="other"),
    )
    for changed in changes:
        view.put(changed)
        assert view.capabilities is not known
        known = view.capabilities
    view.remove("other")
    assert view.capabilities is not known


def test_what_a_prefill_worker_measured_of_decodes_is_no_knowledge_of_decode_workers() -> None:
    may_change = replace(P, step_model=D.step_model)
    unknown = replace(D, step_model=StepModel())
    assert not ClusterView((may_change, unknown)).capabilities.knows_steps
    assert ClusterView((may_change, D)).capabilities.knows_steps
    assert ClusterView((may_change, B)).capabilities.knows_steps


def test_equal_models_are_recognized_by_role() -> None:
    faster = replace(B, worker_id="c", prefill_model=PrefillModel(0.1, 0.02, 0.0))
    known = ClusterView((B, faster, P, D)).capabilities
    assert (known.is_one_speed, known.is_one_step_time_of_both, known.is_one_step_time_of_decode) == (False, True, True)
    slower = replace(D, worker_id="e", step_model=StepModel(0.2))
    known = ClusterView((B, P, D, slower)).capabilities
    assert (known.is_one_speed, known.is_one_step_time_of_both, known.is_one_step_time_of_decode) == (True, True, False)


roles: tuple[Role, ...] = ("prefill", "decode", "both")


@given(st.lists(st.sampled_from(roles), max_size=8))
def test_useful_masks_place_exactly_what_all_masks_place(of_rows: list[Role]) -> None:
    masks = RoleMasks(*(np.array([role == wanted for role in of_rows], dtype=np.bool_) for wanted in roles))
    useful = masks.useful
    assert useful.is_any == masks.is_any
    assert not (useful.prefill & ~masks.prefill).any()
    assert useful.prefill.any() <= masks.decode.any()
