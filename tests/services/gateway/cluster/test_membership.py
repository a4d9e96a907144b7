"""The members of the cluster, and what the policies see of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halfmoon.errors import AlreadyHere, Incompatible, InvalidRequest
from halfmoon.kv.kv_policy import SNAPKV, KVPolicy, policy_salt
from halfmoon.pb.gateway_pb2 import BlockEvents, LatencyProfile, StepTiming, WorkerIdentity, WorkerLoad
from halfmoon.pb.types_pb2 import (
    BOTH,
    PREFILL,
    ROLE_UNSPECIFIED,
    KVLayout,
)
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel
from halfmoon.policy.view.block_index import BlockEvents as StoredBlocks
from halfmoon.policy.view.block_index import unpack_keys
from halfmoon.policy.view.worker_view import WorkerView
from halfmoon.sim.latency_sources.worker_profile import coefficients
from services.gateway.cluster.membership import Membership
from tests.services.gateway.fakes import FINGERPRINT, LAYOUT


def identity(worker_id: str = "w", **changed: object) -> WorkerIdentity:
    fields: dict[str, object] = {
        "worker_id": worker_id,
        "role": PREFILL,
        "address": "h:1",
        "model_fingerprint": FINGERPRINT,
        "layout": LAYOUT,
        "context_tokens": 64,
        "total_blocks": 10,
    }
    return WorkerIdentity(**{**fields, **changed})  # type: ignore[arg-type]


def test_three_missed_heartbeats_mean_dead() -> None:
    membership = Membership(FINGERPRINT, heartbeat_interval_s=1.0)
    first, second = membership.join(identity("a"), 0.0), membership.join(identity("b"), 0.0)
    membership.report(first, WorkerLoad(free_blocks=4), 2.5)
    assert membership.overdue(3.0) == []
    assert membership.overdue(3.1) == [second]
    assert membership.overdue(5.6) == [first, second]
    assert membership.leave(second, 6.0)
    assert not membership.leave(second, 6.0)
    assert [one.worker_id for one in membership.view().workers] == ["a"]
    assert membership.view().workers[0].free_blocks == 4


def test_a_worker_that_comes_again_replaces_itself() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    old = membership.join(identity(), 0.0)
    other = KVLayout(num_layers=9, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=8)
    new = membership.join(identity(layout=other), 1.0)
    assert not membership.leave(old, 2.0)
    assert membership.members() == [new]


def test_a_worker_started_again_at_its_address_stays_a_source_once_the_old_one_is_dead() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    old, new = membership.join(identity("old"), 0.0), membership.join(identity("new"), 1.0)
    assert membership.leave(old, 3.0)
    (source,) = membership.worker_sources([new.holder], np.full(new.holder + 1, 7))
    assert (source.address, source.num_blocks) == ("h:1", 7)
    assert membership.leave(new, 4.0)
    assert membership.worker_sources([new.holder], np.full(new.holder + 1, 7)) == []


def test_a_worker_id_belongs_to_the_process_that_came_first() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(), 0.0, b"key")
    for key in (b"", b"kez", b"key2"):
        with pytest.raises(AlreadyHere, match=r"^this worker id is taken$"):
            membership.join(identity(model_fingerprint="guessed"), 1.0, key)
    assert membership.members() == [member]
    assert "b'key'" not in repr(member)
    again = membership.join(identity(), 2.0, b"key")
    assert membership.leave(again, 3.0)
    membership.join(identity(), 4.0, b"another process's")


def test_wrong_workers_are_refused() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    membership.join(identity("a"), 0.0)
    with pytest.raises(Incompatible, match=f"other.*{FINGERPRINT}"):
        membership.join(identity("b", model_fingerprint="other"), 0.0)
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
        layout = KVLayout()
        layout.CopyFrom(LAYOUT)
        setattr(layout, name, 9)
        with pytest.raises(Incompatible, match=f"worker b has {name} 9, worker a has {name} {getattr(LAYOUT, name)}:"):
            membership.join(identity("b", layout=layout), 0.0)
    with pytest.raises(Incompatible, match="worker b has kv_frame_version 2, worker a has kv_frame_version 0:"):
        membership.join(identity("b", kv_frame_version=2), 0.0)
    with pytest.raises(InvalidRequest) as caught:
        membership.join(identity("b", role=ROLE_UNSPECIFIED), 0.0)
    assert caught.value.param == "role"
    with pytest.raises(InvalidRequest):
        membership.join(identity(""), 0.0)
    assert [one.worker_id for one in membership.members()] == ["a"]


def test_workers_may_differ_in_dtype() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    for dtype in ("float32", "float16", "bfloat16"):
        layout = KVLayout(dtype=dtype)
        layout.MergeFrom(KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=8))
        membership.join(identity(dtype, layout=layout), 0.0)
    assert len(membership.members()) == 3
    assert [layout.dtype for layout in membership.kv_layouts] == ["float32", "float16", "bfloat16"]
    assert [worker.kv_dtype for worker in membership.view().workers] == ["float32", "float16", "bfloat16"]
    membership.leave(membership.members()[0], 1.0)
    assert [layout.dtype for layout in membership.kv_layouts] == ["float16", "bfloat16"]


def shown(membership: Membership, number: int = 0) -> WorkerView:
    return membership.view().workers[number]


def test_what_was_sent_counts_until_the_next_report() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(), 0.0)
    membership.report(member, WorkerLoad(waiting_prefill_tokens=5), 1.0)
    membership.note_placed("r1", member, member, 100, 3.0)
    membership.note_placed("r2", member, member, 10, 3.0)
    assert (shown(membership).waiting_prefill_tokens, shown(membership).num_placed) == (115, 2)
    membership.note_prefilled("r1", member, PrefillSample(100, 0, 0.5), 3.5)
    assert (shown(membership).waiting_prefill_tokens, shown(membership).num_placed) == (15, 2)
    membership.note_ended("r2", member, member, 4.0)
    assert (shown(membership).waiting_prefill_tokens, shown(membership).num_placed) == (5, 1)
    membership.report(member, WorkerLoad(num_running=1), 2.0)
    assert shown(membership).num_requests == 1


def test_a_decode_worker_that_left_is_not_busy_with_a_prompt_that_is_ready_for_it() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    prefill, decode = (membership.join(identity(name), 0.0) for name in ("p", "d"))
    for begin_s, leaves in ((0.0, False), (10.0, True)):
        request_id = f"r{begin_s}"
        membership.note_placed(request_id, prefill, decode, 100, begin_s + 1.0)
        if leaves:
            membership.leave(decode, begin_s + 1.5)
        membership.note_prefilled(request_id, prefill, PrefillSample(100, 0, 1.0), begin_s + 2.0)
        membership.note_ended(request_id, prefill, decode, begin_s + 3.0)
        mean_busy = membership.view().busy.mean_busy_colocated("p", begin_s + 2.0, begin_s + 4.0)
        assert mean_busy == (0.0 if leaves else 0.5)


def test_speeds_follow_what_is_measured() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(), 0.0)
    membership.note_prefilled("r1", member, PrefillSample(80, 20, 0.8), 2.0)
    steps = [StepTiming(batch=2, context_tokens=50, seconds=0.01)] * 3
    membership.report(member, WorkerLoad(steps=steps, waiting_prefill_tokens=80), 2.0)
    assert shown(membership).prefill_model.seconds(80, 20) == pytest.approx(0.8)
    assert shown(membership).step_model.seconds(2, 50) == pytest.approx(0.01)
    assert shown(membership).prefill_free_s == pytest.approx(2.0 + 80 * shown(membership).prefill_model.b)


def test_steps_tell_what_prefills_take_where_a_worker_reports_them() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(step_tokens=512), 0.0)
    membership.note_prefilled("r1", member, PrefillSample(100, 0, 0.8), 2.0)  # it shared its steps
    assert not any(shown(membership).prefill_model)
    decode = StepTiming(batch=2, context_tokens=50, seconds=0.01)
    mixed = StepTiming(batch=2, context_tokens=50, seconds=0.31, prefill_tokens=300, prefill_pairs=30_000)
    membership.report(member, WorkerLoad(steps=[decode] * 20 + [mixed] * 20), 2.0)
    assert shown(membership).step_model.seconds(2, 50) == pytest.approx(0.01)
    assert shown(membership).prefill_model.seconds(300, -50) == pytest.approx(0.31, rel=0.01)


@pytest.mark.parametrize("num_decodes", [8, 40])
def test_a_worker_of_both_roles_prefills_as_fast_as_one_that_only_does(num_decodes: int) -> None:
    """Its prompts run beside decodes, whose products they hide: what they add to such a step is less than they take."""
    latency = coefficients("test", PrefillModel(0.02, 4e-4, 0.0), StepModel(0.06, 1.5e-3, 2e-7), 200_000, 131_072)
    context_tokens = 400 * num_decodes
    decode_s = latency.stage_s(0, 0, num_decodes, context_tokens)
    decode = StepTiming(batch=num_decodes, context_tokens=context_tokens, seconds=decode_s)
    mixed = [
        StepTiming(
            batch=num_decodes,
            context_tokens=context_tokens,
            seconds=latency.stage_s(num_tokens, num_tokens**2 / 2, num_decodes, context_tokens),
            prefill_tokens=num_tokens,
            prefill_pairs=num_tokens**2 // 2,
        )
        for num_tokens in (512, 384, 512, 448)
    ]
    membership = Membership(FINGERPRINT, 1.0)
    profile = LatencyProfile(kind="k", prefill=latency.policy_prefill, step=latency.policy_step)
    member = membership.join(identity(step_tokens=4096, profile=profile), 0.0)
    membership.report(member, WorkerLoad(steps=[decode] * 20 + mixed * 20), 2.0)
    assert shown(membership).prefill_model.seconds(3000) == pytest.approx(1.22, rel=0.02)


def test_ends_of_moved_answers_say_nothing_of_prompts() -> None:
    """They cost less than the decodes' time varies."""
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(step_tokens=4096), 0.0)
    prompts = [
        StepTiming(seconds=0.02 + 4e-4 * n, prefill_tokens=n, prefill_pairs=n * n / 2) for n in (500, 1000, 2000)
    ]
    decode = StepTiming(batch=8, context_tokens=2000, seconds=0.07)
    ends = [
        StepTiming(batch=8, context_tokens=2000, seconds=0.07 + 1e-4 * n, prefill_tokens=n, prefill_pairs=300 * n)
        for n in (4, 8, 12, 16)
    ]
    membership.report(member, WorkerLoad(steps=prompts * 10 + [decode] * 20), 2.0)
    for at_s in range(3, 63):
        membership.report(member, WorkerLoad(steps=ends), float(at_s))
    assert shown(membership).prefill_model.seconds(3000) == pytest.approx(1.22, rel=0.1)


