"""Where a running answer moves to."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import StepModel
from halfmoon.policy.placement.move import move_target, tail_tokens, whole_blocks
from halfmoon.policy.values import DecodeLoads, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import Role, WorkerView
from tests.policy.placement.test_place import worker

STEP = StepModel(0.01, 0.001, 0.0)


def decoder(worker_id: str, role: Role = "decode", **changed: Any) -> WorkerView:
    return worker(worker_id, role, step_model=STEP, fetch_s_per_token=1e-6, **changed)


def target(*workers: WorkerView, batch: tuple[float, ...] = (), room: int = 50, tokens: int = 100) -> str | None:
    view = ClusterView(workers)
    loads = DecodeLoads(np.array(batch or [0.0] * len(workers)), np.zeros(len(workers)))
    request = PlacementRequest(tokens, room, exclude=("d0",))
    placement = move_target(view, request, loads, np.ones(len(workers), dtype=np.bool_), random.Random(1))
    assert placement is None or placement.is_colocated
    return None if placement is None else placement.decode.worker_id


def test_to_the_least_busy_one_that_decodes_too() -> None:
    others = (decoder("d1"), decoder("b1", "both"), decoder("p1", "prefill"))
    assert target(decoder("d0"), *others, batch=(0, 5, 3, 0)) == "b1"
    assert target(decoder("d0"), *others, batch=(0, 2, 3, 0)) == "d1"


@pytest.mark.parametrize(
    "unfit",
    [
        {"free_blocks": 7},
        {"draining": True},
        {"listening": False},
        {"max_running": 2, "num_running": 2},
        {"fetch_s_per_token": math.inf},
        {"context_tokens": 149},
    ],
)
def test_only_where_all_of_it_has_room_and_its_kv_can_be_loaded(unfit: dict[str, Any]) -> None:
    assert target(decoder("d0"), decoder("d1")) == "d1"
    chosen = {"fetch_s_per_token": 1e-6, **unfit}
    assert target(decoder("d0"), worker("d1", "decode", step_model=STEP, **chosen)) is None


def test_blocks_of_another_kind_are_no_help() -> None:
    view = ClusterView([decoder("d0"), decoder("d1")])
    loads = DecodeLoads(np.zeros(2), np.zeros(2))
    other = np.array([True, False])
    assert move_target(view, PlacementRequest(9, 9, exclude=("d0",)), loads, other, random.Random(1)) is None


@given(st.integers(1, 5000), st.sampled_from([1, 8, 64]))
def test_the_last_token_is_not_computed_yet(num_tokens: int, block_tokens: int) -> None:
    tail = tail_tokens(num_tokens, block_tokens)
    assert 1 <= tail <= block_tokens
    assert whole_blocks(num_tokens, block_tokens) * block_tokens + tail == num_tokens
