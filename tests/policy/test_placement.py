"""Placement is a pure function of the cluster view."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import Unavailable
from halfmoon.policy.cluster_view import ClusterView, Role, WorkerView
from halfmoon.policy.placement import ContextLengthExceeded, place


def worker(worker_id: str, role: Role, **changed: int | bool) -> WorkerView:
    plain = WorkerView(worker_id, role, f"{worker_id}:1", 1000, 16, 100, 100)
    return replace(plain, **changed)  # type: ignore[arg-type]


def chosen(*workers: WorkerView, exclude: tuple[str, ...] = (), num_prompt_tokens: int = 100) -> tuple[str, str]:
    placement = place(ClusterView(workers), num_prompt_tokens, 50, exclude)
    return placement.prefill.worker_id, placement.decode.worker_id


P0, P1 = worker("p0", "prefill"), worker("p1", "prefill")
D0, D1 = worker("d0", "decode"), worker("d1", "decode")
B0 = worker("b0", "both")


def test_the_least_loaded_of_each_half() -> None:
    assert chosen(P0, P1, D0, D1) == ("p0", "d0")
    assert chosen(replace(P0, waiting_prefill_tokens=1), P1, replace(D0, num_running=1), D1) == ("p1", "d1")
    assert chosen(P0, replace(D0, num_reserved=1), D1) == ("p0", "d1")
    assert chosen(P0, replace(D0, num_placed=1), D1) == ("p0", "d1")
    assert chosen(P0, replace(D0, free_blocks=99), D1) == ("p0", "d1")


def test_room_now_goes_before_few_requests() -> None:
    assert chosen(P0, replace(D0, free_blocks=2), replace(D1, num_running=30)) == ("p0", "d1")
    assert chosen(P0, replace(D0, free_blocks=2)) == ("p0", "d0")  # it may have some by then


def test_a_worker_of_both_roles_is_both_halves() -> None:
    placement = place(ClusterView((B0,)), 10, 10)
    assert placement.is_colocated
    assert placement.decode_address == ""
    assert chosen(replace(B0, waiting_prefill_tokens=9), P0, D0) == ("p0", "d0")
    assert chosen(B0, replace(P0, waiting_prefill_tokens=9), D0) == ("b0", "b0")
    assert place(ClusterView((P0, D0)), 10, 10).decode_address == "d0:1"


def test_who_is_not_ready_is_not_chosen() -> None:
    assert chosen(replace(P0, draining=True), P1, replace(D0, listening=False), D1) == ("p1", "d1")
    assert chosen(P0, P1, D0, D1, exclude=("p0", "d0")) == ("p1", "d1")


def test_what_is_missing_is_said() -> None:
    for view, missing in (
        ((), "no prefill worker and no decode worker"),
        ((P0,), "no decode worker"),
        ((P0, replace(D0, listening=False)), "no decode worker"),
        ((D0, replace(P0, draining=True)), "no prefill worker"),
        ((replace(B0, listening=False),), "no prefill worker and no decode worker"),
    ):
        with pytest.raises(Unavailable, match=missing) as caught:
            place(ClusterView(view), 1, 1)
        assert caught.value.retry_after_ms
    assert ClusterView((P0, D0)).missing == ()
    assert ClusterView((B0,)).missing == ()


def test_too_long_for_anybody() -> None:
    for num_prompt_tokens, max_tokens in ((1000, 1), (900, 200)):
        with pytest.raises(ContextLengthExceeded) as caught:
            place(ClusterView((P0, D0)), num_prompt_tokens, max_tokens)
        assert caught.value.retry_after_ms is None
    with pytest.raises(ContextLengthExceeded, match=r"40 tokens of prompt and 10 of output .* at most 32 tokens"):
        place(ClusterView((P0, replace(D0, total_blocks=2))), 40, 10)


def test_all_excluded() -> None:
    with pytest.raises(Unavailable, match="refused"):
        chosen(P0, D0, exclude=("d0",))


WORKERS = st.builds(
    WorkerView,
    worker_id=st.sampled_from([f"w{i}" for i in range(6)]),
    role=st.sampled_from(["prefill", "decode", "both"]),
    address=st.just("h:1"),
    context_tokens=st.integers(1, 300),
    block_tokens=st.just(16),
    total_blocks=st.integers(1, 20),
    free_blocks=st.integers(0, 20),
    num_running=st.integers(0, 5),
    waiting_prefill_tokens=st.integers(0, 500),
    draining=st.booleans(),
    listening=st.booleans(),
)


@given(st.lists(WORKERS, max_size=6, unique_by=lambda one: one.worker_id), st.integers(1, 200), st.integers(1, 100))
def test_a_placement_is_always_one_that_can_work(workers: list[WorkerView], num_prompt: int, max_tokens: int) -> None:
    view = ClusterView(tuple(workers))
    try:
        placement = place(view, num_prompt, max_tokens, exclude=("w0",))
    except (Unavailable, ContextLengthExceeded):
        return
    prefill, decode = placement.prefill, placement.decode
    assert not prefill.draining
    assert not decode.draining
    assert decode.listening
    assert decode.holds(num_prompt + max_tokens)
    assert "w0" not in (prefill.worker_id, decode.worker_id)
    assert (prefill.role, decode.role) in (("prefill", "decode"), ("both", "both"))
    assert (prefill is decode) == (prefill.role == "both") == (placement.decode_address == "")
    assert placement == place(ClusterView(tuple(reversed(workers))), num_prompt, max_tokens, exclude=("w0",))