def test_right_guesses_shorten_the_time_between_tokens() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(step_tokens=512), 0.0)
    decode = StepTiming(batch=2, context_tokens=50, seconds=0.03, drafts=9, right_drafts=4)  # three tokens each
    mixed = StepTiming(
        batch=2, context_tokens=50, seconds=0.33, prefill_tokens=300, prefill_pairs=30_000, drafts=9, right_drafts=4
    )
    membership.report(member, WorkerLoad(steps=[decode] * 20 + [mixed] * 20), 2.0)
    assert shown(membership).step_model.seconds(2, 50) == pytest.approx(0.01)
    assert shown(membership).whole_step_model.seconds(2, 50) == pytest.approx(0.03)
    assert shown(membership).prefill_model.seconds(300, -50) == pytest.approx(0.33, rel=0.05)
    membership.report(member, WorkerLoad(steps=[StepTiming(batch=2, context_tokens=50, seconds=0.012)] * 60), 3.0)
    assert shown(membership).tokens_per_step < 1.5, "guesses that ceased are forgotten within some steps"


def test_chunks_are_predicted_by_the_speed_that_is_measured() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    profile = LatencyProfile(kind="k", prefill=[0.01, 1e-3, 0.0], step=[0.02, 1e-3, 0.0])
    member = membership.join(identity(profile=profile, follows_targets=True, step_tokens=512), 0.0)
    start = shown(membership).chunk_rule
    assert (start.prefill, start.step) == (PrefillModel(0.01, 1e-3, 0.0), StepModel(0.02, 1e-3, 0.0))
    prompt = StepTiming(seconds=2 * 0.21, prefill_tokens=200, prefill_pairs=20_000)
    steps = [StepTiming(batch=2, context_tokens=50, seconds=2 * 0.022)] * 40 + [prompt] * 20
    for at_s in range(1, 11):
        membership.report(member, WorkerLoad(steps=steps), float(at_s))
    assert shown(membership).chunk_rule.step.seconds(2, 50) == pytest.approx(0.044, rel=0.05)
    assert shown(membership).chunk_rule.prefill.seconds(200) == pytest.approx(0.42, rel=0.05)


