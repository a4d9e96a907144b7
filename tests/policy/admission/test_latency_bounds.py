"""A request rejected before its prompt is read would have been refused with it, whatever it is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import HalfmoonError
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.latency_bounds import ANY_PROMPT, PromptLowerBound
from halfmoon.policy.admission.qos_classes import ClassTable, Degradation, QosClass
from halfmoon.policy.admission.refusal import AdmissionMode, Refused
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.values import SEEN_WHOLE, MostSeen, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import Role, WorkerView

WORKER = WorkerView(
    "w",
    "both",
    "w:1",
    context_tokens=10_000,
    block_tokens=10,
    total_blocks=1_000,
    free_blocks=1_000,
    step_tokens=512,
    prefill_model=PrefillModel(0.01, 1e-3, 1e-7),
    step_model=StepModel(0.001, 1e-3, 1e-6),
    fetch_s_per_token=1e-5,
)
P, D = replace(WORKER, worker_id="p", role="prefill"), replace(WORKER, worker_id="d", role="decode")
NOW_S = 20.0


@dataclass(frozen=True)
class Earlier:
    """A request that is inside already."""

    num_prompt: int
    max_tokens: int
    priority: int
    entered_s: float
    decodes_since_s: float | None


@dataclass(frozen=True)
class Scene:
    """All that a judgement depends on but the request itself."""

    mode: AdmissionMode
    placement: PlacementMode
    roles: Sequence[Role]
    free_s: Sequence[float]
    earlier: Sequence[Earlier]
    qos: QosClass
    nests_steps: bool = False

    def view(self) -> ClusterView:
        workers = [
            replace(WORKER, worker_id=f"w{i}", role=role, prefill_free_s=free_s, holder=i, nests_steps=self.nests_steps)
            for i, (role, free_s) in enumerate(zip(self.roles, self.free_s, strict=False))
        ]
        return ClusterView([*workers, replace(P, holder=len(workers), nests_steps=self.nests_steps), D])

    def gate(self, view: ClusterView) -> AdmissionController:
        gate = AdmissionController(self.mode, PlacementRules(self.placement), random.Random(0))
        gate.classes = ClassTable((self.qos,))
        for number, one in enumerate(sorted(self.earlier, key=lambda one: one.entered_s)):
            request = PlacementRequest(one.num_prompt, one.max_tokens, priority=one.priority)
            admitted = gate.decide(view, request, QosClass("no promises"), one.entered_s)
            gate.inside.enter(str(number), view, admitted, one.num_prompt, one.entered_s)
            if one.decodes_since_s is not None:
                gate.inside.begin_decode(str(number), one.decodes_since_s)
        gate.note_overheads(0.1, 0.2)
        return gate


times = st.floats(NOW_S - 10, NOW_S)
degradations: tuple[Degradation, ...] = ("cap_max_tokens", "lower_kv_precision", "shed_lowest_class")
scenes = st.builds(
    Scene,
    st.sampled_from(["load", "predicted"]),
    st.sampled_from(["kvcache-centric", "cache-aware", "least-loaded", "random"]),
    st.lists(st.sampled_from(["prefill", "decode", "both"]), max_size=3),
    st.lists(st.floats(NOW_S - 1, NOW_S + 5), min_size=3, max_size=3),
    st.lists(
        st.builds(
            Earlier,
            st.integers(1, 4_000),
            st.integers(1, 4_000),
            st.integers(-1, 1),
            times,
            st.none() | st.floats(NOW_S - 1, NOW_S),
        ),
        max_size=12,
    ),
    st.builds(
        QosClass,
        st.just("x"),
        ttft_s=st.none() | st.floats(0.01, 5),
        tbt_s=st.none() | st.floats(0.001, 0.02),
        degradation=st.lists(st.sampled_from(degradations), unique=True).map(tuple),
        capped_tokens=st.sampled_from([1, 50]),
    ),
    st.booleans(),
)


@given(
    scenes, st.integers(1, 5_000), st.integers(1, 4_000), st.integers(-1, 1), st.lists(st.integers(0, 500), max_size=5)
)
def test_who_would_be_admitted_is_never_refused_unread(
    scene: Scene, num_prompt: int, max_tokens: int, priority: int, num_blocks: Sequence[int]
) -> None:
    view = scene.view()
    unread = unread_refusal(scene, view, priority, has_gaps=max_tokens > 1)
    if unread is None:
        return
    cached_blocks = np.array([*num_blocks, 0])
    request = PlacementRequest(num_prompt, max_tokens, priority=priority, cached_blocks=cached_blocks)
    with pytest.raises(HalfmoonError) as caught:
        scene.gate(view).decide(view, request, scene.qos, NOW_S)
    if isinstance(caught.value, Refused) and caught.value.reason == unread.reason == "ttft":
        assert unread.ttft_s <= caught.value.ttft_s * 1.000001


@given(
    scenes,
    st.integers(1, 3_000),
    st.integers(0, 2_000),
    st.integers(1, 4_000),
    st.integers(-1, 1),
    st.lists(st.integers(0, 300), min_size=5, max_size=5),
    st.lists(st.integers(0, 4), min_size=5, max_size=5),
    st.sampled_from([SEEN_WHOLE, MostSeen(answer=50.0), MostSeen(50.0, 50.0), MostSeen(1_000.0, 1_000.0)]),
)
def test_who_would_be_admitted_is_never_refused_by_the_beginning_of_a_prompt(
    scene: Scene,
    num_known: int,
    num_unread: int,
    max_tokens: int,
    priority: int,
    held: Sequence[int],
    stores: Sequence[int],
    most_seen: MostSeen,
) -> None:
    cached_blocks = np.array([min(one, (num_known - 1) // WORKER.block_tokens) for one in held] + [0])
    view = scene.view()
    for worker, store in zip(view.workers, stores, strict=False):
        view.put(replace(worker, store_holder=store - 1))
    prompt = PromptLowerBound(num_known, cached_blocks, most_seen)
    early = unread_refusal(scene, view, priority, prompt, has_gaps=max_tokens > 1)
    if early is None:
        return
    request = PlacementRequest(
        num_known + num_unread, max_tokens, priority=priority, most_seen=most_seen, cached_blocks=cached_blocks
    )
    gate = scene.gate(view)
    with pytest.raises(HalfmoonError) as caught:
        gate.decide(view, request, scene.qos, NOW_S)
    if isinstance(caught.value, Refused) and caught.value.reason == early.reason == "ttft":
        assert early.ttft_s <= caught.value.ttft_s * 1.000001
        assert early.is_by_others or not caught.value.is_by_others


def test_a_long_prompt_of_which_little_is_kept_is_not_refused_for_its_length() -> None:
    """A step behind 4,000 tokens takes 6 ms, one that sees 50 of them 2 ms."""
    qos, view = QosClass("x", tbt_s=0.004), ClusterView((P, D))
    gate = Scene("predicted", "kvcache-centric", (), (), (), qos).gate(view)
    refusals = [
        gate.early_refusal(view, PromptLowerBound(4_000, most_seen=seen), 0, has_gaps=True, qos=qos, now_s=NOW_S)
        for seen in (SEEN_WHOLE, MostSeen(answer=50.0))
    ]
    assert refusals[0] is not None
    assert (refusals[0].reason, refusals[1]) == ("tbt", None)


def unread_refusal(
    scene: Scene, view: ClusterView, priority: int, prompt: PromptLowerBound = ANY_PROMPT, *, has_gaps: bool
) -> Refused | None:
    gate = scene.gate(view)
    try:
        gate.reject_early(view, priority, has_gaps=has_gaps, qos=scene.qos, now_s=NOW_S)
        return gate.early_refusal(view, prompt, priority, has_gaps=has_gaps, qos=scene.qos, now_s=NOW_S)
    except Refused as refusal:
        return refusal


def busy(mode: AdmissionMode, qos: QosClass) -> tuple[AdmissionController, ClusterView]:
    """Twenty decode for a long time yet."""
    earlier = [Earlier(10, 4_000, 0, NOW_S - 2, NOW_S - 1)] * 20
    scene = Scene(mode, "kvcache-centric", (), (), earlier, qos)
    view = ClusterView((P, D))
    return scene.gate(view), view


@pytest.mark.parametrize("mode", ["load", "predicted"])
def test_decode_workers_that_stay_too_full_need_no_prompt(mode: AdmissionMode) -> None:
    qos = QosClass("x", ttft_s=2.0, tbt_s=0.01)
    gate, view = busy(mode, qos)
    with pytest.raises(
        Refused, match=r"between tokens would be at least [23]\d\.\d ms, class x allows 10 ms"
    ) as caught:
        gate.reject_early(view, 0, has_gaps=True, qos=qos, now_s=NOW_S)
    assert caught.value.reason == "tbt"
    gate.reject_early(view, 0, has_gaps=False, qos=qos, now_s=NOW_S)  # one token has no gap
    gate.reject_early(view, 0, has_gaps=True, qos=QosClass("free"), now_s=NOW_S)


def test_a_queue_that_is_too_long_needs_no_prompt() -> None:
    qos = QosClass("x", ttft_s=2.0, degradation=("shed_lowest_class",))
    gate, view = AdmissionController("predicted", PlacementRules(), random.Random(0)), ClusterView((P, D))
    gate.classes = ClassTable((qos, QosClass("low", priority=1)))
    view.put(replace(P, prefill_free_s=NOW_S + 5))
    with pytest.raises(Refused, match=r"first token would be at least 5\.01 s") as caught:
        gate.reject_early(view, 0, has_gaps=True, qos=qos, now_s=NOW_S)
    assert caught.value.retry_after_ms == pytest.approx(3_011, abs=1)
    with pytest.raises(Refused, match="class low waits"):  # it was told what this means
        gate.reject_early(view, 1_000, has_gaps=True, qos=gate.classes.classes[1], now_s=NOW_S)


def test_a_worker_that_seems_slower_than_another_may_be_quicker_in_truth() -> None:
    qos, view = QosClass("x", ttft_s=0.2), ClusterView((P, D))
    gate = AdmissionController("predicted", PlacementRules("random"), random.Random(0))
    inside = gate.decide(view, PlacementRequest(1, 1), QosClass("free"), NOW_S)
    gate.inside.enter("r", view, inside, 1, NOW_S)
    view.put(replace(P, prefill_free_s=NOW_S + 0.4))  # less than a step: it may all be ours
    view.put(replace(P, worker_id="other", prefill_free_s=NOW_S + 0.3))
    gate.reject_early(view, 0, has_gaps=True, qos=qos, now_s=NOW_S)
    chosen = gate.decide(view, PlacementRequest(2, 2), qos, NOW_S).placement.prefill
    assert chosen.worker_id == "p"


def test_off_refuses_nobody_unread_and_a_probe_is_let_through() -> None:
    qos, view = QosClass("x", ttft_s=0.001), ClusterView((P, D))
    Scene("off", "random", (), (), (), qos).gate(view).reject_early(view, 0, has_gaps=True, qos=qos, now_s=NOW_S)
    gate = Scene("predicted", "random", (), (), (), qos).gate(view)
    for now_s in (NOW_S, NOW_S + 9.9):
        with pytest.raises(Refused):
            gate.reject_early(view, 0, has_gaps=True, qos=qos, now_s=now_s)
    gate.reject_early(view, 0, has_gaps=True, qos=qos, now_s=NOW_S + 10)
    assert gate.decide(view, PlacementRequest(100, 10), qos, NOW_S + 10).placement.ttft_s > 0.001


def test_a_half_that_is_missing_is_not_a_refusal() -> None:
    qos, view = QosClass("x", ttft_s=0.001), ClusterView((P,))
    Scene("predicted", "random", (), (), (), qos).gate(view).reject_early(view, 0, has_gaps=True, qos=qos, now_s=NOW_S)