def test_a_worker_is_taken_for_one_of_its_kind_while_little_is_known_of_it() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    known, slow = membership.join(identity("a"), 0.0), membership.join(identity("b"), 0.0)
    for _ in range(8):
        membership.note_prefilled("", known, PrefillSample(100, 0, 0.1), 1.0)
    membership.note_prefilled("", slow, PrefillSample(100, 0, 9.0), 1.0)  # its first: it was just waking up
    assert shown(membership, 1).prefill_model.seconds(100) == pytest.approx(0.1)
    for _ in range(8):
        membership.note_prefilled("", slow, PrefillSample(100, 0, 9.0), 2.0)
    assert shown(membership, 1).prefill_model.seconds(100) == pytest.approx(9.0)
    membership.note_prefilled("", known, PrefillSample(100, 0, 0.1), 61.0)
    membership.report(slow, WorkerLoad(), 63.0)  # that was a minute ago: it may be worth another try
    assert shown(membership, 1).prefill_model.seconds(100) == pytest.approx(0.1)


def test_blocks_are_known_as_long_as_their_worker_is() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(), 0.0)
    keys = unpack_keys(bytes(range(1, 17)))
    assert membership.note_blocks(member, BlockEvents(sequence=1, is_snapshot=True, stored=keys.tobytes()))
    assert membership.index.match(keys)[member.holder] == 2
    assert not membership.note_blocks(member, BlockEvents(sequence=3))
    membership.leave(member, 1.0)
    assert membership.index.num_pairs == 0
    assert membership.note_blocks(member, BlockEvents(sequence=4))  # too late to matter


def test_a_worker_restores_what_all_stores_have_together() -> None:
    membership = Membership(FINGERPRINT, 1.0, stores=("far:1",))
    member = membership.join(identity(kv_store="near:1"), 0.0)
    keys = unpack_keys(bytes(range(1, 33)))
    for address, stored in (("near:1", keys[[0, 2]]), ("far:1", keys[[1]])):
        assert membership.stores.note_blocks(address, StoredBlocks(1, stored, is_snapshot=True))
    assert membership.index.match(keys)[member.store_holder] == 3
    assert membership.index.match(keys)[membership.stores.number("near:1")] == 1
    assert membership.stores.addresses == {"near:1", "far:1"}
    membership.leave(member, 1.0)
    assert membership.stores.addresses == {"far:1"}
    assert membership.index.match(keys).max() == 0


def test_the_smallest_context_counts() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    assert membership.context_tokens(100) == 100
    membership.join(identity(), 0.0)
    assert membership.context_tokens(100) == 64
    assert membership.context_tokens(32) == 32
    small = membership.join(identity("small", total_blocks=3), 0.0)
    assert membership.context_tokens(100) == 3 * LAYOUT.block_tokens
    membership.leave(small, 1.0)
    assert membership.context_tokens(100) == 64
    membership.leave(membership.members()[0], 2.0)
    assert membership.context_tokens(100) == 64  # it may come back


def test_what_a_policy_chooses_needs_room_beside_a_request() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    sinks, chooses, all_of_it = (
        policy_salt(policy, b"") for policy in (KVPolicy(16, 8), KVPolicy(10, 8, SNAPKV), KVPolicy(99, 8, SNAPKV))
    )
    membership.join(identity(), 0.0)
    assert membership.context_tokens(100, chooses) == 64  # its memory holds more
    membership.join(identity("small", total_blocks=7), 0.0)
    lengths = [membership.context_tokens(100, salt) for salt in (b"", sinks, chooses, all_of_it)]
    assert lengths == [56, 56, 40, 56], "nothing is chosen of a prompt that fits with 99 tokens chosen"


def test_whether_a_worker_may_be_ready_soon() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    assert not membership.expects_worker(0.0)
    prefill = membership.join(identity("p"), 0.0)
    assert not membership.expects_worker(0.0)
    both = membership.join(identity("b", role=BOTH), 0.0)
    assert membership.expects_worker(0.0)
    membership.set_listening(both, True)
    assert not membership.expects_worker(0.0)
    membership.report(both, WorkerLoad(draining=True), 1.0)
    assert membership.expects_worker(1.0)
    membership.leave(both, 10.0)
    assert membership.expects_worker(15.0)
    assert not membership.expects_worker(15.1)
    assert membership.members() == [prefill]


def test_silence_that_is_ours_is_excused() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(profile=LatencyProfile(prefill=[0.0, 0.01, 0.0])), 0.0)
    membership.excuse(1.5, 9.0)
    assert membership.overdue(12.0) == []
    assert membership.overdue(12.1) == [member]
    membership.report(member, WorkerLoad(waiting_prefill_tokens=80), 13.0)
    free_s = shown(membership).prefill_free_s
    membership.excuse(1.5, 14.0)
    membership.set_listening(member, True)
    assert shown(membership).prefill_free_s == free_s  # the worker has gone on meanwhile


def test_a_gateway_that_is_slow_all_the_time_takes_its_part_of_a_silence() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member = membership.join(identity(), 0.0)
    for now_s in (1.25, 2.5, 3.75):
        membership.excuse(0.75, now_s)  # later than it wanted to look
    assert membership.overdue(5.25) == []
    assert membership.overdue(5.5) == [member]
    for _ in range(9):
        membership.excuse(0.75, 5.5)
    assert membership.overdue(8.5) == []
    assert membership.overdue(8.75) == [member]  # nobody is heard of in the future


def test_a_worker_that_measured_itself_is_predicted_from_the_first_request_on() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    profile = LatencyProfile(kind="k", prefill=[0.01, 1e-3, 0.0], step=[0.02, 0.0, 0.0])
    membership.join(identity(profile=profile), 0.0)
    assert shown(membership).prefill_model.seconds(100) == pytest.approx(0.11)
    assert shown(membership).step_model.seconds(3, 70) == pytest.approx(0.02)
    for wrong in ([1.0], [1.0, -1.0, 0.0], [math.nan, 0.0, 0.0]):
        with pytest.raises(InvalidRequest, match="latency profile"):
            membership.join(identity("v", profile=LatencyProfile(prefill=wrong)), 0.0)


def test_the_context_is_that_of_the_smallest_member_or_of_the_last_one() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    assert membership.context_tokens(1_000) == 1_000
    small = membership.join(identity("small", context_tokens=50, total_blocks=100), 0.0)
    large = membership.join(identity("large", context_tokens=500, total_blocks=10), 0.0)
    assert membership.context_tokens(1_000) == 50
    assert membership.leave(small, 1.0)
    assert membership.context_tokens(1_000) == 10 * LAYOUT.block_tokens
    assert membership.leave(large, 1.0)
    assert membership.context_tokens(1_000) == 10 * LAYOUT.block_tokens


def test_it_is_told_once_that_the_view_is_out_of_date() -> None:
    membership = Membership(FINGERPRINT, 1.0)
    member, stale = membership.join(identity(), 0.0), []
    membership.on_stale = lambda: stale.append(True)
    for now_s in (1.0, 2.0):
        membership.report(member, WorkerLoad(free_blocks=3), now_s)
    assert len(stale) == 1
    membership.refresh()
    membership.report(member, WorkerLoad(free_blocks=4), 3.0)
    assert len(stale) == 2
